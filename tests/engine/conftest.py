"""Fixtures shared by the engine tests: models on disk, made once, and what a plain vLLM generates with them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import counting
import pytest
from harness import Live, differing, greedy, live, ragged_prompts, tokens
from models import save_tiny, vocab_of


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(counting.PerTest(), "selfspec-counting")


@pytest.fixture(scope="session", autouse=True)
def engines_are_counted() -> None:
    counting.count()


FULL = os.environ.get("SELFSPEC_FULL") == "1"
"""Every gate over every prompt, instead of over some of them."""

PROMPTS = 32
LENGTHS = (64, 128, 200)  # tokens a request generates, by turns: 4,112 in all


@dataclass(frozen=True)
class Expected:
    """What the plain engine generated: the reference for one model."""

    path: Path
    prompts: list[list[int]]
    lengths: list[int]
    outputs: list[list[int]]

    def check(self, engine: Live, only: Sequence[int] | None = None) -> None:
        """`engine` generates the same tokens; only: for these prompts."""
        chosen = range(len(self.prompts)) if only is None else only
        got = engine.generate([self.prompts[i] for i in chosen], [greedy(self.lengths[i]) for i in chosen])
        wrong = differing(tokens(got), [self.outputs[i] for i in chosen])
        assert not wrong, f"prompts {wrong} of {len(chosen)} differ from the baseline"


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Name of an architecture in models.ARCHITECTURES -> folder of its tiny model."""
    root, made = tmp_path_factory.mktemp("models"), {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = save_tiny(name, root / name)
        return made[name]

    return make


@pytest.fixture(scope="session")
def expected(model_dir: Callable[[str], Path]) -> Callable[[str], Expected]:
    """Name of an architecture -> prompts and the plain engine's outputs, computed once."""
    known: dict[str, Expected] = {}

    def generate(name: str) -> Expected:
        if name not in known:
            path = model_dir(name)
            prompts = ragged_prompts(PROMPTS, vocab_of(name))
            lengths = [LENGTHS[i % len(LENGTHS)] for i in range(PROMPTS)]
            with live(path) as engine:
                outputs = tokens(engine.generate(prompts, [greedy(length) for length in lengths]))
            assert sum(map(len, outputs)) >= 32 * 128
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
