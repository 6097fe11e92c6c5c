"""Greedy drafting changes no token: every exit layer, draft length and gate, in fp32 on the CPU.

The engines chunk their prefills (64 tokens a step, prompts of up to 170), share prefixes in the cache, and run 8 of 32
requests of mixed lengths at a time, so that requests join and leave. An engine is started once and changes its view,
draft length and gate while it lives. The default is a part of the grid in which every exit is tried with every draft
length, and every gate in several places. SELFSPEC_FULL=1 (`make nightly`) is all of it: for every architecture each
exit, length and gate over all 32 prompts (4,112 tokens). Architectures other than Llama have two exits and lengths on
an engine each."""

from collections.abc import Callable, Sequence
from itertools import product

import pytest
from conftest import FULL, PROMPTS, Expected
from harness import GATES, Counts, Live, layer_skip, live
from models import LAYERS

from selfspec_cli.early_exit.gates import GATES as GATE_RULES

EXITS = (1, LAYERS // 4, LAYERS // 2, LAYERS - 1)
LENGTHS = (1, 3, 5, 8)
STARTED = tuple(zip(EXITS, reversed(LENGTHS), strict=True))
"""What engines are started with on the first architecture; each goes on to the other exits at its draft length."""

Point = tuple[int, int]
"""Exit layer and draft length."""

OTHERS = ("qwen3", "mistral", "gemma", "gemma2", "gemma3", "qwen3_moe")
FEW: tuple[Point, ...] = ((LAYERS // 4, 5), (LAYERS - 1, 3))
"""What the other architectures are tried with, the first one longer."""

SOME = (1, *range(0, PROMPTS, 3))
"""Eleven requests of 32 tokens and one of 64: few steps, some leave early."""


def points(name: str, start: Point) -> list[Point]:
    """The points of one engine, the one that it is started with first; no length is longer than its."""
    if name == "llama":
        return [start, *((layer, start[1]) for layer in EXITS if layer != start[0])]
    return [point for point in product(EXITS, LENGTHS) if point[1] <= start[1]] if FULL else list(FEW)


def gates_at(place: int, k: int, turn: int = 0) -> list[str]:
    """The gates to try at the `place`-th point of an engine: none and two of the others, which change with k and from
    one architecture (`turn`) to the next; or all."""
    others = [gate for gate in GATES if gate != "none"]
    if FULL:
        return ["none", *others]
    if k == 1:  # with one step a round there is nothing for a gate to end
        return ["none", others[(place + turn) % len(others)]]
    return ["none", *(others[(2 * place + more + 3 * k + turn) % len(others)] for more in (0, 1))]


def check_gate(engine: Live, expected: Expected, gate: str, only: Sequence[int] | None) -> Counts:
    """Outputs of one gate on a live engine, and what vLLM counted meanwhile."""
    engine.call("early_exit_set_gate", gate, GATES[gate])
    made = expected.check(engine, only)
    made.require_both_verdicts()
    return made


def check_engine(want: Expected, name: str, start: Point, report: Callable[[str], None], turn: int = 0) -> None:
    """One engine through all of its points; over every prompt where it is as it was started."""
    spec = layer_skip(*start, gate="maxp", tau=0.5)
    with live(want.path, spec) as engine:
        for place, (layer, k) in enumerate(points(name, start)):
            if place:
                engine.call("early_exit_set_view", {"layer_skip": layer})
                engine.call("early_exit_set_draft_length", k)
            made = {
                gate: check_gate(engine, want, gate, None if FULL or (gate == "none" and not place) else SOME)
                for gate in gates_at(place, k, turn)
            }
            said = ", ".join(f"{gate} {counts.drafted}/{counts.accepted}" for gate, counts in made.items())
            report(f"{name} E={layer} k={k}: {said}")
            longest = made["none"].drafted / made["none"].rounds
            assert longest > k - 1, made["none"]
            for gate, counts in made.items():
                # Each gate closes some drafts (where there is a step left to save) and not all of them.
                assert gate == "none" or k == 1 or 1 < counts.drafted / counts.rounds < longest, f"{gate} {counts}"


def test_every_point_and_every_gate_is_here():
    tried = {start: points("llama", start) for start in STARTED}
    assert {point for there in tried.values() for point in there} == set(product(EXITS, LENGTHS))
    assert set(GATES) == set(GATE_RULES) - {"auto"}  # an engine is started with it: test_draft_lengths.py
    gates = [gate for there in tried.values() for place, (_, k) in enumerate(there) for gate in gates_at(place, k)]
    assert all(gates.count(gate) >= 3 for gate in GATES), gates
    gates = [
        gate for turn in range(len(OTHERS)) for place, (_, k) in enumerate(FEW) for gate in gates_at(place, k, turn)
    ]
    assert all(gates.count(gate) >= 3 for gate in GATES), gates


@pytest.mark.parametrize("start", STARTED, ids=[f"k{k}-from-E{layer}" for layer, k in STARTED])
def test_greedy(expected, report, start):
    check_engine(expected("llama"), "llama", start, report)


@pytest.mark.parametrize("name", OTHERS)
def test_greedy_of_others(expected, report, name):
    layer, k = FEW[0]
    check_engine(expected(name), name, (layer, max(LENGTHS) if FULL else k), report, OTHERS.index(name))
