"""Free drafts as the device makes them, against the plain rule. Run as kernels_interpreted.py is."""

import math
import random
from types import SimpleNamespace

import pytest
import torch
from kernels_interpreted import DEVICE, end_step, new_state

from selfspec_cli.early_exit.free_drafts import LONGEST, Matches
from selfspec_cli.early_exit.length_table import LengthTable
from selfspec_cli.early_exit.resolved import NOTHING, RequestSettings
from selfspec_cli.vllm_plugin.v2.matches import certain
from selfspec_cli.vllm_plugin.v2.round_setup import Ending, begin_round, take_in
from selfspec_cli.vllm_plugin.v2.state import DeviceGate, Free

ROWS, FREE, K, COST, VOCAB, MAX_LEN = 4, 7, 3, 0.15, 5, 1400  # two blocks of history


class Device:
    """Requests 3, 2, 1 in rows 0, 1, 2, as the V2 runner keeps them."""

    def __init__(self, table=None, free=FREE, k=K, requests=0, alone=False):
        self.text = torch.full((ROWS, MAX_LEN), 99, dtype=torch.int32)
        of_free = {"free": Free(free, k, requests, alone), "text": self.text}
        self.state = new_state(ROWS, max(free, k), MAX_LEN, table=table or LengthTable.fixed(k), **of_free)
        self.state.step_cost = COST
        self.end = end_step(VOCAB, rows=ROWS)

    def draft(self, texts, sampled, own, dummy_run=False, steps=None):
        """A round behind `texts`, of which `sampled` tokens are new. own: what the model's own draft would say."""
        count, state = len(texts), self.state
        slots = torch.arange(ROWS - 1, ROWS - 1 - count, -1)
        for slot, text in zip(slots.tolist(), texts, strict=True):
            self.text[slot, : len(text)] = torch.tensor(text, dtype=torch.int32)
        lengths = torch.tensor([len(text) - 1 for text in texts], dtype=torch.int32)
        self.batch = SimpleNamespace(
            num_reqs=count, seq_lens=lengths + 2, seq_lens_cpu_upper_bound=lengths + 9, idx_mapping=slots
        )
        state.inputs.idx_mapping.fill_(-1)
        if not dummy_run:
            state.inputs.idx_mapping[:count] = slots
        last = torch.full((ROWS, 1), VOCAB)
        verdict = (torch.tensor(sampled, dtype=torch.int32), torch.full((count,), 2, dtype=torch.int32), last)
        begin_round(
            state, self.batch, state.draft_tokens.shape[1] if steps is None else steps, verdict, dummy_run=dummy_run
        )
        while int(state.progress.active):
            step = int(state.progress.step)
            logits = torch.zeros(ROWS, VOCAB)
            for row in range(count):
                logits[row, own[row][step] if own[row] else 0] = 9.0
            self.end(state, logits)
        drafted = state.lengths[slots].tolist()
        return [state.draft_tokens[row, :length].tolist() for row, length in enumerate(drafted)]


def plain_round(kept, texts, own, room=FREE, k=K):
    """A round of the plain rule, as the V1 runner has it."""
    drafts, copied = [[] for _ in texts], []
    for one, text in zip(kept, texts, strict=True):
        one.look_up(torch.tensor(text), COST / len(texts), room, k)
    for step in range(k + 1):
        copied = []
        for one, text, draft in zip(kept, texts, drafts, strict=True):
            one.drafted = len(draft)
            copied.append(one.rest(torch.tensor(text), draft, room))
            one.copied = len(copied[-1])
        going = [row for row, draft in enumerate(drafts) if len(draft) == step and not copied[row]]
        if step == k or not going:
            break
        for row in going:
            drafts[row].append(own[row][step])
    return [draft + more for draft, more in zip(drafts, copied, strict=True)]


def test_a_doubtful_match_is_copied_for_one_request_and_left_to_the_model_where_others_draft_anyway():
    doubtful, others, own = [1, 2, 3, 1], [[4, 3, 2], [3, 4, 0]], [4, 4, 4]
    for texts, wanted in (([doubtful], [2, 3, 1, 2, 3, 1, 2]), ([doubtful, *others], own)):
        device = Device()
        device.state.step_cost = 0.2
        assert device.draft(texts, [1] * len(texts), [own] * len(texts))[0] == wanted


@pytest.mark.parametrize(("free", "k"), [(2, K), (FREE, K), (FREE, 1)])
def test_drafts_and_what_is_learnt_are_those_of_the_plain_rule(free, k):
    draw = random.Random(0)
    device, kept = Device(LengthTable.fixed(k), free=free), [Matches(free, K) for _ in range(3)]
    room = free if k == K else k  # what allows a request less than k allows it no longer a free draft
    texts = [[draw.randrange(VOCAB - row) for _ in range(length)] for row, length in enumerate((3, 40, 1030))]
    sampled, kinds, free_accepted = [1] * 3, set(), 0
    likely = [0.95, 0.6, 0.8]  # of a drafted token
    for _ in range(30):
        own = [[draw.randrange(VOCAB - 1) for _ in range(K)] for _ in texts]
        wanted = plain_round(kept, texts, own, room, k)
        assert device.draft(texts, sampled, own) == wanted
        matches, slots = device.state.matches, torch.tensor([3, 2, 1])
        for name in ("length", "trusted", "drafted", "copied"):
            assert getattr(matches, name)[slots].tolist() == [getattr(one, name) for one in kept], name
        torch.testing.assert_close(matches.rates[slots], torch.stack([one.rates for one in kept]))
        assert matches.own[slots].tolist() == pytest.approx([one.own for one in kept], abs=1e-5)
        kinds |= {(bool(one.drafted), bool(one.copied)) for one in kept}
        for row, draft in enumerate(wanted):
            accepted = next((n for n in range(len(draft)) if draw.random() >= likely[row]), len(draft))
            texts[row] += [*draft[:accepted], draw.randrange(VOCAB - 1)]
            sampled[row] = accepted + 1
            free_accepted += kept[row].verdict(torch.tensor(texts[row]), accepted)
    assert kinds == {(False, True), (True, False)} | ({(True, True)} if room > 1 else set())
    counted = device.state.snapshot()
    device.draft(texts, sampled, own)  # takes in the last verdict
    assert device.state.snapshot()["free_accepted"] == free_accepted > 10
    assert counted["free_drafted"] > counted["free_accepted"]
    assert counted["steps"] == sum(step * rounds for step, rounds in enumerate(counted["length_histogram"]))
    assert sum(counted["length_histogram"]) == counted["rounds"] == 30
    assert not device.state.matches.found.any()


REPEATED = [1, 2, 3, 4, 0] * 5


def test_a_round_in_which_all_have_a_match_takes_no_step():
    device = Device()
    assert device.draft([REPEATED, REPEATED[:-2]], [1, 1], []) == [[1, 2, 3, 4, 0, 1, 2], [4, 0, 1, 2, 3, 4, 0]]
    counted = device.state.snapshot()
    assert (counted["rounds"], counted["steps"], counted["drafted"], counted["free_drafted"]) == (1, 0, 0, 14)
    assert counted["length_histogram"][0] == 1
    assert device.state.buffers.seq_lens.tolist() == [0] * ROWS
    assert device.state.inputs.idx_mapping.tolist() == [-1] * ROWS


def test_where_no_layer_drafts_a_request_without_a_match_drafts_nothing_and_any_match_is_copied():
    device, new, doubtful = Device(alone=True), [5, 4, 3], [5, 4, 2, 5]
    drafts = device.draft([REPEATED, new, doubtful], [1, 1, 1], [[]] * 3)
    assert drafts == [[1, 2, 3, 4, 0, 1, 2], [], [4, 2, 5, 4, 2, 5, 4]]
    counted = device.state.snapshot()
    assert (counted["rounds"], counted["steps"], counted["drafted"], counted["free_drafted"]) == (1, 0, 0, 14)


@pytest.mark.parametrize(("value", "steps"), [(0.0, 3), (0.795, 2), (0.8, 1), (0.9, 0)])
def test_one_request_without_a_match_drafts_while_a_step_is_worth_its_time(value, steps):
    """Before anything is known, 0.802 of drafts are taken to stand, and 0.992 of those that are sure."""
    device, new = Device(), [5, 4, 3]
    device.state.measures, device.state.step_value = True, value
    drafts = device.draft([REPEATED, new], [1, 1], [[], [0, 0, 0]])
    assert [len(draft) for draft in drafts] == [FREE, steps]
    counted = device.state.snapshot()
    assert (counted["steps"], counted["drafted"], counted["gate_ended"]) == (steps, steps, int(steps < K))
    assert device.state.inputs.idx_mapping.tolist() == [-1] * ROWS
    assert device.state.buffers.seq_lens.tolist() == [0] * ROWS


def test_the_first_step_is_made_at_any_price_where_nobody_has_a_match():
    """Without drafts there would be no verdicts, and nothing would show what drafts are worth."""
    device, new = Device(), [5, 4, 3]
    device.state.measures, device.state.step_value = True, 50.0
    drafts = device.draft([new, [6, 4, 3]], [1, 1], [[0, 0, 0], [0, 0, 0]])
    assert [len(draft) for draft in drafts] == [1, 1]


@pytest.mark.parametrize(
    ("own", "end", "limit", "steps", "wanted"),
    [
        (RequestSettings(2), Ending(), K, FREE, 2),
        (RequestSettings(K), Ending(), K, FREE, FREE),
        (NOTHING, Ending(len(REPEATED) + 4), K, FREE, 3),
        (NOTHING, Ending(stop=VOCAB), K, FREE, 0),
        (NOTHING, Ending(), 1, FREE, 1),
        (NOTHING, Ending(), K, 5, 5),
        (NOTHING, Ending(), K, 2, 2),
    ],
)
def test_what_bounds_drafts_bounds_free_ones(own, end, limit, steps, wanted):
    device = Device()
    take_in(device.state, [3], [own], [math.nan], [end])
    device.state.progress.limit.fill_(limit)
    assert device.draft([REPEATED], [1], [[]], steps=steps) == [(REPEATED * 2)[:wanted]]


def test_a_table_bounds_them_and_a_gate_is_not_asked():
    device = Device(LengthTable.parse("1:3 2:1", K))
    DeviceGate(device.state, "maxp", 1.0)
    assert [len(draft) for draft in device.draft([REPEATED], [1], [[]])] == [FREE]
    assert [len(draft) for draft in device.draft([REPEATED] * 2, [1, 1], [[]] * 2)] == [1, 1]


def test_while_few_requests_run_a_free_draft_is_longer_than_the_tables_entry():
    device, new = Device(LengthTable.parse("1:3 2:1 3:0", K), requests=2), [5, 4, 3]
    assert [len(draft) for draft in device.draft([REPEATED, new], [1, 1], [[], [0]])] == [FREE, 1]
    take_in(device.state, [3], [RequestSettings(2)], [math.nan], [Ending()])
    assert [len(draft) for draft in device.draft([REPEATED] * 2, [1, 1], [[]] * 2)] == [2, FREE]
    assert device.draft([REPEATED] * 3, [1] * 3, [[]] * 3) == [[]] * 3
    assert [len(draft) for draft in device.draft([REPEATED], [1], [[]], steps=5)] == [2]


def test_inside_a_prefill_in_a_dummy_run_and_in_another_request_nothing_is_drafted_or_learnt():
    device = Device()
    assert device.draft([REPEATED], [0], [[]]) == [[]]
    assert device.draft([REPEATED], [1], [[]], dummy_run=True) == [[]]
    assert not device.state.matches.known.any()
    device.draft([REPEATED], [1], [[]])
    device.draft([[*REPEATED, 1, 2, 0]], [3], [[0] * K])
    assert device.state.matches.rates[3, -1] != LONGEST / (LONGEST + 1)
    take_in(device.state, [3], [NOTHING], [math.nan], [Ending()])
    device.draft([REPEATED], [1], [[]])
    assert device.state.matches.rates[3, -1] == pytest.approx(LONGEST / (LONGEST + 1))


def test_the_verifier_is_told_that_copied_tokens_were_sure():
    device, new = Device(), [5, 4, 3]
    logits = torch.full((ROWS, FREE, VOCAB), 7.0)
    device.draft([REPEATED, new], [1, 1], [[], [0, 0, 0]])
    certain(device.state, device.batch, logits)
    assert logits.device.type == DEVICE
    for place in range(FREE):
        assert logits[3, place].softmax(-1).tolist() == [float(token == REPEATED[place]) for token in range(VOCAB)]
    assert (logits[:3] == 7.0).all()
