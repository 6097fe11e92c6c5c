"""Attention of one new token a request in Triton's interpreter, beside PyTorch's. Run as kernels_interpreted.py is."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from vllm import logger as vllms_logger
from vllm.model_executor.layers.attention import attention as vllms

from selfspec_cli.vllm_plugin.attention import drafting, one_query
from selfspec_cli.vllm_plugin.weights.rounding import none_arrived

PAGE, BLOCKS = 16, 80


def wanted(query, key, value, cache, table, length, scale=None):
    """[query heads, dim] of a request of `length` tokens, of which the last is not in the cache."""
    dim = query.shape[-1]
    places = torch.arange(length - 1)
    rows = cache[table[places // PAGE].long(), :, places % PAGE]  # [cached, heads, 2 * dim]
    keys = torch.cat([rows[..., :dim], key[None]]).transpose(0, 1)
    values = torch.cat([rows[..., dim:], value[None]]).transpose(0, 1)
    shared = len(query) // len(keys)
    keys, values = keys.repeat_interleave(shared, 0), values.repeat_interleave(shared, 0)
    return scaled_dot_product_attention(query[:, None], keys, values, scale=scale)[:, 0]


@pytest.mark.parametrize(
    ("lengths", "heads", "shared", "dim", "programs", "at_once"),
    [
        ([1, 17, 64], 2, 4, 32, 4, 32),  # one program a request
        ([200, 33, 0, 129], 2, 3, 32, 256, 32),  # several, and a closed request
        ([90, 300], 1, 1, 64, 4, 32),  # fewer programs than would have work
        ([40], 3, 20, 16, 1, 32),  # more query heads than the least rows
        ([300], 2, 2, 16, one_query.PROGRAMS, None),  # in the setting that one request has
    ],
)
def test_one_token_attends_to_its_whole_context(monkeypatch, lengths, heads, shared, dim, programs, at_once):
    monkeypatch.setattr(one_query, "PROGRAMS", programs)
    draw = torch.Generator().manual_seed(len(lengths))
    n = len(lengths)
    both = torch.randn(n, (shared + 2) * heads * dim, generator=draw)  # as a product of queries, keys and values
    query, key, value = (
        part.unflatten(1, (-1, dim)) for part in both.split([shared * heads * dim, heads * dim, heads * dim], dim=1)
    )
    cache = torch.randn(BLOCKS, heads, PAGE, 2 * dim, generator=draw)
    table = torch.randperm(BLOCKS, generator=draw)[: n * (BLOCKS // n)].reshape(n, -1).int()
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    last = (seq_lens - 1).clamp_min(0).long()
    slots = table.gather(1, (last // PAGE)[:, None])[:, 0] * PAGE + last % PAGE
    slots[seq_lens == 0] = -1
    before = cache.clone()
    out = torch.empty(n, shared * heads * dim)
    one_query.attend(query, key, value, cache, table, seq_lens, slots, dim**-0.5, out, at_once)
    got = out.unflatten(1, (-1, dim))
    assert one_query.fits(cache, heads, dim)
    for row, length in enumerate(lengths):
        if length == 0:
            assert not got[row].any()
            continue
        torch.testing.assert_close(
            got[row], wanted(query[row], key[row], value[row], before, table[row], length), rtol=2e-3, atol=2e-3
        )
        at = int(slots[row])
        assert cache[at // PAGE, :, at % PAGE].equal(torch.cat([key[row], value[row]], dim=1))
        before[at // PAGE, :, at % PAGE] = cache[at // PAGE, :, at % PAGE]
    assert cache.equal(before)  # nothing else was written
    assert not none_arrived(cache.device).any()  # as it was found


def test_settings_follow_requests_heads_and_room(monkeypatch):
    cpu = torch.device("cpu")

    def usual(requests, heads, room):
        return one_query.usual_settings(requests, heads, room, cpu)

    long, brief = one_query.LONG, one_query.BRIEF
    assert [usual(1, 8, room) for room in (brief, long, long + 1)] == list(one_query.USUAL[8])
    assert usual(3, 2, brief) == usual(1, 8, brief) != usual(1, 8, brief + 1)
    assert usual(33, 2, 64) == (*one_query.SEVERAL, 2)  # more than was measured
    monkeypatch.setattr(one_query, "has_room", lambda device: False)
    assert usual(1, 8, 64) == (*one_query.SEVERAL, 32)


class Impl:
    """What takes the place of vLLM's way: it says that it was asked, and gives ones."""

    scale = 0.125

    def __init__(self):
        self.asked = []

    def do_kv_cache_update(self, layer, key, value, cache, slots):
        self.asked.append("update")

    def forward(self, layer, query, key, value, cache, metadata, out):
        self.asked.append("forward")
        return out.fill_(1)


@pytest.fixture
def context(monkeypatch):
    """A layer's part of vLLM's forward context: two requests, of which the batch is padded to three."""
    layer = SimpleNamespace(impl=Impl())
    metadata = SimpleNamespace(
        max_query_len=1, seq_lens=torch.tensor([5, 20]).int(), block_table=torch.tensor([[1, 0], [2, 3]]).int()
    )
    found = [metadata, layer, torch.randn(4, 2, PAGE, 32), torch.tensor([PAGE + 4, 3 * PAGE + 3, -1])]
    monkeypatch.setattr(vllms, "get_attention_context", lambda name: found if name == "layers.0" else None)
    return found


def asked(n=3):
    """Queries of four heads, keys and values of two."""
    return [torch.randn(n, count, 16) for count in (4, 2, 2)]


def test_the_operator_attends_by_the_engines_metadata(context):
    metadata, layer, cache, _ = context
    query, key, value = asked()
    before = cache.clone()
    got = torch.ops.selfspec.attend_once(query, key, value, "layers.0")
    assert got.shape == (3, 64) and not layer.impl.asked
    for row, length in enumerate(metadata.seq_lens.tolist()):
        table = metadata.block_table[row]
        expected = wanted(query[row], key[row], value[row], before, table, length, scale=0.125)
        torch.testing.assert_close(got[row], expected.flatten(), rtol=2e-3, atol=2e-3)
    assert not cache.equal(before)


@pytest.mark.parametrize("reason", ["queries", "layout"])
def test_what_the_kernel_cannot_read_goes_to_vllms_own(context, reason, monkeypatch):
    said = []
    monkeypatch.setattr(vllms_logger, "init_logger", lambda name: SimpleNamespace(warning_once=said.append))
    if reason == "queries":
        context[0].max_query_len = 2
    else:
        context[2] = torch.randn(2, 4, PAGE, 2, 16)
    assert torch.ops.selfspec.attend_once(*asked(), "layers.0").eq(1).all()
    assert context[1].impl.asked == ["update", "forward"]
    assert said == [drafting.UNKNOWN] * (reason == "layout")


def test_vllms_profiling_run_has_no_cache_yet(context):
    context[0] = None
    assert not torch.ops.selfspec.attend_once(*asked(5), "layers.0").any()


class Own(nn.Module):
    layer_name, num_heads, num_kv_heads, head_size = "layers.0", 4, 2, 16

    def forward(self, *asked, **named):
        return *asked, *named.values()


def test_a_layer_asks_the_operator_and_calls_vllms_layer_for_what_is_not_plain(context):
    query, key, value = asked()
    layer = drafting.OneQueryAttention(Own())
    wanted = torch.ops.selfspec.attend_once(query, key, value, "layers.0")
    got = layer(query.flatten(1), key.flatten(1), value.flatten(1))
    torch.testing.assert_close(got[:2], wanted[:2])
    assert layer(query, None, None) == (query, None, None)
    assert layer(query, key, value, torch.Size([3, 64]))[3] == torch.Size([3, 64])
    assert layer(query, key, value, output_shape=torch.Size([3, 64]))[3] == torch.Size([3, 64])
    fake = drafting._attend_once._opoverload
    with torch._subclasses.FakeTensorMode():
        assert fake(*asked(), "layers.0").shape == (3, 64)
