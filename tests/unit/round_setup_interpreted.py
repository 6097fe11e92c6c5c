"""How much each request may draft, as the device decides it, against the plain functions. Run as kernels_interpreted.py
is, by test_v2_kernels.py."""

import math
import random
from types import SimpleNamespace

import kernels_interpreted
import pytest
import torch
from kernels_interpreted import DEVICE, MAX_LEN, begin, end_step, sharp_and_flat

from selfspec_cli.early_exit import confidence
from selfspec_cli.early_exit.gates import device_features
from selfspec_cli.early_exit.length_table import LARGEST, LengthTable
from selfspec_cli.early_exit.resolved import NOTHING, RequestSettings
from selfspec_cli.vllm_plugin.v2.round_setup import Ending, begin_round, take_in
from selfspec_cli.vllm_plugin.v2.state import DeviceGate, DraftState

ROWS, K = 6, 5
TABLE = LengthTable.parse("1:4 1@30:1 3:2 3@20:0 3@40:5 5:0", K)


def new_state(table: LengthTable | None = None, measures: bool = False) -> DraftState:
    return kernels_interpreted.new_state(ROWS, K, table=table, measures=measures)


def drafted(state: DraftState, requests: int) -> list[int]:
    """Run the loop as the device does, and say how many tokens each row drafted."""
    end = end_step(rows=ROWS)
    while int(state.progress.active):
        end(state, sharp_and_flat(ROWS))
    return state.lengths[torch.arange(ROWS - 1, ROWS - 1 - requests, -1)].tolist()


@pytest.mark.parametrize("requests", range(1, ROWS + 1))
def test_the_table_decides_by_load_and_by_each_requests_context(requests):
    contexts = [10, 19, 20, 30, 39, 40][:requests]
    state = new_state(TABLE)
    begin(state, contexts, steps=K)
    wanted = [TABLE.at(requests, context).k for context in contexts]
    assert state.inputs.row_steps[:requests].tolist() == wanted
    assert int(state.progress.active) == sum(length > 0 for length in wanted)
    assert drafted(state, requests) == wanted


def test_the_widths_of_the_verify_pass_and_of_the_live_engine_hold_beside_the_table():
    state = new_state(LengthTable.parse("1:4", K))
    begin(state, [10, 10], steps=3)
    assert state.inputs.row_steps[:2].tolist() == [3, 3]
    state.progress.limit.fill_(2)
    begin(state, [10, 10], steps=3)
    assert drafted(state, 2) == [2, 2]


def test_a_requests_own_length_holds_beside_the_table_until_another_takes_its_slot():
    state = new_state(LengthTable.parse("1:4", K))
    own = [RequestSettings(0), RequestSettings(2), RequestSettings(5), NOTHING]
    take_in(state, [5, 4, 3, 2], own, [math.nan] * 4, [Ending()] * 4)
    assert state.limits.own_lengths.tolist() == [LARGEST, LARGEST, LARGEST, 5, 2, 0]
    begin(state, [10] * 4, steps=K)
    assert state.inputs.requests.tolist() == [-1, 4, 3, 2, -1, -1]
    assert drafted(state, 4) == [0, 2, 4, 4]
    take_in(state, [5], [NOTHING], [math.nan], [Ending()])
    begin(state, [10] * 4, steps=K)
    assert drafted(state, 4) == [4, 2, 4, 4]


def test_nothing_is_drafted_that_would_lie_beyond_a_requests_end():
    """With 10 tokens in the cache and one more sampled, a request that ends at 14 tokens may get three more: the round
    yields one beside its drafts."""
    state = new_state(LengthTable.parse("1:5", K))
    ends = [Ending(17), Ending(14), Ending(12), Ending(11), Ending(stop=101), Ending(stop=7)]
    take_in(state, [5, 4, 3, 2, 1, 0], [NOTHING] * 6, [math.nan] * 6, ends)
    begin(state, [10] * 6, steps=K)  # the token that was sampled last is 100 + the request
    assert drafted(state, 6) == [5, 2, 0, 0, 0, 5]
    assert state.limits.ends.dtype == state.limits.stops.dtype == torch.int32
    take_in(state, [3, 1], [NOTHING] * 2, [math.nan] * 2, [Ending(), Ending()])  # others in their places
    begin(state, [10] * 6, steps=K)
    assert drafted(state, 6) == [5, 2, 5, 0, 5, 5]
    state = new_state(LengthTable.parse("1:5", K))
    begin(state, [MAX_LEN - 4, MAX_LEN - 3, MAX_LEN - 2], steps=K)  # the model's end
    assert state.inputs.row_steps[:3].tolist() == [2, 1, 0]


@pytest.mark.parametrize(
    ("given", "prompt", "wanted"),
    [
        (None, 5, Ending()),
        (SimpleNamespace(max_tokens=None, eos_token_id=None), 5, Ending()),
        (SimpleNamespace(max_tokens=3, eos_token_id=None), 5, Ending(8)),
        (SimpleNamespace(max_tokens=LARGEST, eos_token_id=0), 5, Ending(LARGEST, 0)),
    ],
)
def test_where_a_request_ends_by_its_sampling_parameters(given, prompt, wanted):
    assert Ending.of(given, prompt) == wanted


def test_thresholds_of_requests_come_before_the_gates_own():
    state = new_state(LengthTable.parse("1:5", K))
    DeviceGate(state, "maxp", 0.0)
    take_in(state, [4, 2], [NOTHING, NOTHING], [0.99, 0.0], [Ending(), Ending()])
    logits = torch.zeros(ROWS, 2100)
    logits[:, 7] = math.log(0.95 / 0.05 * 2099)  # probability 0.95
    for own_limits, wanted in ((True, [5, 1, 5, 5, 5]), (False, [5] * 5)):
        batch = SimpleNamespace(seq_lens=torch.tensor([10, 10, 20, 20, 20], dtype=torch.int32), num_reqs=5)
        state.inputs.idx_mapping[:5] = torch.tensor([5, 4, 3, 2, 1])
        one, none = torch.ones(5, dtype=torch.int32), torch.zeros(5, dtype=torch.int32)
        begin_round(state, batch, K, (one, none, torch.arange(ROWS)), own_limits)
        end = end_step(rows=ROWS)
        while int(state.progress.active):
            end(state, logits)
        assert state.lengths[[5, 4, 3, 2, 1]].tolist() == wanted


def test_a_round_in_which_rows_end_by_their_own_length_is_not_ended_by_the_gate():
    state = new_state(LengthTable.parse("1:4 1@20:1", K))
    begin(state, [10, 30], steps=K)
    assert drafted(state, 2) == [4, 1]
    counted = state.snapshot()
    assert (counted["gate_ended"], counted["steps"], counted["drafted"]) == (0, 4, 5)


# ---- what another step is worth --------------------------------------------------------------------------------------


def test_what_is_learnt_of_confidence_is_what_the_plain_functions_say():
    draw, state = random.Random(0), new_state(measures=True)
    counts, column = confidence.first_counts(), device_features().index("maxp")
    slots = torch.arange(ROWS - 1, ROWS - 5, -1)
    for _ in range(20):
        values = torch.rand(4, K, generator=torch.Generator(DEVICE).manual_seed(draw.randrange(10**6)))
        drafted = [draw.randrange(K + 1) for _ in slots]
        stood = [draw.randrange(length + 1) for length in drafted]
        state.statistics[slots, :, column] = values
        state.matches.drafted[slots] = torch.tensor(drafted, dtype=torch.int32)
        begin(state, [10] * 4, sampled=[1 + n for n in stood], steps=K)
        judged = [(row, place) for row in range(4) for place in range(min(drafted[row], stood[row] + 1))]
        sure = torch.tensor([float(values[at]) for at in judged])
        counts = confidence.learnt(counts, sure, torch.tensor([place < stood[row] for row, place in judged]))
        torch.testing.assert_close(state.worth.counts, counts, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(state.worth.rates, confidence.rates(counts), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(state.worth.stands, confidence.usual(counts).expand(ROWS), atol=1e-5, rtol=1e-5)


def test_requests_inside_their_prefill_and_rounds_without_drafts_teach_nothing():
    state = new_state(measures=True)
    state.matches.drafted.fill_(3)
    begin(state, [10, 10], sampled=[0, 0], steps=0)
    torch.testing.assert_close(state.worth.counts, confidence.first_counts())
    begin(state, [10, 10], steps=K)  # the verdict on drafts that were not made
    torch.testing.assert_close(state.worth.counts, confidence.first_counts())


@pytest.mark.parametrize("value", [0.0, 0.5, 1.1, 1.9, 5.0])
def test_a_round_ends_where_all_rows_together_gain_less_than_a_step_is_worth(value):
    state = new_state(measures=True)
    state.step_value = value
    begin(state, [10, 10, 10], steps=K)
    logits = sharp_and_flat(ROWS)
    first = float(confidence.usual(confidence.first_counts()))
    rates = confidence.rates(confidence.first_counts())
    sure = rates[confidence.bins_of(logits.softmax(-1).amax(-1))][:3]
    stands, wanted = torch.full((3,), first), 0
    while wanted < K:
        wanted += 1
        stands = stands * sure
        if float(stands[stands >= confidence.NEGLIGIBLE].sum()) < value:
            break
    drafts = drafted(state, 3)
    assert max(drafts) == wanted
    assert state.snapshot()["gate_ended"] == (wanted < K)
