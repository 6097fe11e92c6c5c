"""`selfspec serve`: become vLLM's server."""

from __future__ import annotations

from selfspec_cli.commands import configs, deploying
from selfspec_cli.commands.screen import guard
from selfspec_cli.commands.shared import Config, Debug, DryRun, Json, Overrides, command


@command(
    epilog="Examples: selfspec serve tuned=llama3_8b engine=h100   ·   selfspec serve layer=3 k=4 gate=margin -- "
    "--port 8001 --api-key KEY   ·   selfspec serve tuned=llama3_8b engine=h100 replicas=2"
)
def serve(
    overrides: Overrides = None,
    config: Config = None,
    as_json: Json = False,
    dry_run: DryRun = False,
    debug: Debug = False,
) -> None:
    """Start vLLM's OpenAI-compatible server with draft settings; what you type after -- is handed to vLLM unchanged.
    replicas=N starts N servers, each on GPUs of its own, behind one address."""
    with guard(as_json, debug):
        from selfspec_cli.stages import replicas

        words = list(overrides or [])
        split = next((place for place, word in enumerate(words) if word.startswith("-")), len(words))
        count, router, own = replicas.asked(words[:split])
        cfg = configs.one(own, config)
        deploying.serve(cfg, words[split:], count, router, as_json=as_json, dry_run=dry_run)
