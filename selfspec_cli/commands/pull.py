"""`selfspec pull`: download a model; says what will be fetched, whether it fits, and where it is."""

from typing import Any

from selfspec_cli.commands import configs
from selfspec_cli.commands.screen import PULL_GOES_ON, Output, emit, say
from selfspec_cli.commands.shared import Overrides, command
from selfspec_cli.config.memory import GIB
from selfspec_cli.stages import pull as stage


@command(
    epilog="Examples: selfspec pull model=HuggingFaceTB/SmolLM2-135M-Instruct   ·   selfspec pull model=ORG/NAME "
    "model.revision=COMMIT draft_weights=int4 engine=gpu",
    then=PULL_GOES_ON,
)
def pull(out: Output, overrides: Overrides = None) -> None:
    """Download a model from the Hugging Face Hub: only what vLLM reads, at one commit; go on after a break."""
    cfg = configs.one(overrides, None)
    chosen = stage.plan(cfg)
    size = sum(size for _, size in chosen.files)
    document: dict[str, Any] = {
        "model": chosen.model,
        "commit": chosen.commit,
        "files": len(chosen.files),
        "bytes": size,
        "bytes_to_fetch": chosen.to_fetch,
        "fits": chosen.fits,
        "needs": chosen.needs,
    }
    if not out.as_json:
        say(
            f"{chosen.model} at commit {chosen.commit}: {len(chosen.files)} files, {size / GIB:.2f} GiB, "
            f"of which {chosen.to_fetch / GIB:.2f} GiB are to be fetched",
            "bold",
        )
        say(chosen.needs + (": it does not fit" if chosen.fits is False else ""))
    if not out.dry_run:
        document["folder"] = str(stage.run(cfg, chosen))
    if out.as_json:
        emit(document)
    elif not out.dry_run:
        say(f"in {document['folder']}\nto stay at this commit: model.revision={chosen.commit}")
