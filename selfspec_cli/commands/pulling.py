"""`selfspec pull`: says what will be fetched and whether it fits, fetches it, says where it is."""

from __future__ import annotations

from typing import Any

from selfspec_cli.commands import screen
from selfspec_cli.config.memory import GIB
from selfspec_cli.config.schema import RunConfig
from selfspec_cli.stages import pull as stage


def pull(cfg: RunConfig, *, as_json: bool, dry_run: bool) -> None:
    """Show the plan, and unless `dry_run` carry it out."""
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
    if not as_json:
        screen.say(
            f"{chosen.model} at commit {chosen.commit}: {len(chosen.files)} files, {size / GIB:.2f} GiB, "
            f"of which {chosen.to_fetch / GIB:.2f} GiB are to be fetched",
            "bold",
        )
        screen.say(chosen.needs + (": it does not fit" if chosen.fits is False else ""))
    if not dry_run:
        document["folder"] = str(stage.run(cfg, chosen))
    if as_json:
        screen.emit(document)
    elif not dry_run:
        screen.say(f"in {document['folder']}\nto stay at this commit: model.revision={chosen.commit}")
