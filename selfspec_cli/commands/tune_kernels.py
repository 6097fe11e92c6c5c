"""`selfspec tune-kernels`: settings of the draft's kernels for a GPU."""

from pathlib import Path
from typing import Annotated, Any

import typer

from selfspec_cli.commands import configs, screen
from selfspec_cli.commands.screen import emit, guard, say
from selfspec_cli.commands.shared import Debug, DryRun, Json, Overrides, command
from selfspec_cli.stages import tune_kernels as stage


@command(
    "tune-kernels",
    epilog="Example: selfspec tune-kernels model=ORG/NAME draft_weights=int4 --tokens 1,8 --contexts 1024,8192",
)
def tune_kernels(
    overrides: Overrides = None,
    tokens: Annotated[str, typer.Option("--tokens", help="Of a draft step: requests that draft.")] = stage.TOKENS,
    contexts: Annotated[
        str, typer.Option("--contexts", help="Tokens of each request; the longest is the longest that is tuned.")
    ] = stage.CONTEXTS,
    out: Annotated[
        Path | None, typer.Option("--out", help="File to write; where engines on this GPU look for it, if absent.")
    ] = None,
    as_json: Json = False,
    dry_run: DryRun = False,
    debug: Debug = False,
) -> None:
    """Time tiles, stages, warps and splits of each kernel of a draft step on this GPU; engines take the fastest."""
    with guard(as_json, debug):
        counts, lengths = configs.numbers("--tokens", tokens), configs.numbers("--contexts", contexts)
        stage.check(counts, lengths)
        shape = stage.shape_of(configs.one(overrides, None))
        if dry_run:
            plan = {"products": dict(shape.products), "tokens": counts, "contexts": lengths}
            return emit({"dry_run": True, **plan}) if as_json else screen.show_facts(plan)
        device, name = stage.device()
        show: Any = (lambda row: None) if as_json else _show
        found = stage.run(shape, counts, lengths, out, on=device, name=name, say=show)
        if as_json:
            return emit(found)
        where = "engines on this GPU read it" if found["read_by_engines"] else "engines do not look for it there"
        say(
            f"usual settings within 3 % of the best: {found['within']} of {found['measured']}; the worst takes "
            f"{found['worst']:.2f} times as long",
            "bold",
        )
        say(f"written to {found['file']}; {where}")


def _show(row: dict[str, Any]) -> None:
    """A line for a row: microseconds of the usual setting and of the best, and what that is."""
    what = f"{row['kind']:<10} {row['tokens']:>2}" + (f" x {row['context']:<6}" if "context" in row else " " * 9)
    if "skipped" in row:
        return say(f"{what} {row['skipped']}")
    rate = row["bytes"] / row["us"] / 1e6
    setting = " ".join(f"{name}={value}" for name, value in row["setting"].items())
    say(
        f"{what} usual {row['usual_us']:8.1f} us, best {row['us']:8.1f} us ({row['usual_over_best']:.2f}), "
        f"{rate:.2f} TB/s  {setting}"
    )
