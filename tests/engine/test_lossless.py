"""Greedy drafting changes no token: every exit layer, draft length and gate, in fp32 on the CPU.

The engines chunk their prefills (64 tokens a step, prompts of up to 170), share prefixes in the cache, and run 8 of 32
requests of mixed lengths at a time, so that requests join and leave. test_lossless_others.py has other architectures.
"""

from itertools import product

import pytest
from grid import EXITS, FEW, LENGTHS, OTHERS, SOME, STARTED, check_engine, check_gate, gates_at, points
from harness import GATES, layer_skip, live
from models import LAYERS

from selfspec_cli.early_exit.gates import GATES as GATE_RULES

pytestmark = pytest.mark.engine


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


def test_compiled(expected, report):
    """torch.compile: the trunk must not run code compiled for the whole model, nor the other way round."""
    want = expected("llama")
    with live(want.path, layer_skip(LAYERS // 2, 3), enforce_eager=False) as engine:
        made = check_gate(engine, want, "none", SOME)
        made += check_gate(engine, want, "varH", SOME)
    report(f"llama compiled: {made}")


@pytest.mark.parametrize(
    "extra", [{"enable_chunked_prefill": False, "max_num_batched_tokens": 512}, {"block_size": 128}], ids=str
)
def test_other_engine_settings(expected, extra):
    want = expected("llama")
    with live(want.path, layer_skip(LAYERS // 2, 4), **extra) as engine:
        check_gate(engine, want, "none", SOME)
