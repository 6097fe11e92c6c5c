"""The draft's attention beside vLLM's FlashAttention: which layers it stands in for, and how their cache looks."""

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.attention.backends import flash_attn

from selfspec_cli.vllm_plugin.attention.drafting import is_plain, on_one_query
from selfspec_cli.vllm_plugin.attention.one_query import fits

pytestmark = pytest.mark.contract
HEADS, DIM, PAGE = 2, 64, 16


def attention(backend="FLASH_ATTN", head_size=DIM, impl=None, **changes):
    """As far as `is_plain` looks at one of vLLM's layers, around FlashAttention itself."""
    made = flash_attn.FlashAttentionImpl(
        4,
        head_size,
        0.1,
        HEADS,
        **{"alibi_slopes": None, "sliding_window": None, "kv_cache_dtype": "auto", **(impl or {})},
    )
    own = {
        "attn_backend": SimpleNamespace(get_name=lambda: backend),
        "attn_type": flash_attn.AttentionType.DECODER,
        "head_size": head_size,
        "head_size_v": head_size,
        "kv_cache_dtype": "auto",
        "kv_sharing_target_layer_name": None,
        "impl": made,
    }
    return SimpleNamespace(**{**own, **changes})


def test_attention_to_the_whole_context_is_plain():
    assert is_plain(attention())
    assert is_plain(attention(head_size=128))


@pytest.mark.parametrize(
    "changes",
    [
        {"backend": "TRITON_ATTN"},
        {"head_size": 80},
        {"head_size_v": 128},
        {"attn_type": flash_attn.AttentionType.ENCODER_ONLY},
        {"kv_cache_dtype": "fp8"},
        {"kv_sharing_target_layer_name": "layers.0"},
        {"impl": {"sliding_window": 128}},
        {"impl": {"logits_soft_cap": 30.0}},
        {"impl": {"alibi_slopes": [0.5] * 4}},
    ],
)
def test_anything_else_stays_vllms(changes):
    assert not is_plain(attention(**changes))


def test_attention_sinks_stay_vllms():
    layer = attention()
    layer.impl.sinks = torch.zeros(4)
    assert not is_plain(layer)


def test_no_layer_is_replaced_on_a_cpu():
    assert on_one_query(None, torch.device("cpu")) is None


def test_the_cache_holds_each_tokens_key_and_then_its_value(monkeypatch):
    """`one_query.attend` writes a token where vLLM's own update does."""
    cache = torch.zeros(3, HEADS, PAGE, 2 * DIM)
    assert fits(cache, HEADS, DIM)

    def write(key, value, keys, values, slots, *scales):
        keys[slots // PAGE, slots % PAGE] = key
        values[slots // PAGE, slots % PAGE] = value

    monkeypatch.setattr(flash_attn, "reshape_and_cache_flash", write, raising=False)
    key, value = torch.randn(1, HEADS, DIM), torch.randn(1, HEADS, DIM)
    layer = SimpleNamespace(_k_scale=None, _v_scale=None)
    attention().impl.do_kv_cache_update(layer, key, value, cache, torch.tensor([2 * PAGE + 5]))
    assert cache[2, :, 5].equal(torch.cat([key[0], value[0]], dim=1))
    assert cache.count_nonzero() == 2 * HEADS * DIM


def test_a_cache_of_another_form_does_not_fit():
    assert not fits(torch.zeros(2, 3, PAGE, HEADS, DIM), HEADS, DIM)
    assert not fits(torch.zeros(3, PAGE, HEADS, 2 * DIM), HEADS, DIM)
