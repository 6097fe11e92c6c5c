"""A performance gate with one fault after the other planted, on two engines: what a test on the CPU and a script on a
GPU share (test_performance_gates_cpu.py, and test_performance_gates.py in tests/gpu)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from selfspec_cli.config.compose import compose_runs
from selfspec_cli.config.schema import Method, RunConfig
from selfspec_cli.engine import live
from selfspec_cli.stages import bench, gate, gate_file


@dataclass
class Kept:
    """Opens engines for `stages.gate.run`: every run has the same one that drafts, mended behind it."""

    stack: ExitStack
    engines: list[Any] = field(default_factory=list)

    @contextmanager
    def __call__(self, cfg: RunConfig, **more: Any) -> Iterator[Any]:
        if cfg.method is not Method.layer_skip:
            with live.open_engine(cfg) as plain:
                yield plain
            return
        if not self.engines:
            opened = live.open_engine(cfg, worker_extension_cls=gate.FAULTY_WORKER)
            self.engines.append(self.stack.enter_context(opened))
        (engine,) = self.engines
        engine.cfg = cfg
        try:
            yield engine
        finally:
            engine.call("early_exit_mend")


@contextmanager
def gates(path: Path, results: Path, words: Sequence[str] = ()) -> Iterator[Callable[..., dict[str, Any]]]:
    """A function that runs the gates of a file, with a fault planted or none; the first run has to have none."""
    with ExitStack() as stack:
        opener = Kept(stack)

        def run(fault: str | None = None, other: Path = path, first: int = 0, **instead: Any) -> dict[str, Any]:
            file = replace(gate_file.read(other), after=(), **instead)
            file = replace(file, gates=file.gates[first:])
            cfgs = [composed(one.words, [*words, f"results_dir={results}"]) for one in file.gates]
            return gate.run(file, cfgs, open_engine=opener, bench=bench.run, plant=fault,
                            reuse_baseline=bool(opener.engines))  # fmt: skip

        yield run


def composed(words: Sequence[str], instead: Sequence[str]) -> RunConfig:
    """The config of a gate's words, of which those that are typed take the place of some."""
    typed = {word.partition("=")[0] for word in instead}
    kept = [word for word in words if word.partition("=")[0] not in typed]
    return compose_runs(None, [*kept, *instead], sweep=False)[0]


def red(document: dict[str, Any]) -> set[str]:
    """What of a verdict is red, by the first word of what was asked for."""
    return {check["asked"].partition(" ")[0] for check in document["checks"] if check["outcome"] == "red"}


def of_counts(document: dict[str, Any]) -> dict[str, str]:
    """The outcomes of everything that no clock measures."""
    timed = ("efficiency", "speedup")
    checks = [check for check in document["checks"] if not check["asked"].startswith(timed)]
    return {f"{check['gate']}: {check['asked']}": check["outcome"] for check in checks}
