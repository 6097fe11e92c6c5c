"""What is made of vLLM's own modules without an engine: the target without adapters, and experts' weights read back."""

import importlib
import inspect
import logging
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.llama3_rope import Llama3RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.yarn_scaling_rope import YaRNScalingRotaryEmbedding
from vllm.v1.attention.backends import flash_attn

from selfspec_cli.vllm_plugin import compile_cache
from selfspec_cli.vllm_plugin.attention.drafting import is_plain, on_one_query
from selfspec_cli.vllm_plugin.attention.one_query import fits
from selfspec_cli.vllm_plugin.fused_step import models
from selfspec_cli.vllm_plugin.fused_step.drafting import fused_step
from selfspec_cli.vllm_plugin.weights.copied import _unpacked_experts
from selfspec_cli.vllm_plugin.weights.shared import without_adapters


class Model(nn.Module):
    """Holds an adapted layer in a list of layers, as a decoder does, and one outside of it."""

    def __init__(self, adapted):
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(adapted(nn.Linear(4, 4)), nn.LayerNorm(4)), nn.Linear(4, 4)])
        self.logits_processor = adapted(nn.Linear(4, 8))

    def compute_logits(self, x):
        return self.logits_processor(x)


def adapted(base):
    from vllm.lora.layers import BaseLayerWithLoRA

    class Adapted(BaseLayerWithLoRA):
        def __init__(self):
            super().__init__()
            self.base_layer = base

        def forward(self, x):
            return self.base_layer(x) + 1

    return Adapted()


def test_the_target_without_adapters_shares_every_layer_that_they_wrap():
    model, x = Model(adapted), torch.randn(2, 4)
    before = dict(model.named_modules())
    bare = without_adapters(model)
    assert dict(model.named_modules()) == before
    assert bare.layers[0][0] is model.layers[0][0].base_layer
    assert bare.layers[0][1] is model.layers[0][1] and bare.layers[1] is model.layers[1]
    assert bare.compute_logits(x).equal(model.logits_processor.base_layer(x))
    assert without_adapters(bare) is bare


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 128, 64), (3, 64, 96), (1, 1024, 256)])
def test_experts_that_vllm_has_packed_are_read_back_exactly(dtype, shape):
    from vllm import _custom_ops as ops  # loads the operators that are built for this processor

    if not hasattr(torch.ops._C, "prepack_moe_weight"):
        pytest.skip("vLLM packs experts in its build for CPUs")
    weight = torch.randn(shape).to(dtype)
    packed = ops.cpu_prepack_moe_weight(weight, "vec")
    assert not packed.equal(weight)
    assert _unpacked_experts(packed, "vec").equal(weight)


# ---- What of vLLM's the kernel for a whole trunk relies on (vllm_plugin/fused_step)


@pytest.mark.parametrize("name", [*models.MODELS, *models.LAYERS])
def test_the_models_that_it_knows_exist(name):
    module, _, kind = name.partition(".")
    found = getattr(importlib.import_module(f"vllm.model_executor.models.{module}"), kind)
    assert models._name(found) == name


@pytest.mark.parametrize("name", models.LAYERS)
def test_their_layers_are_what_the_kernel_does(name):
    module, _, kind = name.partition(".")
    layer = getattr(importlib.import_module(f"vllm.model_executor.models.{module}"), kind)
    lines = [line.split("#")[0].strip() for line in inspect.getsource(layer.forward).splitlines()]
    body = " ".join(line for line in lines if line)
    norms = [f"self.{name}(hidden_states, residual)" for name in ("input_layernorm", "post_attention_layernorm")]
    for step in (*norms, "self.self_attn(", "self.mlp(hidden_states)", "return hidden_states, residual"):
        assert step in body


def test_rotary_embeddings_that_only_have_other_tables_inherit_their_forward():
    for kind in (Llama3RotaryEmbedding, YaRNScalingRotaryEmbedding):
        assert kind.forward_native is RotaryEmbedding.forward_native


def test_the_log_says_once_what_runs_instead(monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    reason = "a reason that no other test has"
    monkeypatch.setattr("selfspec_cli.vllm_plugin.fused_step.drafting.reason_against", lambda *_: reason)
    with caplog.at_level(logging.INFO, logger="vllm.selfspec"):
        for _ in range(2):
            assert fused_step(torch.nn.Module(), [], {}.get, None, torch.device("cpu"), alone=True) is None
    records = {id(record): record for record in caplog.records}  # a handler may have one at two loggers
    said = [record.getMessage() for record in records.values() if "draft step" in record.getMessage()]
    assert said == [f"draft step: kernels for single products, because {reason}"]


# ---- The draft's attention in place of vLLM's FlashAttention: which layers it stands in for, and how their cache looks


HEADS, DIM, PAGE = 2, 64, 16


def attention(backend="FLASH_ATTN", head_size=DIM, impl=None, sinks=None, **changes):
    """As far as `is_plain` looks at one of vLLM's layers, around FlashAttention itself."""
    usual = {"alibi_slopes": None, "sliding_window": None, "kv_cache_dtype": "auto"}
    made = flash_attn.FlashAttentionImpl(4, head_size, 0.1, HEADS, **usual | (impl or {}))
    made.sinks = sinks
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
        {"sinks": torch.zeros(4)},
    ],
)
def test_anything_else_stays_vllms(changes):
    assert not is_plain(attention(**changes))


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


# ---- keys of vLLM's compile cache: early exit finds what a plain engine compiled; what depends on drafts stays apa----


@pytest.fixture
def config(configured):
    """The configuration of an engine as a worker gets it, on a device that captures graphs."""
    from vllm.config import CUDAGraphMode

    def of(sizes=None, **spec):
        made = configured(
            {"method": "layer_skip", "num_speculative_tokens": 3, **spec} if spec else None, max_num_seqs=16
        )
        chosen = made.compilation_config
        chosen.cudagraph_mode, chosen.cudagraph_capture_sizes = CUDAGraphMode.FULL, sizes
        chosen.max_cudagraph_capture_size = None
        made._set_cudagraph_sizes()
        return pickle.loads(pickle.dumps(made))

    return of


def sizes_of(config):
    return config.compilation_config.cudagraph_capture_sizes


@pytest.mark.parametrize("sizes", [None, [1, 2, 4, 12, 40]], ids=["vllm_chooses", "given"])
@pytest.mark.parametrize(
    "spec",
    [
        {"layer_skip": 2},
        {"layer_skip": 4, "num_speculative_tokens": 7, "gate": "maxp"},
        {"draft_weights": "int8", "num_speculative_tokens": 5, "length_table": "1:5 4:2"},
    ],
    ids=["first_layers", "gate", "copies"],
)
def test_what_is_compiled_has_the_key_of_a_plain_engine(config, spec, sizes):
    plain, early = config(sizes), config(sizes, **spec)
    assert sizes_of(early) != sizes_of(plain) or sizes is not None  # graphs of a verify pass have other sizes
    shown = compile_cache.as_plain(early)
    assert shown.compute_hash() == plain.compute_hash()
    assert sizes_of(shown) == sizes_of(plain)
    # What is captured stays as it was chosen, and the parts of the model find each other by the same context.
    assert sizes_of(early) == sizes_of(config(sizes, **spec)) and early.speculative_config is not None
    context = shown.compilation_config.static_forward_context
    assert context is early.compilation_config.static_forward_context


def test_what_a_start_measures_of_memory_is_kept_for_what_drafts(config):
    """vLLM's plan of a start (VLLM_ENABLE_STARTUP_PLAN) has this key, and copies leave less for keys and values."""
    specs = [{"layer_skip": 2}, {"layer_skip": 4}, {"layer_skip": 2, "draft_weights": "int8"}]
    keys = [config(**spec).compute_hash() for spec in specs] + [config().compute_hash()]
    assert len(set(keys)) == len(keys)
    assert config(**specs[0]).compute_hash() == keys[0]


def test_the_engine_says_how_long_all_was_compiled(config):
    from torch import nn

    early = config(layer_skip=2)
    target, draft, other = (nn.Linear(1, 1) for _ in range(3))
    for part, seconds in ((target, 2.0), (draft, 0.5)):
        part.compilation_config = compile_cache.as_plain(early).compilation_config
        part.compilation_config.compilation_time += seconds
    other.compilation_config = early.compilation_config
    early.compilation_config.compilation_time = 0.25  # of what was compiled under the engine's own key
    compile_cache.count_times([nn.Sequential(target, other), nn.Sequential(draft, target)], early)
    assert early.compilation_config.compilation_time == 2.75
