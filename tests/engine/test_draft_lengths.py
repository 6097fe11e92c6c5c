"""Draft lengths by load, by context, by request, by measured times and by what the text repeats: followed in every
round, and lossless."""

from typing import Any

import pytest
from harness import GATES, Live, greedy, layer_skip, live, ragged_prompts, tokens
from models import LAYERS, VOCAB

K = 6
VLLMS = [[1, 2, K], [3, 4, 2], [5, 8, 0]]  # vLLM's way to write a table
TABLE = "1:6 1@120:1 3:3 3@60:0 3@110:6 6:2"
PROMPTS = ragged_prompts(16, VOCAB, seed=4)
ASKED: list[dict[str, Any] | None] = [
    None,
    {"selfspec_k": 0},
    {"selfspec_k": 1},
    {"selfspec_threshold": 0.0, "mine": 1},
]


def parameters(own: bool) -> list[Any]:
    """The batch shrinks towards the end. own: requests ask for something of their own, alternating."""
    return [greedy(24 + 6 * number, extra_args=ASKED[number % 4] if own else None) for number in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def plain(model_dir) -> list[list[int]]:
    with live(model_dir("llama")) as engine:
        return tokens(engine.generate(PROMPTS, parameters(own=False)))


Seen = list[tuple[int, int, dict[str, Any], int]]


def watch(engine: Live) -> Seen:
    """Every request of every round from now on, but after its last token: requests in the batch, its context, what it
    asked for, its drafts."""
    seen: Seen = []

    def note(drafter: Any, drafts: list[list[int]]) -> None:
        batch = drafter.runner.input_batch
        for row, (name, draft) in enumerate(zip(batch.req_ids, drafts, strict=False)):
            if drafter._sampled[row] and not drafter._ended(row):
                asked = drafter.runner.requests[name].sampling_params.extra_args or {}
                seen.append((len(drafts), int(batch.num_tokens_no_spec[row]) - 1, asked, len(draft)))

    engine.watch_proposals(note)
    return seen


def test_vllms_list_of_lengths_by_batch_size_is_followed(model_dir, plain):
    spec = layer_skip(LAYERS // 2, K, num_speculative_tokens_per_batch_size=VLLMS)
    with live(model_dir("llama"), spec) as engine:
        seen = watch(engine)
        engine.gives(PROMPTS, parameters(own=False), plain).require_both_verdicts()
    lengths = {load: {drafted for size, _, _, drafted in seen if size == load} for load in (1, 2, 3, 4, 5, 8)}
    assert lengths == {1: {K}, 2: {K}, 3: {2}, 4: {2}, 5: {0}, 8: {0}}


def test_load_context_and_requests_own_wishes_together_while_requests_are_preempted(model_dir, plain):
    """Two dozen blocks for eight requests: some are thrown out and computed again."""
    spec = layer_skip(LAYERS // 2, K, length_table=TABLE, gate="maxp", tau=0.3)
    with live(model_dir("llama"), spec, kv_cache_memory_bytes=24 * 2**16, max_model_len=384) as engine:
        seen = watch(engine)
        engine.gives(PROMPTS, parameters(own=True), plain).require_both_verdicts()
        assert engine.metric("num_preemptions") > 0
        table = engine.drafter.lengths.table
    kinds = set()
    for load, context, own, drafted in seen:
        cell = table.at(load, context)
        most = min(cell.k, own.get("selfspec_k", K))
        assert drafted <= most, (load, context, own)
        kinds.add((cell.k, own.get("selfspec_k"), "selfspec_threshold" in own, drafted == most))
        if "selfspec_threshold" in own:
            assert drafted == most  # its gate never closes
    assert {0, 1, 2, 6} <= {k for k, *_ in kinds}
    assert (2, None, False, False) in kinds  # a gate closed within the table's length
    assert {drafted for *_, own, drafted in seen if own.get("selfspec_k") == 0} == {0}


def cost(engine: Live) -> int:
    """Rounds of a request so far in which drafts did not pay."""
    return int(engine.drafter.counters.off["cost"])


def test_the_one_line_drafts_is_lossless_and_follows_gates_that_are_set(model_dir, plain):
    """`{"method": "selfspec"}` alone: copies of all layers, prompt lookup and gate auto, which may be left and taken
    again on the live engine."""
    with live(model_dir("llama"), {"method": "selfspec"}) as engine:
        engine.fix_times()
        made = {}
        for gate, threshold in (("auto", None), ("none", None), ("maxp", 0.3), ("auto", None)):
            engine.call("early_exit_set_gate", gate, threshold)
            counted = cost(engine)
            counts = engine.gives(PROMPTS, parameters(own=False), plain)
            made[gate] = cost(engine) - counted
            if gate != "auto":
                counts.require_both_verdicts()
        engine.counts().require_both_verdicts()
        rule = engine.drafter.lengths.rule
        assert made["none"] == made["maxp"] == 0
        assert rule.choices > 20 and len({width for _, _, width, *_ in rule._seen}) > 1
        assert sum(rule.acceptance.stood) > 0 < sum(rule.acceptance.failed)


# ---- drafts from what a request had before, beside the model's own: whatever bounds or closes them ------------------

SHORT, FREE = 4, 10  # most of the model's own draft, and of a copied one
REPEATING = [
    (prompt[:15] * 9)[:100] if number % 2 else prompt for number, prompt in enumerate(ragged_prompts(12, VOCAB, seed=6))
]
"""Every second prompt says the same again and again: requests with a match run beside others."""


def asking(**asked: Any) -> list[Any]:
    """Requests of many lengths; `asked` by the first of every three."""
    return [greedy(40 + 9 * number, **({} if number % 3 else asked)) for number in range(len(REPEATING))]


@pytest.fixture(scope="module")
def plain_repeating(model_dir) -> list[list[int]]:
    with live(model_dir("llama")) as engine:
        return tokens(engine.generate(REPEATING, asking()))


def counted(engine: Live, plain: list[list[int]], params: list[Any]) -> dict[str, int]:
    """Generate what the plain engine did; what the draft loop counted meanwhile."""
    before = engine.call("early_exit_counters")
    verified = engine.gives(REPEATING, params, plain)
    after = engine.call("early_exit_counters")
    found = {name: after[name] - before[name] for name in ("drafted", "free_drafted", "free_accepted")}
    assert verified.accepted >= found["free_accepted"]
    # The last drafts of a request are never verified.
    assert verified.drafted <= found["drafted"] + found["free_drafted"]
    verified.require_both_verdicts()
    return found


def test_with_every_kind_of_gate_and_length_and_beside_requests_that_opt_out(model_dir, plain_repeating):
    with live(model_dir("llama"), layer_skip(LAYERS // 2, SHORT, free_drafts=FREE)) as engine:
        engine.draft_also_what_does_not_pay()
        engine.fix_times()
        for gate in ("none", "maxp", "survival"):
            engine.call("early_exit_set_gate", gate, GATES[gate])
            found = counted(engine, plain_repeating, asking())
            assert found["free_accepted"] > 20
            assert found["drafted"] > 20
        engine.call("early_exit_set_gate", "none", None)
        seen = watch(engine)
        counted(engine, plain_repeating, asking(extra_args={"selfspec_k": 0}))
        assert {drafted for *_, own, drafted in seen if own} == {0}
        assert max(drafted for *_, own, drafted in seen if not own) == FREE
        engine.call("early_exit_set_draft_length", 2)
        counted(engine, plain_repeating, asking())
        engine.call("early_exit_set_draft_length", 0)
        assert engine.gives(REPEATING, asking(), plain_repeating).drafted == 0


def test_alone_where_no_layer_drafts(model_dir, plain_repeating):
    with live(model_dir("llama"), {"method": "selfspec", "draft_weights": "none"}) as engine:
        engine.draft_also_what_does_not_pay()
        engine.fix_times()
        found = counted(engine, plain_repeating, asking())
        assert found["drafted"] == 0 and found["free_accepted"] > 20


def test_with_a_table_gate_auto_copies_a_window_and_preemption(model_dir, plain_repeating):
    spec = layer_skip(
        LAYERS, SHORT, free_drafts=FREE, draft_weights="int8", gate="auto", length_table="1:3 6:2", draft_window=32
    )
    small = {"kv_cache_memory_bytes": 24 * 2**16, "max_model_len": 384}
    with live(model_dir("llama"), spec, **small) as engine:
        engine.fix_times(0.02)
        seen = watch(engine)
        assert counted(engine, plain_repeating, asking())["free_accepted"] > 20
        assert 3 < max(drafted for *_, drafted in seen) <= FREE  # the table bounds the model's own drafts
