"""`selfspec profile`: where the time of an arm goes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from selfspec_cli.commands import configs
from selfspec_cli.commands.configs import NO_COMPILER
from selfspec_cli.commands.measuring import shown_starting
from selfspec_cli.commands.screen import emit, guard, note, say, show_facts, warn
from selfspec_cli.commands.shared import Config, Debug, DryRun, Json, Overrides, command
from selfspec_cli.commands.tracked import tracked
from selfspec_cli.commands.working import at_work
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
    overrides: Overrides = None,
    config: Config = None,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens of each request, at most.")] = 64,
    nsys: Annotated[bool, typer.Option("--nsys", help="Record with NVIDIA Nsight Systems too, in a run more.")] = False,
    inside: Annotated[bool, typer.Option("--under-nsight", hidden=True)] = False,
    as_json: Json = False,
    dry_run: DryRun = False,
    debug: Debug = False,
) -> None:
    """Where the time of one arm goes: drafting, verifying, sampling, scheduling, idle; its slowest kernels; a trace."""
    with guard(as_json, debug):
        cfg = configs.one(overrides, config)
        if inside:
            return _under_nsight(cfg, tokens)
        words = [*(overrides or []), *(["--config", str(config)] if config else []), "--tokens", str(tokens)]
        _profile(cfg, words, tokens, nsys=nsys, as_json=as_json, dry_run=dry_run, debug=debug)


def _profile(
    cfg: RunConfig, words: Sequence[str], tokens: int, *, nsys: bool, as_json: bool, dry_run: bool, debug: bool
) -> None:
    """Profile one arm, and show where its time went. words: of the command line, for the process under Nsight."""
    asked, cfg = cfg, _ready(cfg)
    warn([NO_COMPILER] if asked.engine != cfg.engine else [])
    run_id = results_folder.new_run_id()
    where = Path(cfg.results_dir) / profiles.FOLDER / f"{run_key(cfg)}-{run_id}"
    if nsys:
        _check_nsight(cfg, dry_run)
    from selfspec_cli.stages import profile as stage

    own = [sys.executable, "-m", "selfspec_cli", "profile", *words, "--under-nsight"]
    nsight = stage.nsight_command(own, where) if nsys else []
    if dry_run:
        plan = {
            "arm": label(tables.planned(cfg)),
            "tokens": min(tokens, cfg.workload.output_len),
            "requests": cfg.workload.batch,
            "folder": str(where.parent),
            "nsight": " ".join(nsight),
        }
        return emit({"dry_run": True, **plan}) if as_json else show_facts(plan)
    preflight.check_device(cfg)
    with tracked("profile", cfg), at_work("profile", cfg.results_dir, debug) as shown:
        more: dict[str, Any] = {"open_engine": shown_starting(shown), "progress": shown}
        found, path = stage.run(cfg, tokens=tokens, run_id=run_id, **more)
    if nsys:
        where.parent.mkdir(parents=True, exist_ok=True)
        note("the same once more under Nsight Systems")
        if subprocess.run(nsight, check=False, stdout=sys.stderr).returncode:
            raise RuntimeError("nsys failed; what it said stands above, and the profile itself is kept")
    files = {"profile": str(path), "trace": str(path.with_name(found.trace))}
    files |= {"nsight": f"{where}.nsys-rep"} if nsys else {}
    if as_json:
        return emit(asdict(found) | {"accounted": found.accounted, **found.columns(), "files": files})
    show(found, files)


def _under_nsight(cfg: RunConfig, tokens: int) -> None:
    """What the process under Nsight Systems runs."""
    from selfspec_cli.engine.live import open_engine
    from selfspec_cli.stages import profile as stage

    stage.under_nsight(_ready(cfg), open_engine=open_engine, tokens=tokens)


def _ready(cfg: RunConfig) -> RunConfig:
    """A config that is checked and fits this machine, as `bench` makes it."""
    preflight.check(cfg)
    return preflight.for_this_machine([preflight.with_calibration(cfg)])[0]


def _check_nsight(cfg: RunConfig, dry_run: bool) -> None:
    """Refuse --nsys where it cannot work.

    Raises:
        ConfigError: there is no GPU to record, or no nsys.
    """
    if device_of(cfg) == "cpu" and not dry_run:
        raise ConfigError("--nsys records a GPU, and this arm runs on the CPU; leave it out")
    if shutil.which("nsys") is None and not dry_run:
        raise ConfigError("--nsys: there is no nsys here; install NVIDIA Nsight Systems, or leave it out")


def show(found: Profile, files: dict[str, str]) -> None:
    """Shares of the wall time, and the slowest kernels."""
    console = Console(width=None if Console().is_terminal else 136)
    parts = Table(box=None, padding=(0, 1), pad_edge=False)
    for title in ("part", "share", "ms a round"):
        parts.add_column(title, justify="left" if title == "part" else "right")
    parts.add_column("what it is", style="dim")
    for name, seconds in found.seconds.items():
        parts.add_row(name, f"{seconds / found.wall:.1%}", f"{1000 * seconds / found.rounds:.3f}", PARTS[name])
    parts.add_row(
        "sum",
        f"{found.accounted:.1%}",
        f"{1000 * sum(found.seconds.values()) / found.rounds:.3f}",
        "of the wall time",
        style="bold",
    )
    console.print(parts)
    kernels = Table(box=None, padding=(0, 1), pad_edge=False)
    for title in (
        "kernel" if found.gpu else "operator",
        "part",
        "share",
        "times a round",
        "GB/s",
        "of the memory's rate",
    ):
        kernels.add_column(title, justify="left" if title in ("kernel", "operator", "part") else "right", no_wrap=True)
    for one in found.kernels[:SHOWN]:
        pace = "" if one["bytes"] is None else f"{one['bytes'] / one['seconds'] / 1e9:.1f}"
        rate = "" if one["rate"] is None else f"{one['rate']:.0%}"
        kernels.add_row(
            one["name"][:60],
            one["part"],
            f"{one['seconds'] / found.wall:.1%}",
            f"{one['calls'] / found.rounds:.1f}",
            pace,
            rate,
        )
    console.print(kernels)
    say(
        f"{found.tok_s:.1f} tok/s without the profiler, {found.tok_s_profiled:.1f} with it; {found.rounds} rounds",
        "bold",
    )
    if abs(found.accounted - 1) > CLOCKS:
        warn([f"the parts add up to {found.accounted:.1%} of the wall time: the clocks of the processes disagree"])
    for line in found.unknown:
        note(f"not known: {line}")
    for name, path in files.items():
        say(f"{name}: {path}")
    say("Open the trace in https://ui.perfetto.dev")
