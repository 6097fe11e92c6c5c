"""Drafts from what a request had before: lossless beside the model's own, whatever bounds or closes them."""

from typing import Any

import pytest
from harness import (
    GATES,
    Live,
    draft_also_what_does_not_pay,
    greedy,
    layer_skip,
    live,
    ragged_prompts,
    steps_of_fixed_times,
    tokens,
    watch_proposals,
)
from models import LAYERS, VOCAB

pytestmark = pytest.mark.engine

K, FREE = 4, 10
PROMPTS = [
    (prompt[:15] * 9)[:100] if number % 2 else prompt for number, prompt in enumerate(ragged_prompts(12, VOCAB, seed=6))
]
"""Every second prompt says the same again and again: requests with a match run beside others."""


def parameters(**asked: Any) -> list[Any]:
    """Requests of many lengths; `asked` by the first of every three."""
    return [greedy(40 + 9 * number, **({} if number % 3 else asked)) for number in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def plain(model_dir) -> list[list[int]]:
    with live(model_dir("llama")) as engine:
        return tokens(engine.generate(PROMPTS, parameters()))


def counted(engine: Live, plain: list[list[int]], params: list[Any]) -> dict[str, int]:
    """Generate what the plain engine did; what the draft loop counted meanwhile."""
    before = engine.call("early_exit_counters")
    verified = engine.gives(PROMPTS, params, plain)
    after = engine.call("early_exit_counters")
    found = {name: after[name] - before[name] for name in ("drafted", "free_drafted", "free_accepted")}
    assert verified.accepted >= found["free_accepted"]
    # The last drafts of a request are never verified.
    assert verified.drafted <= found["drafted"] + found["free_drafted"]
    verified.require_both_verdicts()
    return found


def test_with_every_kind_of_gate_and_length_and_beside_requests_that_opt_out(model_dir, plain):
    with live(model_dir("llama"), layer_skip(LAYERS // 2, K, free_drafts=FREE)) as engine:
        engine.llm.collective_rpc(draft_also_what_does_not_pay)
        steps_of_fixed_times(engine)
        for gate in ("none", "maxp", "survival"):
            engine.set_gate(gate, GATES[gate])
            found = counted(engine, plain, parameters())
            assert found["free_accepted"] > 20
            assert found["drafted"] > 20
        engine.set_gate("none", None)
        wishes = seen(engine)
        counted(engine, plain, parameters(extra_args={"selfspec_k": 0}))
        assert wishes[True] == {0}
        assert FREE in wishes[False] and max(wishes[False]) == FREE
        engine.call("early_exit_set_draft_length", 2)
        counted(engine, plain, parameters())
        engine.call("early_exit_set_draft_length", 0)
        assert engine.gives(PROMPTS, parameters(), plain).drafted == 0


def test_alone_where_no_layer_drafts(model_dir, plain):
    with live(model_dir("llama"), {"method": "selfspec", "draft_weights": "none"}) as engine:
        engine.llm.collective_rpc(draft_also_what_does_not_pay)
        steps_of_fixed_times(engine)
        found = counted(engine, plain, parameters())
        assert found["drafted"] == 0 and found["free_accepted"] > 20


def seen(engine: Live) -> dict[bool, set[int]]:
    """From now on, the lengths of drafts of requests that want none, and of others."""
    found: dict[bool, set[int]] = {True: set(), False: set()}

    def note(drafter: Any, drafts: list[list[int]]) -> None:
        for name, draft in zip(drafter.runner.input_batch.req_ids, drafts, strict=False):
            found[bool(drafter.runner.requests[name].sampling_params.extra_args)].add(len(draft))

    watch_proposals(engine, note)
    return found


def test_with_a_table_gate_auto_copies_a_window_and_preemption(model_dir, plain):
    spec = layer_skip(
        LAYERS, K, free_drafts=FREE, draft_weights="int8", gate="auto", length_table="1:3 6:2", draft_window=32
    )
    small = {"kv_cache_memory_bytes": 24 * 2**16, "max_model_len": 384}
    with live(model_dir("llama"), spec, **small) as engine:
        steps_of_fixed_times(engine, 0.02)
        lengths = seen(engine)[False]
        assert counted(engine, plain, parameters())["free_accepted"] > 20
        assert 3 < max(lengths) <= FREE  # the table bounds the model's own drafts
