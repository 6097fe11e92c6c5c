"""Fixtures shared by the engine tests: models on disk, made once, and what a plain vLLM generates with them."""

import gc
import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from harness import Counts, Live, greedy, live, ragged_prompts, tokens
from models import save_tiny, save_tokenizer, vocab_of

LONG_FILES = """
test_lossless test_verify test_server_stress test_draft_weights test_load test_gateway test_fit_heads test_two_ranks
test_performance_checks_cpu test_views test_beside_vllm test_compile_cache test_screen test_lossless_edges test_server
test_request_faults test_draft_lengths test_sampling test_prometheus
"""
"""Files that take a minute and more begin first, so that no process is left with one of them at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: number for number, name in enumerate(LONG_FILES.split())}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))


# ---- Engines after the first of a process start and stop in a fraction of the processor time. Of the four seconds that
# a tiny engine took, three were walks over everything that was ever imported.


FREEZE = gc.freeze


@pytest.fixture(scope="session", autouse=True)
def engines_start_quickly() -> None:
    """vLLM replaces kernels at each start of an engine, and from now on only after it or we imported something more.
    It also compiles, in every engine, the function that ranks a token for its log-probability, and imports itself in
    another process, which keeps CUDA out of this one, to ask the class of each architecture what it can."""
    from vllm.model_executor.models import registry
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.sample import sampler

    replace, seen = CpuPlatform.register_triton_kernel_overrides, set[str]()

    def imported() -> set[str]:
        return {name for name in sys.modules if name.startswith(("vllm", "selfspec_cli"))}

    def once() -> None:
        if not imported() <= seen:
            replace()
            seen.update(imported())  # the replacement itself imports the modules that hold the kernels

    CpuPlatform.register_triton_kernel_overrides = staticmethod(once)
    sampler.batched_count_greater_than = sampler.batched_count_greater_than._torchdynamo_orig_callable
    registry._run_in_subprocess = lambda ask: ask()


@pytest.fixture(scope="module", autouse=True)
def what_is_imported_stays(engines_start_quickly: None) -> None:
    """Between two files no engine lives: what is alive stays for ever, and later garbage collections leave it out.
    vLLM's own freezing would keep an engine's cycles from being collected, once nobody thaws what is kept here."""
    gc.collect()
    FREEZE()
    gc.freeze = gc.unfreeze = lambda: None  # type: ignore[assignment]


# ---- Models, and what a plain vLLM generates with them


FULL = os.environ.get("SELFSPEC_FULL") == "1"
"""Every gate over every prompt, instead of over some of them."""

PROMPTS = 32
LENGTHS = (64, 128, 200) if FULL else (32, 64, 96)  # tokens that requests generate, alternating: 2,016 in all


@dataclass(frozen=True)
class Expected:
    """What the plain engine generated: the reference for one model."""

    path: Path
    prompts: list[list[int]]
    lengths: list[int]
    outputs: list[list[int]]

    def check(self, engine: Live, only: Sequence[int] | None = None) -> Counts:
        """`engine` generates the same tokens; only: for these prompts. What vLLM counted meanwhile."""
        chosen = range(len(self.prompts)) if only is None else only
        params = [greedy(self.lengths[i]) for i in chosen]
        return engine.gives([self.prompts[i] for i in chosen], params, [self.outputs[i] for i in chosen])


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all processes of this run share."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def model_dir(shared: Path) -> Callable[[str], Path]:
    """Name of an architecture in models.ARCHITECTURES -> folder of its tiny model."""

    def make(name: str) -> Path:
        folder, done = shared / name, shared / f"{name}.done"
        with FileLock(shared / f"{name}.lock"):
            if not done.exists():
                save_tiny(name, folder)
                done.touch()
        return folder

    return make


@pytest.fixture(scope="module")
def talking(model_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny model with a tokenizer, so that requests may be texts and have stop strings."""
    folder = tmp_path_factory.mktemp("talking") / "llama"
    shutil.copytree(model_dir("llama"), folder)
    save_tokenizer(folder, "<think>", "</think>")
    return folder


@pytest.fixture(scope="session")
def expected(model_dir: Callable[[str], Path], shared: Path) -> Callable[[str], Expected]:
    """Name of an architecture -> prompts and the plain engine's outputs, computed once for all processes."""
    known: dict[str, Expected] = {}

    def generate(name: str) -> Expected:
        if name not in known:
            path = model_dir(name)
            prompts = ragged_prompts(PROMPTS, vocab_of(name))
            lengths = [LENGTHS[i % len(LENGTHS)] for i in range(PROMPTS)]
            kept = shared / f"{name}.outputs.json"
            with FileLock(shared / f"{name}.outputs.lock"):
                if not kept.exists():
                    with live(path) as engine:
                        made = tokens(engine.generate(prompts, [greedy(length) for length in lengths]))
                    kept.write_text(json.dumps(made))
            outputs = json.loads(kept.read_text())
            assert [len(output) for output in outputs] == lengths
            known[name] = Expected(path, prompts, lengths, outputs)
        return known[name]

    return generate


@pytest.fixture
def report(record_property: Callable[[str, Any], None], capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Prints a line of findings even when the test passes, and keeps it in the JUnit file."""

    def say(line: str) -> None:
        record_property("finding", line)
        with capsys.disabled():
            print(f"\n    {line}", end="")

    return say
