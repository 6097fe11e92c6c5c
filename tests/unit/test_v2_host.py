"""What the V2 runner records of a verdict, and what is counted while it drafts."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from selfspec_faults import speed, spoil

from selfspec_cli.early_exit.counters import INVARIANTS
from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.early_exit.gates import device_features
from selfspec_cli.vllm_plugin.observe.watch import Watch, _Leaving
from selfspec_cli.vllm_plugin.overrides import overriding
from selfspec_cli.vllm_plugin.v2.runner import with_short_drafts
from selfspec_cli.vllm_plugin.v2.state import DeviceRecorder
from selfspec_cli.vllm_plugin.vllm_names import CUDAGraphMode


def batch(verified, requests):
    """What vLLM's InputBatch says of a verify pass; verified: places of each request that held a draft."""
    ends = np.cumsum([0, *(places + 1 for places in verified)])
    return SimpleNamespace(
        req_ids=[f"r{number}" for number in requests],
        idx_mapping=torch.tensor(requests),
        num_draft_tokens_per_req=np.full(len(verified), 3, dtype=np.int32),  # what the scheduler asked for
        cu_num_logits=torch.tensor(ends, dtype=torch.int32),
    )


def state(lengths):
    statistics = torch.arange(len(lengths) * 3 * 2, dtype=torch.float32).reshape(len(lengths), 3, 2)
    drafted = torch.tensor(lengths, dtype=torch.int32)
    return SimpleNamespace(matches=SimpleNamespace(drafted=drafted), statistics=statistics)


def test_the_record_holds_what_was_drafted_and_verified():
    recorder, drafts = DeviceRecorder(), state([3, 1, 3])
    # Request 2 drafted three tokens, of which one was verified; request 1 drafted one of three.
    # vLLM's tensors may be longer than the batch: what stands behind it belongs to nobody.
    recorder.verdict(batch([3, 3, 1], [0, 1, 2]), torch.tensor([3, 2, 1, 4]), drafts)
    drafts.matches.drafted.zero_()  # the next round begins; the record keeps what it saw
    log = recorder.plain()
    assert (log["drafted"], log["accepted"], log["request"]) == ([3, 1, 1], [2, 1, 0], [0, 1, 2])
    assert log["statistics"] == [drafts.statistics[row, :length].tolist() for row, length in enumerate((3, 1, 1))]


def test_what_nobody_drafted_or_verified_is_not_in_the_record():
    recorder = DeviceRecorder()
    prefill = SimpleNamespace(num_draft_tokens_per_req=None)
    recorder.verdict(prefill, torch.tensor([1]), state([0]))
    recorder.verdict(batch([3, 0, 3], [0, 1, 2]), torch.tensor([1, 1, 0]), state([0, 3, 3]))
    log = recorder.plain()
    assert log.pop("features") == list(device_features())
    assert log == {"statistics": [], "drafted": [], "accepted": [], "request": []}


def test_an_engine_without_lengths_verifies_as_it_did():
    class Original:
        sampler = SimpleNamespace(req_states=SimpleNamespace())

        def __call__(self, *given):
            return given

    given = ("logits", "batch", "draft logits", "invalid drafts")
    assert overriding(Original, {"__call__": with_short_drafts})()(*given) == given


# ---- what is counted while it drafts, and what is planted there, on stand-ins: its device is a GPU otherwise ---------


K = 3


ENDS = SimpleNamespace(ends=torch.tensor([0, 60, 0, 0, 50], dtype=torch.int32))


class Speculator(SimpleNamespace):
    """Drafts for two requests in slots 4 and 1: `lengths` tokens, by a graph or by Python."""

    def __init__(self, **more):
        super().__init__(
            head="a head",
            device="cpu",
            _loop="a loop",
            eager=False,
            state=SimpleNamespace(lengths=torch.zeros(5, dtype=torch.int32), limits=ENDS),
            input_buffers=SimpleNamespace(seq_lens=torch.zeros(8, dtype=torch.int32)),
            decode_cudagraph_manager=SimpleNamespace(run_fullgraph=lambda batch: None),
            **more,
        )

    def propose(self, batch, *arguments, **more):
        self.state.lengths[[4, 1]] = torch.tensor(self.drafted, dtype=torch.int32)
        if not self.eager:
            self.decode_cudagraph_manager.run_fullgraph("a batch")
        return torch.zeros(2, K, dtype=torch.int64)


def round_batch():
    return SimpleNamespace(num_reqs=2, idx_mapping=torch.tensor([4, 1]), seq_lens=torch.tensor([52, 40, 0]))


def counted(change=lambda runner: None, drafted=(0, 3), temperature=0.0, steps=CUDAGraphMode.FULL, **more):
    """What one round is counted as. change: does something to the runner before it is watched."""
    manager = SimpleNamespace(dispatch=lambda *args, **more: SimpleNamespace(cg_mode=steps))
    runner = SimpleNamespace(speculator=Speculator(drafted=drafted, **more), cudagraph_manager=manager)
    change(runner)
    watch = Watch(runner, runner.speculator)
    runner.cudagraph_manager.dispatch(2, 8, 4)
    rejected = torch.tensor([3, 1], dtype=torch.int32)  # 49 tokens are known of the first request, which ends with 50
    runner.speculator.propose(round_batch(), *[None] * 5, rejected, None, None, torch.full((5,), temperature), None)
    runner.speculator.propose(dummy_run=True, batch=None)
    found = watch.stop()
    assert set(found["measured"]) | set(found["not_applicable"]) == set(INVARIANTS)
    return {name: count for name, count in found["measured"].items() if count}


@pytest.mark.parametrize(
    ("counts", "more"),
    [
        ({}, {}),
        ({"finished_rows": 1}, {"drafted": (2, 3)}),
        ({"sampled_rows": 2}, {"temperature": 0.8}),
        ({"eager_steps": 1}, {"steps": CUDAGraphMode.NONE}),
        ({"eager_steps": 1}, {"change": speed.eager_step}),
        ({"unrolled_rounds": 1}, {"change": lambda runner: setattr(runner.speculator, "_loop", None)}),
        ({"closed_rows": 1}, {"change": lambda runner: runner.speculator.input_buffers.seq_lens[:1].fill_(50)}),
    ],
)
def test_each_is_counted_by_itself(counts, more):
    assert counted(**more) == counts


def test_a_lost_draft_leaves_one_token_of_each_request_and_comes_out_again():
    runner = SimpleNamespace(speculator=Speculator(drafted=(2, 3)))
    (undo,) = speed.lost_draft(runner)
    runner.speculator.propose(round_batch())
    assert runner.speculator.state.lengths[[4, 1]].tolist() == [1, 1]
    undo()
    assert "propose" not in vars(runner.speculator)
    runner.speculator.propose(round_batch())
    assert runner.speculator.state.lengths[[4, 1]].tolist() == [2, 3]


def test_what_leaves_the_device_is_counted_whether_or_not_the_host_waits(monkeypatch):
    monkeypatch.setattr(_Leaving, "on_device", staticmethod(lambda tensor: tensor.dtype == torch.float64))
    there, here = torch.ones(4, dtype=torch.float64), torch.zeros(4)
    with _Leaving() as seen:
        there.add_(1).max(), there[:2].sum(), here.sum().item(), there.copy_(here)
    assert (seen.numbers, seen.tensors) == (0, 0)
    with _Leaving() as seen:
        there.sum().item(), there.tolist()
        there.float(), here.copy_(there)
    assert (seen.numbers, seen.tensors) == (2, 2)


def test_an_engine_that_does_not_draft_is_refused():
    with pytest.raises(SettingsError, match="nothing to watch"):
        Watch(SimpleNamespace(), None)


# ---- what faults are planted with ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "blocks", "size"),
    [((2, 8, 4, 3, 5), 8, 4), ((8, 4, 5), 8, 4), ((8, 2, 3, 4, 5), 8, 4), ((2, 16, 2, 3, 5), 8, 4)],
    ids=["keys first", "latent", "slots after heads", "a kernel's blocks are smaller"],
)
def test_one_slot_is_spoilt_whatever_the_layout(shape, blocks, size):
    cache = torch.randn(shape)
    before = cache.clone()
    spoil(cache, torch.tensor([6, -1]), blocks, size)
    changed = (cache != before).sum()
    slots = blocks * size
    assert 0 < int(changed) <= cache.numel() // slots
