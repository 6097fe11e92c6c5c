"""The faults that `selfspec verify` plants on the V2 runner, on stand-ins for it: what each changes, and that it goes.

Those of the V1 runner are planted in a real engine (tests/engine/test_verify.py).
"""

from types import SimpleNamespace

import pytest
import torch
from selfspec_faults import v2
from selfspec_faults.spoil import spoil

from selfspec_cli.vllm_plugin.planted.v2 import BIAS, accept_one_more, biased_sampler
from selfspec_cli.vllm_plugin.wrap import wrap

K = 3


def batch() -> SimpleNamespace:
    """Three requests: one with a rejection, one with all drafts accepted, one that drafted nothing and is new."""
    return SimpleNamespace(
        num_reqs=3,
        req_ids=["a", "b", "c"],
        idx_mapping=torch.tensor([4, 2, 0]),
        cu_num_logits=torch.tensor([0, 4, 8, 9], dtype=torch.int32),
        logits_indices=torch.arange(9) + 1,
        input_ids=torch.tensor([0, 10, 11, 12, 13, 20, 21, 22, 23, 30]),
        seq_lens=torch.tensor([40, 50, 7], dtype=torch.int32),
        positions=torch.zeros(9, dtype=torch.int64),
    )


def output() -> SimpleNamespace:
    return SimpleNamespace(
        sampled_token_ids=torch.tensor([[11, 99, -1, -1], [21, 22, 23, 24], [31, -1, -1, -1]]),
        num_sampled=torch.tensor([2, 4, 1], dtype=torch.int32),
        num_rejected=torch.tensor([2, 0, 0], dtype=torch.int32),
    )


class Runner(SimpleNamespace):
    """What the faults touch of vLLM's runner. seen: what the draft loop was given."""

    def __init__(self, lengths=(0, 0, K, 0, K)):
        self.seen = []
        self.rejection_sampler = type("Sampler", (), {"kept": "attribute", "__call__": lambda *a, **k: output()})()
        state = SimpleNamespace(
            lengths=torch.tensor(lengths, dtype=torch.int32), limit=torch.tensor([K]), gate_feature=torch.tensor([0])
        )
        self.speculator = SimpleNamespace(state=state, propose=self._propose, _layer_names={"layer.0"})
        self.block_tables = SimpleNamespace(
            input_block_tables=[torch.arange(12).view(4, 3)],
            slot_mappings=torch.zeros(1, 16, dtype=torch.int64),
            block_sizes=[4],
            compute_slot_mappings=self._slots,
        )
        self.add_requests = lambda scheduled: "added"

    def _propose(self, batch, a, b, c, d, sampled, rejected, *rest, **more):
        self.seen.append((rejected.tolist(), self.block_tables.input_block_tables[0][:, 0].tolist()))
        return torch.tensor([[5, 6, 7], [8, 9, 0], [3, 4, 1]])

    def _slots(self, mapping, starts, positions, count, out):
        out[0, :count] = positions
        return out[:, :count]


def propose(runner, **more):
    now = output()
    return runner.speculator.propose(batch(), 0, 0, 0, 0, now.num_sampled, now.num_rejected, **more)


def verdict(runner):
    found = runner.rejection_sampler(torch.zeros(9, 5), batch())
    return found.sampled_token_ids.tolist(), found.num_sampled.tolist(), found.num_rejected.tolist()


def test_one_too_many_is_the_first_rejected_draft():
    runner = Runner()
    before = runner.rejection_sampler
    _, undo = accept_one_more(runner)
    assert verdict(runner) == ([[11, 12, -1, -1], [21, 22, 23, 24], [31, -1, -1, -1]], [2, 4, 1], [2, 0, 0])
    assert runner.rejection_sampler.kept == "attribute"
    undo()
    assert runner.rejection_sampler is before


@pytest.mark.parametrize("fault", [accept_one_more, v2.gate_changes_output])
def test_there_is_something_to_reject_however_good_drafts_are(fault):
    runner = Runner(lengths=(0, 0, K, 0, 2))
    undos = fault(runner)
    assert propose(runner).tolist() == [[5, 5, 7], [8, 9, 1], [3, 4, 1]]  # the third request drafted nothing
    for undo in undos:
        undo()
    assert propose(runner).tolist() == [[5, 6, 7], [8, 9, 0], [3, 4, 1]]


def test_what_was_never_drafted_is_not_taken():
    runner = Runner(lengths=(0, 0, K, 0, 1))  # the first request drafted one token, which was accepted
    accept_one_more(runner)
    assert verdict(runner)[0][0] == [11, 99, -1, -1]


def test_a_gate_that_ended_a_draft_has_it_taken_unverified():
    runner = Runner(lengths=(0, 0, K, 0, 2))
    v2.gate_changes_output(runner)
    assert verdict(runner) == ([[11, 12, -1, -1], [21, 22, 23, 24], [31, -1, -1, -1]], [2, 4, 1], [2, 0, 0])
    runner.speculator.state.lengths[4] = 1
    found = verdict(runner)
    assert (found[0][0][0], found[1], found[2]) == (11, [1, 4, 1], [3, 0, 0])
    runner.speculator.state.gate_feature.fill_(-1)  # no gate
    assert verdict(runner)[1] == [2, 4, 1]


def test_a_biased_sampler_is_too_sharp():
    runner, seen = Runner(), []
    runner.rejection_sampler = lambda logits, *rest: seen.append(logits)
    biased_sampler(runner)
    runner.rejection_sampler(torch.ones(2), "batch")
    assert seen[0].tolist() == pytest.approx([BIAS] * 2)


def test_the_next_requests_blocks_are_read():
    runner = Runner()
    (undo,) = v2.other_request(runner)
    propose(runner)
    assert runner.seen[0][1] == [6, 0, 3, 9]  # the fourth row is no request
    undo()
    assert runner.speculator.propose == runner._propose


def test_a_preempted_request_is_drafted_for_at_a_stale_length():
    runner = Runner()
    undos = v2.stale_after_preemption(runner)
    new = [
        SimpleNamespace(req_id="a", prefill_token_ids=[1] * 9, prompt_len=5),
        SimpleNamespace(req_id="b", prefill_token_ids=[1] * 5, prompt_len=5),
    ]
    assert runner.add_requests(SimpleNamespace(scheduled_new_reqs=new)) == "added"
    propose(runner)
    propose(runner, dummy_run=True)
    assert [rejected for rejected, _ in runner.seen] == [[2 + v2.STALE, 0, 0], [2, 0, 0]]
    for undo in undos:
        undo()
    propose(runner)
    assert runner.seen[-1][0] == [2, 0, 0]


def test_a_slot_of_each_request_is_spoilt():
    runner = Runner()
    cache = torch.arange(2 * 16 * 4 * 6).float().view(2, 16, 4, 6)  # keys and values, blocks, slots, features
    runner.kv_cache_config = SimpleNamespace(
        num_blocks=16,
        kv_cache_groups=[
            SimpleNamespace(layer_names=["layer.0", "layer.7"], kv_cache_spec=SimpleNamespace(block_size=4))
        ],
    )
    layers = {"layer.0": SimpleNamespace(kv_cache=cache.clone()), "layer.7": SimpleNamespace(kv_cache=cache.clone())}
    runner.compilation_config = SimpleNamespace(static_forward_context=layers)
    v2.kv_slot(runner)
    propose(runner)
    changed = (layers["layer.0"].kv_cache != cache).any(-1).any(0).flatten().nonzero().flatten().tolist()
    assert changed == [6, 37, 49]  # the last token with keys and values: lengths 7, 40 - 2 and 50, less one
    assert torch.equal(layers["layer.7"].kv_cache, cache)  # it does not draft


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


def test_what_was_wrapped_comes_back():
    class Thing:
        def method(self):
            return 1

    thing = Thing()
    undo = wrap(thing, "method", lambda original: lambda: original() + 1)
    assert thing.method() == 2
    undo()
    assert thing.method() == 1
    assert "method" not in vars(thing)
