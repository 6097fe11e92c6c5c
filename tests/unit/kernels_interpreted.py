"""The device's bookkeeping of a draft loop against the plain functions.

On a GPU as it is; on a CPU with TRITON_INTERPRET=1 set before Triton is first imported (test_v2_kernels.py does that).
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import bounds
import pytest
import torch
from all_statistics import all_statistics, statistic

from selfspec_cli.early_exit.counters import JUDGED, STOOD, DraftCounters
from selfspec_cli.early_exit.draft_weights.fp8 import FP8
from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.early_exit.gates import GATES
from selfspec_cli.vllm_plugin.contexts import blocks as chosen
from selfspec_cli.vllm_plugin.contexts.blocks import Blocks, block_weights, block_weights_of_keys
from selfspec_cli.vllm_plugin.contexts.window import Window
from selfspec_cli.vllm_plugin.v2 import kernels as v2_kernels
from selfspec_cli.vllm_plugin.v2.round_setup import begin_round
from selfspec_cli.vllm_plugin.v2.state import DeviceGate, DraftState
from selfspec_cli.vllm_plugin.weights.one_token import gemv

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
torch.set_default_device(DEVICE)
if DEVICE == "cpu":
    bounds.watch()

ROWS, K, VOCAB, MAX_LEN = 5, 3, 2100, 64  # two blocks of logits: the interpreter takes its time for each


def new_state(rows: int = ROWS, k: int = K, most: int = MAX_LEN, **more: Any) -> DraftState:
    """most: tokens of a request's context; more: what `DraftState` takes besides."""
    buffers = SimpleNamespace(
        input_ids=torch.zeros(rows, dtype=torch.int32),
        positions=torch.zeros(rows, dtype=torch.int64),
        seq_lens=torch.zeros(rows, dtype=torch.int32),
        query_start_loc=torch.zeros(rows + 1, dtype=torch.int32),
    )
    mapping, places = torch.full((rows,), -1), torch.zeros(rows, dtype=torch.int64)
    tokens = torch.zeros(rows, k, dtype=torch.int64)
    return DraftState(buffers, mapping, places, tokens, torch.tensor(0), most, **more)


def begin(state: DraftState, lengths: list[int], sampled=None, rejected=None, steps: int = K) -> None:
    """Requests 4, 3, 2, ... in rows 0, 1, 2, ...; lengths: tokens that the target has keys and values for."""
    n, rows = len(lengths), state.draft_tokens.shape[0]
    state.inputs.idx_mapping.fill_(-1)
    state.inputs.idx_mapping[:n] = torch.arange(rows - 1, rows - 1 - n, -1)
    slots = state.inputs.idx_mapping[:n].clone()
    batch = SimpleNamespace(seq_lens=torch.tensor(lengths, dtype=torch.int32), num_reqs=n, idx_mapping=slots)
    sampled = torch.tensor(sampled or [1] * n, dtype=torch.int32)
    rejected = torch.tensor(rejected or [0] * n, dtype=torch.int32)
    begin_round(state, batch, steps, (sampled, rejected, 100 + torch.arange(rows)))


def sharp_and_flat(rows: int, vocab: int = VOCAB, seed: int = 0) -> torch.Tensor:
    scale = torch.linspace(0.5, 9.0, rows).unsqueeze(1)
    return torch.randn(rows, vocab, generator=torch.Generator(DEVICE).manual_seed(seed)) * scale


def end_step(vocab: int = VOCAB, ids: torch.Tensor | None = None, rows: int = ROWS):
    return v2_kernels.EndStep(rows, vocab, ids, torch.device(DEVICE))


def test_a_round_begins_with_what_the_verifier_left():
    state = new_state()
    state.lengths.fill_(3)  # of the drafts of the round before
    # a decode of which one draft was rejected; inside a prefill; at the model's end; a padded row
    begin(state, [10, 20, MAX_LEN - 1], sampled=[2, 0, 1], rejected=[1, 0, 0])
    assert state.buffers.input_ids.tolist() == [104, 0, 0, 0, 0]
    assert state.buffers.positions.tolist() == [9, 0, 0, 0, 0]
    assert state.buffers.seq_lens.tolist() == [10, 0, 0, 0, 0]
    assert state.buffers.query_start_loc.tolist() == [0, 1, 2, 3, 3, 3]
    assert state.inputs.requests.tolist() == state.inputs.idx_mapping.tolist() == [4, -1, -1, -1, -1]
    assert state.lengths.tolist() == [3, 3, 0, 0, 0]  # requests 4, 3 and 2 are in the batch
    assert int(state.progress.active) == 1
    assert not state.draft_tokens.any()


@pytest.mark.parametrize("window", [3, 8, 30, 64])
def test_with_a_window_drafts_attend_to_what_the_plain_functions_say(window):
    state, size, lengths = new_state(), 4, [2, 17, 38, 50]
    table = torch.arange(5 * 16, dtype=torch.int32).view(5, 16)
    begin(state, lengths)
    own = torch.tensor([length + 1 for length in lengths] + [0])  # row 4 is padding
    wanted, left_out = Window(window).shortened(table, own, size)
    Window(window).shorten(state, table, size)
    attended = own - left_out
    assert state.buffers.seq_lens.tolist() == attended.tolist()
    assert state.left_out.tolist() == left_out.tolist()
    for row, tokens in enumerate(attended.tolist()):
        used = -(-(tokens + K) // size)
        assert table[row, :used].tolist() == wanted[row, :used].tolist()
    end_step()(state, sharp_and_flat(ROWS))
    assert state.buffers.positions[:4].tolist() == [length + 1 for length in lengths]
    assert state.buffers.seq_lens[:4].tolist() == [tokens + 1 for tokens in attended[:4].tolist()]


@pytest.mark.parametrize(("page", "dim", "shared", "at_once"), [(16, 64, 6, 8), (4, 16, 1, 3), (48, 80, 2, 1)])
def test_the_attention_to_each_block_is_that_of_the_plain_function(page, dim, shared, at_once):
    """Requests without a key, within a block and at the end of the table; a block, a head and a number of heads that
    are no power of two."""
    heads, columns = 2, 5
    cache = torch.randn(4 * columns, heads, page, 2 * dim)
    table = torch.randperm(4 * columns).int().view(4, columns)
    lengths = torch.tensor([0, 1, 2 * page + 3, columns * page], dtype=torch.int32)
    queries, ends = torch.randn(9, heads * shared, dim), torch.tensor([1, 3, 6, 9])
    rejected = torch.tensor([0, 1, 2, 0])
    found = torch.full((4, heads * shared, columns), -torch.inf)
    block_weights(queries, ends, rejected, cache, table, lengths, 0.2, found, at_once)
    own, keys = queries[[0, 1, 3, 8]], cache[table.long()][..., :dim]
    torch.testing.assert_close(found, block_weights_of_keys(own, keys, lengths, 0.2))
    assert found.isinf().sum((1, 2)).tolist() == [heads * shared * n for n in (columns, columns, columns - 3, 0)]


@pytest.mark.parametrize("tokens", [8, 12, 24, 64])
def test_drafts_over_chosen_blocks_attend_to_what_the_plain_functions_say(tokens):
    state, size, lengths = new_state(), 4, [2, 16, 38, 50]  # the second one's newest token begins a block
    table = torch.arange(5 * 16, dtype=torch.int32).view(5, 16)
    kernel = Blocks(tokens)
    kernel.weights = torch.full((5, 2, 16), torch.nan)  # of blocks without keys nothing is known
    kernel.kept = torch.randn(9, 2, 16) * 4
    kernel.begin(torch.tensor([2, 4, 6, 9]), torch.tensor([0, 1, 0, 2]))
    cache = torch.randn(5 * 16, 1, size, 32)
    kernel.layer = SimpleNamespace(kv_cache=cache, num_kv_heads=1, impl=SimpleNamespace(scale=0.25))
    kernel.places_of_keys = torch.arange(size * 32).view(size, 32)[:, :16].flatten()
    begin(state, lengths)
    state.left_out.fill_(7)  # of a round of more requests
    own = torch.tensor([length + 1 for length in lengths])
    wanted, left_out = kernel.shortened(table[:4], own, size)
    kernel.shorten(state, table, size)
    attended = own - left_out
    assert bool(left_out.any()) == (tokens < 64)
    assert state.buffers.seq_lens.tolist() == [*attended.tolist(), 0]
    assert state.left_out.tolist() == [*left_out.tolist(), 0]
    assert table[4].tolist() == list(range(64, 80))  # padding
    for row, kept in enumerate(attended.tolist()):
        used = -(-(kept + K) // size)
        assert table[row, :used].tolist() == wanted[row, :used].tolist()
        assert kept <= kernel.longest(size)


@pytest.mark.parametrize(("columns", "warps"), [(1, 4), (2048, 4), (2049, 8), (8192, 16), (65536, 32)])
def test_a_longer_block_table_is_chosen_from_by_more_warps(monkeypatch, columns, warps):
    """Compiled for 65,536 columns (a context of a million tokens) and four warps, a thread of an H100 had 60,188 bytes
    more than its registers hold, and compiling took minutes."""
    launched, kernel = [], Blocks(64)
    monkeypatch.setattr(chosen, "_choose", {(1,): lambda *_, **options: launched.append(options["num_warps"])})
    monkeypatch.setattr(chosen, "block_weights", lambda *_: None)
    cache, kernel.kept, kernel.ends, kernel.rejected = torch.zeros(1, 1, 16, 32), torch.zeros(1, 1, 16), None, None
    kernel.layer = SimpleNamespace(kv_cache=cache, num_kv_heads=1, impl=SimpleNamespace(scale=1.0))
    kernel.shorten(new_state(), torch.zeros(1, columns, dtype=torch.int32), 16)
    assert launched == [warps]


@pytest.mark.parametrize("vocab", [5, 2048, 5000])
def test_statistics_equal_the_plain_functions(vocab):
    state, logits = new_state(), sharp_and_flat(ROWS, vocab)
    logits[1, : vocab // 2] = -torch.inf
    logits[2, [0, vocab - 1]] = logits[2].max() + 1  # two best tokens level
    begin(state, [10] * ROWS)
    end = end_step(vocab)
    first = all_statistics(logits)
    end(state, logits)
    again = sharp_and_flat(ROWS, vocab, seed=1)
    end(state, again)
    second = all_statistics(again, before=first)
    order = torch.arange(ROWS - 1, -1, -1)  # row -> request
    torch.testing.assert_close(state.statistics[order, 0], first, atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(state.statistics[order, 1], second, atol=2e-4, rtol=2e-4)
    assert torch.equal(logits.gather(1, state.draft_tokens[:, :1]).squeeze(1), logits.amax(1))
    assert state.draft_tokens[:, 1].tolist() == again.argmax(1).tolist()


def splitting_threshold(gate: str, logits: torch.Tensor) -> float | None:
    """An allowed threshold that closes the gate on some rows and not on others, far from every row's own statistic."""
    if gate in ("none", "auto"):
        return None
    values = statistic(gate, logits).sort().values
    between = ((values[1:] + values[:-1]) / 2).tolist()
    return next(value for value in between if GATES[gate].low <= value <= GATES[gate].high)


@pytest.mark.parametrize("kind", GATES)
def test_gates_open_where_the_plain_rule_does(kind):
    state, logits = new_state(), sharp_and_flat(ROWS)
    threshold = splitting_threshold(kind, logits)
    DeviceGate(state, kind, threshold)
    begin(state, [10] * ROWS)
    end_step()(state, logits)
    rule = GATES[kind].rule(threshold)
    open_ = rule.is_open(statistic(rule.feature or "maxp", logits))
    assert kind in ("none", "auto") or 0 < int(open_.sum()) < ROWS
    assert ((state.buffers.seq_lens > 0) == open_).all()
    assert ((state.inputs.idx_mapping >= 0) == open_).all()
    assert int(state.progress.active) == int(open_.sum())
    assert state.lengths.tolist() == [1] * ROWS
    assert state.buffers.positions[open_].tolist() == [11] * int(open_.sum())


def test_a_gate_without_a_device_expression_is_refused_and_changes_nothing(monkeypatch):
    state = new_state()
    gate = DeviceGate(state, "maxp", 0.3)
    cpu_only = replace(GATES["margin"], name="cpu_only", device=None)
    monkeypatch.setitem(GATES._found, "cpu_only", cpu_only)
    with pytest.raises(SettingsError, match=r"'cpu_only' has no device expression.*allowed on CUDA: none, adaedl"):
        gate.set("cpu_only", 0.2)
    assert gate.kind == "maxp"
    assert state.features[int(state.gate.feature)] == "maxp"


def test_a_draft_vocabulary_is_mapped_back_and_drawn_tokens_are_taken_as_they_are():
    ids = torch.arange(0, 10_000, 2)
    state, logits = new_state(), sharp_and_flat(ROWS)
    begin(state, [10] * ROWS)
    end = end_step(ids=ids)
    end(state, logits)
    end(state, logits, torch.arange(7, 7 + ROWS))
    assert state.draft_tokens[:, 0].tolist() == ids[logits.argmax(1)].tolist()
    assert state.draft_tokens[:, 1].tolist() == list(range(7, 7 + ROWS))
    assert state.buffers.input_ids.tolist() == list(range(7, 7 + ROWS))


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_logits_that_are_no_numbers_propose_nothing_and_are_counted(poison):
    state, logits = new_state(), sharp_and_flat(ROWS)
    logits[1, 2070] = poison  # in the second block
    logits[2] = -torch.inf
    begin(state, [10] * ROWS)
    end_step()(state, logits)
    assert state.lengths.tolist() == [1, 1, 0, 0, 1]  # requests 3 and 2 are rows 1 and 2
    assert (state.buffers.seq_lens > 0).tolist() == [True, False, False, True, True]
    assert state.snapshot()["nan_logits"] == 2


def test_counters_count_as_the_cpus_do():
    state, plain = new_state(), DraftCounters(K)
    gate = DeviceGate(state, "maxp", 0.3)
    end = end_step()
    for seed in range(6):  # each number of rows, and each threshold with few and with many
        requests = seed % ROWS + 1
        gate.set("maxp", (0.05, 0.3, 0.9)[seed % 3])
        begin(state, [10] * requests)
        active = torch.ones(requests, dtype=torch.bool)
        plain.round(requests)
        for step in range(K):  # the device's loop would stop; steps without an active row must count for nothing
            logits = sharp_and_flat(ROWS, seed=100 * seed + step)
            end(state, logits)
            if not active.any():
                continue
            plain.step(int(active.sum()))
            active &= statistic("maxp", logits[:requests]) >= gate.threshold
            if step + 1 < K and not active.any():
                plain.ended_early()
    assert state.landed() is None  # a copy has begun, and the snapshot waits for it
    mine, theirs = state.snapshot(), plain.snapshot()
    assert state.landed() == {name: count for name, count in mine.items() if name != "active_histogram"}
    theirs["active_histogram"] += [0] * (ROWS + 1 - len(theirs["active_histogram"]))
    theirs.pop("seconds")
    assert not any(sum(mine.pop(name)) for name in (JUDGED, STOOD))  # counted where a round begins
    assert mine == theirs
    assert mine["gate_ended"] > 0


def test_steps_of_no_round_leave_everything_alone():
    """What graphs are warmed up with: sequence lengths of a dummy batch, after rounds of vLLM's own warm-up."""
    state = new_state()
    begin(state, [10, 20], sampled=[0, 0])  # a round with nothing to draft
    end_step()(state, sharp_and_flat(ROWS))
    assert not state.progress.counts.any() and not int(state.progress.active)
    begin(state, [10])
    end_step()(state, sharp_and_flat(ROWS))
    state.forget()
    state.buffers.seq_lens.fill_(1)
    groups = (state.inputs, state.progress, state.gate, state.limits, state.matches, state.worth)
    tensors = {"lengths": state.lengths, "statistics": state.statistics}
    for group in groups:
        tensors |= {f"{type(group).__name__}.{name}": tensor for name, tensor in group._asdict().items()}
    kept = {name: value.clone() for name, value in tensors.items()}
    for _ in range(2 * K):  # more steps than a draft has places
        end_step()(state, sharp_and_flat(ROWS))
    changed = [name for name, value in kept.items() if not value.equal(tensors[name]) and not value.isnan().all()]
    assert changed == ["Progress.step"]
    begin(state, [10])
    assert int(state.progress.step) == 0


def test_what_was_never_drafted_is_no_draft_to_the_verifier():
    lengths = torch.tensor([2, 0, 1], dtype=torch.int32)
    mapping = torch.tensor([2, 2, 2, 2, 0, 0, 0, 0, 1])
    places = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 0], dtype=torch.int32)
    wanted = [0, 0, 1, 1, 0, 0, 0, 1, 0]
    assert v2_kernels.undrafted(places, mapping, lengths).int().tolist() == wanted
    many = 120  # more than one program takes
    assert v2_kernels.undrafted(places.repeat(many), mapping.repeat(many), lengths).int().tolist() == wanted * many


# ---- a weight times one token ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [2048, 1536, 1000])  # whole tiles, a tile that sticks out, an odd number
@pytest.mark.parametrize("rows", [8, 13])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_weight_times_one_token(rows, columns, biased, dtype):
    # Rows beyond the last are NaN: reading them would show.
    weight = torch.full((rows + 4, columns), float("nan"), dtype=dtype)[:rows]
    weight.copy_(torch.randn(rows, columns) / columns**0.5)
    x, bias = torch.randn(1, columns).to(dtype), torch.randn(rows).to(dtype)
    wanted = torch.nn.functional.linear(x.double(), weight.double(), bias.double() if biased else None)
    found = gemv(x, weight, bias=bias if biased else None)
    assert (found.dtype, found.shape) == (dtype, (1, rows))
    rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), wanted, atol=4 * rounding, rtol=rounding)


@pytest.mark.parametrize("columns", [2048, 1000])
@pytest.mark.parametrize("rows", [8, 13])
def test_an_8_bit_weight_times_one_token(rows, columns):
    copy, scale = FP8.quantise(torch.randn(rows, columns).to(torch.bfloat16) / columns**0.5).values()
    x = torch.randn(columns).to(torch.bfloat16)
    found = gemv(x, copy, scale)
    assert (found.dtype, found.shape) == (torch.bfloat16, (rows,))
    wanted = (copy.double() * scale.double()) @ x.double()
    torch.testing.assert_close(found.double(), wanted, atol=2**-6, rtol=2**-7)
