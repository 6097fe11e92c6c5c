"""Which requests of a round draft on and where they write; imports the proposer (and so vLLM), starts no engine."""

import random
from types import SimpleNamespace

import pytest
import torch

from selfspec_cli.early_exit.counters import DraftCounters
from selfspec_cli.vllm_plugin.contexts.window import Window
from selfspec_cli.vllm_plugin.v1.proposer import _EarlyExit
from selfspec_cli.vllm_plugin.v1.round import Ahead, Round


def test_requests_draft_on_while_their_gate_is_open_and_the_model_has_room():
    draw = random.Random(0)
    for _ in range(300):
        count, last = draw.randrange(1, 6), 20
        starts = torch.tensor([draw.randrange(8, last) for _ in range(count)])
        proposer = SimpleNamespace(_last_useful=last)
        state = Round(torch.arange(count), starts.int(), starts.clone(), room=last - int(starts.max()))
        want = list(range(count))
        for steps in range(1, 12):
            state.positions = state.positions + 1
            closed = {row for row in want if draw.random() < 0.15}
            open_ = None if not closed and draw.random() < 0.5 else torch.tensor([row not in closed for row in want])
            want = [row for row in want if row not in closed and int(starts[row]) + steps < last]
            went = _EarlyExit._go_on(proposer, state, open_, steps)
            assert went == bool(want)
            if not want:
                break
            assert state.rows.tolist() == want
            assert state.positions.tolist() == [int(starts[row]) + steps for row in want]


class Group:
    """A KV cache group whose builder returns what it was given."""

    def get_metadata_builder(self):
        return SimpleNamespace(build=lambda prefix, common: common)


def table(block_size, blocks):
    """vLLM's block table as the loop sees it, over blocks [requests, columns]."""
    return SimpleNamespace(block_size=block_size, get_device_tensor=lambda requests: blocks[:requests])


def test_every_step_writes_where_the_block_table_says_whoever_has_left():
    draw = torch.Generator().manual_seed(0)
    tables = [table(size, torch.randperm(5 * 8, generator=draw).int().view(5, 8)) for size in (4, 8)]
    groups = [(Group(), ["a", "b"]), (Group(), ["c"])]
    starts = torch.tensor([3, 9, 14, 0, 7])
    state = Round(torch.arange(5), starts.int(), starts.clone(), room=100)
    for step in range(7):
        if step == 3:
            state.keep(torch.tensor([True, False, True, True, False]))
        if state.ahead is None:
            state.ahead = Ahead.of(state, 7, tables, 5)
        metadata, slots = state.ahead.metadata(groups, torch.arange(6).int())
        assert list(metadata) == list(slots) == ["a", "b", "c"]
        for one, name in zip(tables, ("a", "c"), strict=True):
            blocks, size = one.get_device_tensor(5), one.block_size
            want = [
                int(blocks[row, at // size]) * size + at % size
                for row, at in zip(state.rows.tolist(), state.positions.tolist(), strict=True)
            ]
            assert slots[name].tolist() == want
            assert slots[name].is_contiguous()
            common = metadata[name]
            assert common.positions.tolist() == state.positions.tolist()
            assert common.seq_lens.tolist() == [at + 1 for at in state.positions.tolist()]
            assert common.seq_lens_cpu_upper_bound.tolist() == common.seq_lens.tolist()
            assert common.max_seq_len == max(common.seq_lens.tolist())
            assert (common.num_reqs, common.num_actual_tokens, common.max_query_len) == (len(state.rows),) * 2 + (1,)
            first = list(range(len(state.rows) + 1))
            assert common.query_start_loc.tolist() == common.query_start_loc_cpu.tolist() == first
            assert common.slot_mapping.tolist() == want
            assert (common.slot_mapping.dtype, common.seq_lens.dtype) == (torch.int64, torch.int32)
            assert torch.equal(common.block_table_tensor, blocks[state.rows])
        state.positions = state.positions + 1


def test_steps_past_the_end_of_the_block_table_are_not_looked_up():
    state = Round(torch.tensor([0]), torch.tensor([1]).int(), torch.tensor([6]), room=1)
    ahead = Ahead.of(state, 12, [table(4, torch.tensor([[5, 2]]).int())], 1)
    assert ahead.groups[0][1][:2, 0].tolist() == [2 * 4 + 2, 2 * 4 + 3]


def test_who_leaves_takes_the_statistic_of_the_step_before_along():
    state = Round(torch.tensor([4, 5, 6]), torch.tensor([1, 2, 3]).int(), torch.tensor([7, 8, 9]), room=9)
    state.keep(torch.tensor([True, True, False]))
    assert state.previous is state.lengths is state.limits is None
    state.previous, state.lengths, state.limits = torch.tensor([[0.5, 0.25], [3, 1], [0.7, 0.1]])
    state.keep(torch.tensor([False, True]))
    assert (state.rows.tolist(), state.tokens.tolist(), state.positions.tolist()) == ([5], [2], [8])
    assert (state.previous.tolist(), state.lengths.tolist()) == ([0.25], [1])
    assert state.limits.tolist() == pytest.approx([0.1])


FINE = [0.0, 7.0, 1.0]


@pytest.mark.parametrize("second", [FINE, [0.0, torch.nan, 1.0], [-torch.inf] * 3], ids=["fine", "nan", "infinite"])
def test_the_gate_is_asked_after_every_step_but_the_last_and_closed_where_logits_are_no_numbers(second):
    asked, bad = [], second is not FINE

    def decide(logits, state):
        asked.append(logits.tolist())
        return torch.tensor([False, True])

    proposer = SimpleNamespace(
        head=SimpleNamespace(logits=lambda hidden: torch.tensor([FINE, second])),
        recorder=None,
        worth=None,
        counters=DraftCounters(3),
        gate=SimpleNamespace(decide=decide),
        _forward=lambda state: torch.ones(2, 4),
    )
    state = Round(torch.arange(2), torch.zeros(2).int(), torch.zeros(2).long(), room=9)
    logits, best, open_ = _EarlyExit._decide(proposer, state, ["x", "y"], False)
    assert best.tolist() == [1, 0 if bad else 1] and logits.isfinite().all()
    assert open_.tolist() == [False, not bad]
    assert len(asked) == 1
    _, _, open_ = _EarlyExit._decide(proposer, state, ["x", "y"], True)
    assert len(asked) == 1
    assert open_ is None if not bad else open_.tolist() == [True, False]
    assert proposer.counters.nan_logits == (2 if bad else 0)


@pytest.mark.parametrize("window", [1, 4, 6, 9, 40])
def test_with_a_window_the_first_block_and_the_last_tokens_are_attended_to(window):
    """Read back from the block table and the lengths, token by token, as attention reads the KV cache."""
    size, steps = 4, 6
    blocks = torch.randperm(3 * 12, generator=torch.Generator().manual_seed(window)).int().view(3, 12)
    ends = torch.tensor([2, 17, 38])  # positions of the newest tokens
    state = Round(torch.arange(3), ends.int(), ends.clone(), room=100)
    ahead = Ahead.of(state, steps, [table(size, blocks)], 3, Window(window))
    for step in range(steps):
        metadata, slots = ahead.metadata([(Group(), ["a"])], torch.arange(4).int())
        common = metadata["a"]
        assert common.max_seq_len == max(common.seq_lens.tolist())
        for row, end in enumerate((ends + step).tolist()):
            read = [
                int(common.block_table_tensor[row, at // size]) * size + at % size
                for at in range(int(common.seq_lens[row]))
            ]
            cached = [int(blocks[row, at // size]) * size + at % size for at in range(end + 1)]
            assert read[-1] == slots["a"].tolist()[row] == cached[-1]
            assert read[:size] == cached[:size]
            assert read[-window:] == cached[-window:]
            assert read == [slot for slot in cached if slot in set(read)]  # in order, and each once
            # Whole blocks around the window as it was when the round began, and nothing else.
            assert len(read) <= size + window + size + step
            assert len(read) == len(cached) or len(cached) > size + window


def test_a_kind_of_context_hears_which_rows_of_the_batch_are_still_drafting():
    """In the middle of a round too, when the gates of others have closed."""

    def shortened(blocks, seq_lens, size, rows):
        return blocks.flip(1), (rows + size).int()

    blocks = torch.arange(12).int().view(3, 4)
    state = Round(torch.tensor([2, 0]), torch.zeros(2).int(), torch.tensor([9, 13]), room=9)
    ahead = Ahead.of(state, 1, [table(4, blocks)], 3, SimpleNamespace(shortened=shortened))
    assert ahead.seq_lens.tolist() == [[10 - 6, 14 - 4]]
    assert ahead.groups[0][0].tolist() == blocks[[2, 0]].flip(1).tolist()
