"""`selfspec profile`: where the time of an arm goes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from selfspec_cli.commands import configs, screen
from selfspec_cli.commands.measuring import on_engines, runnable
from selfspec_cli.commands.screen import Output, note, say, warn
from selfspec_cli.commands.shared import Config, Overrides, command
from selfspec_cli.config.facts import device_of
from selfspec_cli.config.keys import run_key
from selfspec_cli.config.schema import ConfigError, RunConfig
from selfspec_cli.record import folder as results_folder
from selfspec_cli.record import profiles, tables
from selfspec_cli.report.rows import label
from selfspec_cli.report.trace import PARTS
from selfspec_cli.stages import preflight

if TYPE_CHECKING:
    from selfspec_cli.record.profiles import Profile

SHOWN = 12  # kernels
CLOCKS = 0.05
"""A sum of parts that is further from the wall time than this is a warning."""


@command(epilog="Examples: selfspec profile layer=3 k=4   ·   selfspec profile method=baseline workload.batch=8")
def profile(
    out: Output,
    overrides: Overrides = None,
    config: Config = None,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens of each request, at most.")] = 64,
    nsys: Annotated[bool, typer.Option("--nsys", help="Record with NVIDIA Nsight Systems too, in a run more.")] = False,
    inside: Annotated[bool, typer.Option("--under-nsight", hidden=True)] = False,
) -> None:
    """Where the time of one arm goes: drafting, verifying, sampling, scheduling, idle; its slowest kernels; a trace."""
    from selfspec_cli.stages import profile as stage

    (cfg,) = runnable([configs.one(overrides, config)])
    if inside:
        from selfspec_cli.engine.live import open_engine

        return stage.under_nsight(cfg, open_engine=open_engine, tokens=tokens)
    run_id = results_folder.new_run_id()
    where = Path(cfg.results_dir) / profiles.FOLDER / f"{run_key(cfg)}-{run_id}"
    words = [*(overrides or []), *(["--config", str(config)] if config else []), "--tokens", str(tokens)]
    own = [sys.executable, "-m", "selfspec_cli", "profile", *words, "--under-nsight"]
    nsight = stage.nsight_command(own, where) if nsys else []
    if out.dry_run:
        return out.plan(
            {
                "arm": label(tables.planned(cfg)),
                "tokens": min(tokens, cfg.workload.output_len),
                "requests": cfg.workload.batch,
                "folder": str(where.parent),
                "nsight": " ".join(nsight),
            }
        )
    if nsys:
        _check_nsight(cfg)
    preflight.check_device(cfg)
    with on_engines(out, "profile", cfg) as engines:
        found, path = stage.run(cfg, tokens=tokens, run_id=run_id, **engines)
    if nsys:
        where.parent.mkdir(parents=True, exist_ok=True)
        note("the same once more under Nsight Systems")
        if subprocess.run(nsight, check=False, stdout=sys.stderr).returncode:
            raise RuntimeError("nsys failed; what it said stands above, and the profile itself is kept")
    files = {"profile": str(path), "trace": str(path.with_name(found.trace))}
    files |= {"nsight": f"{where}.nsys-rep"} if nsys else {}
    document = asdict(found) | {"accounted": found.accounted, **found.columns(), "files": files}
    out.answer(document, lambda: show(found, files))


def _check_nsight(cfg: RunConfig) -> None:
    """Refuse --nsys where it cannot work.

    Raises:
        ConfigError: there is no GPU to record, or no nsys.
    """
    if device_of(cfg) == "cpu":
        raise ConfigError("--nsys records a GPU, and this arm runs on the CPU; leave it out")
    if shutil.which("nsys") is None:
        raise ConfigError("--nsys: there is no nsys here; install NVIDIA Nsight Systems, or leave it out")


def show(profile: Profile, files: dict[str, str]) -> None:
    """Shares of the wall time, and the slowest kernels."""
    parts = [(name, seconds, PARTS[name]) for name, seconds in profile.seconds.items()]
    parts.append(("sum", sum(profile.seconds.values()), "of the wall time"))
    screen.table(
        ("part", "share", "ms a round", "what it is"),
        [
            (name, f"{spent / profile.wall:.1%}", f"{1000 * spent / profile.rounds:.3f}", about)
            for name, spent, about in parts
        ],
        text=(0, 3),
    )
    screen.table(
        ("kernel" if profile.gpu else "operator", "part", "share", "times a round", "GB/s", "of the memory's rate"),
        [
            (
                kernel["name"][:60],
                kernel["part"],
                f"{kernel['seconds'] / profile.wall:.1%}",
                f"{kernel['calls'] / profile.rounds:.1f}",
                "" if kernel["bytes"] is None else f"{kernel['bytes'] / kernel['seconds'] / 1e9:.1f}",
                "" if kernel["rate"] is None else f"{kernel['rate']:.0%}",
            )
            for kernel in profile.kernels[:SHOWN]
        ],
        text=(0, 1),
    )
    say(
        f"{profile.tok_s:.1f} tok/s without the profiler, {profile.tok_s_profiled:.1f} with it; "
        f"{profile.rounds} rounds",
        "bold",
    )
    if abs(profile.accounted - 1) > CLOCKS:
        warn([f"the parts add up to {profile.accounted:.1%} of the wall time: the clocks of the processes disagree"])
    for line in profile.unknown:
        note(f"not known: {line}")
    screen.show_files(files)
    say("Open the trace in https://ui.perfetto.dev")
