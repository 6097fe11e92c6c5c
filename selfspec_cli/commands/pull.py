"""`selfspec pull`: download a model."""

from __future__ import annotations

from selfspec_cli.commands import configs
from selfspec_cli.commands.screen import PULL_GOES_ON, guard
from selfspec_cli.commands.shared import Debug, DryRun, Json, Overrides, command


@command(
    epilog="Examples: selfspec pull model=HuggingFaceTB/SmolLM2-135M-Instruct   ·   selfspec pull model=ORG/NAME "
    "model.revision=COMMIT draft_weights=int4 engine=h100"
)
def pull(overrides: Overrides = None, as_json: Json = False, dry_run: DryRun = False, debug: Debug = False) -> None:
    """Download a model from the Hugging Face Hub: only what vLLM reads, at one commit; go on after a break."""
    with guard(as_json, debug, PULL_GOES_ON):
        from selfspec_cli.commands import pulling

        pulling.pull(configs.one(overrides, None), as_json=as_json, dry_run=dry_run)
