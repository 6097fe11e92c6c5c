"""Greedy drafting changes no token: every architecture, exit layer, draft length and gate, in fp32 on the CPU.

The engines chunk their prefills (64 tokens a step, prompts of up to 170), share prefixes in the cache, and run 8 of 32
requests of mixed lengths at a time, so that requests join and leave. SELFSPEC_FULL=1 is the whole grid: for every
architecture each E, k and gate over all 32 prompts (4,112 tokens). Without it Llama has each E and k, the others two of
them, and gates other than `none` run over 12 prompts, some of them by turns.
"""

from __future__ import annotations

from itertools import product

import pytest
from conftest import FULL, PROMPTS
from harness import CALIBRATION, GATES, Counts, Live, layer_skip, live
from models import LAYERS

from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.early_exit.gates import GATES as GATE_RULES

pytestmark = pytest.mark.engine

EXITS = (1, LAYERS // 4, LAYERS // 2, LAYERS - 1)
LENGTHS = (1, 3, 5, 8)
GRID = tuple(product(EXITS, LENGTHS))
OTHERS = ("qwen3", "mistral", "gemma", "gemma2", "gemma3", "qwen3_moe")
OTHERS_GRID = GRID if FULL else ((LAYERS // 4, 5), (LAYERS - 1, 3))
CASES = [("llama", *point) for point in GRID] + [(name, *point) for name in OTHERS for point in OTHERS_GRID]
SOME = (1, *range(0, PROMPTS, 3))  # eleven requests of 64 tokens and one of 128: few steps, some leave early


def gates_at(number: int, k: int) -> list[str]:
    """The gates to try at case `number`: all of them, or the two of the table and others by turns."""
    rest = [gate for gate in GATES if gate not in ("none", "maxp", "varH")]
    if not FULL:
        # With one step a round there is nothing for a gate to end.
        rest = [] if k == 1 else [rest[number % len(rest)], rest[(number + 2) % len(rest)]]
    return ["none", "maxp", "varH", *rest]


def check_gate(engine: Live, expected, gate: str, only) -> Counts:
    """Outputs of one gate on a live engine, and what vLLM counted meanwhile."""
    engine.set_gate(gate, GATES[gate])
    before = engine.counts()
    expected.check(engine, only)
    made = engine.counts() - before
    made.require_both_verdicts()
    return made


def test_every_gate_is_here():
    assert set(GATES) == set(GATE_RULES)
    assert {gate for number, (_, k) in enumerate(GRID) for gate in gates_at(number, k)} == set(GATES)


@pytest.mark.parametrize(("name", "layer", "k"), CASES, ids=[f"{name}-E{layer}-k{k}" for name, layer, k in CASES])
def test_greedy(expected, report, name, layer, k):
    want = expected(name)
    made: dict[str, Counts] = {}
    with live(want.path, layer_skip(layer, k, gate="calibrated", tau=0.5, calibration=CALIBRATION)) as engine:
        for gate in gates_at(CASES.index((name, layer, k)), k):
            made[gate] = check_gate(engine, want, gate, None if FULL or gate == "none" else SOME)
    report(f"{name} E={layer} k={k}: " + ", ".join(f"{gate} {c.drafted}/{c.accepted}" for gate, c in made.items()))
    longest = made["none"].drafted / made["none"].rounds
    for gate, counts in made.items():
        # Each gate closes some drafts (where there is a step left to save) and not all of them.
        assert gate == "none" or k == 1 or 1 < counts.drafted / counts.rounds < longest, f"{gate} {counts}"


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


def test_an_architecture_that_cannot_be_cut_is_named(model_dir):
    """GPT-2 keeps its layers under another name, so nothing says where its loop would have to end."""
    path = model_dir("gpt2")
    with pytest.raises(SettingsError, match="GPT2LMHeadModel is not supported"), live(path, layer_skip(4, 3)):
        pass
