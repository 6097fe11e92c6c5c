"""A performance check with one fault after the other planted, on two engines: what a test on the CPU and a script on a
GPU share (test_performance_checks_cpu.py, and test_performance_checks.py in tests/gpu)."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from selfspec_cli.config.compose import compose_runs
from selfspec_cli.config.schema import Method, RunConfig
from selfspec_cli.engine import live
from selfspec_cli.stages import check as stage
from selfspec_cli.stages import measure


@contextmanager
def checks(path: Path, results: Path, words: Sequence[str] = ()) -> Iterator[Callable[..., dict[str, Any]]]:
    """A function that runs a file once, with a fault planted or none; the first run has to have none. Every run has the
    same engine that drafts, mended after it.

    Once, whatever the clock leaves open: another run would start a plain engine beside the one that is kept, and
    vLLM's engines of one process share their metrics and their worker class."""
    with ExitStack() as stack:
        engines: list[Any] = []

        @contextmanager
        def opener(cfg: RunConfig, **more: Any) -> Iterator[Any]:
            if cfg.method is not Method.layer_skip:
                with live.open_engine(cfg) as plain:
                    yield plain
                return
            if not engines:
                opened = live.open_engine(cfg, worker_extension_cls=stage.FAULTY_WORKER)
                engines.append(stack.enter_context(opened))
            engines[0].cfg = cfg
            try:
                yield engines[0]
            finally:
                engines[0].call("early_exit_mend")

        def run(fault: str | None = None, other: Path = path, first: int = 0) -> dict[str, Any]:
            file = stage.with_words(stage.read(other), [*words, f"results_dir={results}"])
            file = replace(file, runs=1, cases=file.cases[first:])
            cfgs = [compose_runs(None, [*one.words], sweep=False)[0] for one in file.cases]
            planted = {"plant": fault, "reuse_baseline": bool(engines)}
            return stage.run(file, cfgs, open_engine=opener, bench=measure.bench, **planted)

        yield run


def red(document: dict[str, Any]) -> set[str]:
    """What of a verdict is red, by the first word of what was asked for."""
    return {result["asked"].partition(" ")[0] for result in document["results"] if result["outcome"] == "red"}


def of_counts(document: dict[str, Any]) -> dict[str, str]:
    """The outcomes of everything that no clock measures."""
    timed = ("efficiency", "speedup")
    results = [result for result in document["results"] if not result["asked"].startswith(timed)]
    return {f"{result['case']}: {result['asked']}": result["outcome"] for result in results}
