"""`selfspec profile`: where the time of an arm goes."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from selfspec_cli.commands import configs, screen
from selfspec_cli.commands.measuring import on_engines
from selfspec_cli.commands.screen import Output, say
from selfspec_cli.commands.shared import Config, Overrides, command
from selfspec_cli.record import quality, tables
from selfspec_cli.report.rows import label
from selfspec_cli.stages import preflight

SHOWN = 12  # kernels


@command(epilog="Examples: selfspec profile layer=3 k=4   ·   selfspec profile method=baseline workload.batch=8")
def profile(
    out: Output,
    overrides: Overrides = None,
    config: Config = None,
    # By default few: a trace of more is too big for a browser, and says nothing else.
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens of each request, at most.")] = 64,
) -> None:
    """Where the time of one arm goes: drafting, verifying, sampling, scheduling, idle; its slowest kernels; a trace."""
    from selfspec_cli.stages import profile as stage

    (cfg,) = configs.runnable([configs.one(overrides, config)])
    if out.dry_run:
        return out.plan(
            {
                "arm": label(tables.planned(cfg)),
                "tokens": min(tokens, cfg.workload.output_len),
                "requests": cfg.workload.batch,
                "folder": str(Path(cfg.results_dir) / quality.PROFILES),
            }
        )
    preflight.check_device(cfg)
    with on_engines(out, "profile", cfg) as engines:
        found, path = stage.run(cfg, tokens=tokens, **engines)
    files = {"profile": str(path), "trace": str(path.with_name(found.trace))}
    out.answer(asdict(found) | {"files": files}, lambda: show(found, files))


def show(profile: quality.Profile, files: dict[str, str]) -> None:
    """Shares of the wall time, and the slowest kernels."""
    screen.table(
        ("part", "share", "ms a round", "what it is"),
        [
            (name, f"{spent / profile.wall:.1%}", f"{1000 * spent / profile.rounds:.3f}", quality.PARTS[name])
            for name, spent in profile.seconds.items()
        ],
        text=(0, 3),
    )
    screen.table(
        ("kernel" if profile.gpu else "operator", "share", "times a round"),
        [
            (
                kernel["name"][:60],
                f"{kernel['seconds'] / profile.wall:.1%}",
                f"{kernel['calls'] / profile.rounds:.1f}",
            )
            for kernel in profile.kernels[:SHOWN]
        ],
        text=(0,),
    )
    say(
        f"{profile.tok_s:.1f} tok/s without the profiler, {profile.tok_s_profiled:.1f} with it; "
        f"{profile.rounds} rounds",
        "bold",
    )
    screen.show_files(files)
    say("Open the trace in https://ui.perfetto.dev")
