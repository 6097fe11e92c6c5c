"""A performance check with one fault after the other planted, on two engines: what a test on the CPU and a script on a
GPU share (test_performance_checks_cpu.py, and test_performance_checks.py in tests/gpu)."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from selfspec_cli.config.compose import compose_runs
from selfspec_cli.config.schema import Method, RunConfig
from selfspec_cli.engine import live
from selfspec_cli.stages import check as stage
from selfspec_cli.stages import measure


@dataclass
class Kept:
    """Opens engines for `stages.check.run`: every run has the same one that drafts, mended behind it."""

    stack: ExitStack
    engines: list[Any] = field(default_factory=list)

    @contextmanager
    def __call__(self, cfg: RunConfig, **more: Any) -> Iterator[Any]:
        if cfg.method is not Method.layer_skip:
            with live.open_engine(cfg) as plain:
                yield plain
            return
        if not self.engines:
            opened = live.open_engine(cfg, worker_extension_cls=stage.FAULTY_WORKER)
            self.engines.append(self.stack.enter_context(opened))
        (engine,) = self.engines
        engine.cfg = cfg
        try:
            yield engine
        finally:
            engine.call("early_exit_mend")


@contextmanager
def checks(path: Path, results: Path, words: Sequence[str] = ()) -> Iterator[Callable[..., dict[str, Any]]]:
    """A function that runs a file once, with a fault planted or none; the first run has to have none.

    Once, whatever the clock leaves open: another run would start a plain engine beside the one that is kept, and
    vLLM's engines of one process share their metrics and their worker class."""
    with ExitStack() as stack:
        opener = Kept(stack)

        def run(fault: str | None = None, other: Path = path, first: int = 0) -> dict[str, Any]:
            file = stage.with_words(stage.read(other), [*words, f"results_dir={results}"])
            file = replace(file, runs=1, cases=file.cases[first:])
            cfgs = [compose_runs(None, [*one.words], sweep=False)[0] for one in file.cases]
            return stage.run(
                file, cfgs, open_engine=opener, bench=measure.bench, plant=fault, reuse_baseline=bool(opener.engines)
            )

        yield run


def red(document: dict[str, Any]) -> set[str]:
    """What of a verdict is red, by the first word of what was asked for."""
    return {result["asked"].partition(" ")[0] for result in document["results"] if result["outcome"] == "red"}


def of_counts(document: dict[str, Any]) -> dict[str, str]:
    """The outcomes of everything that no clock measures."""
    timed = ("efficiency", "speedup")
    results = [result for result in document["results"] if not result["asked"].startswith(timed)]
    return {f"{result['case']}: {result['asked']}": result["outcome"] for result in results}
