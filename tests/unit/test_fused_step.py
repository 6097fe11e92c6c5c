"""The kernels for a whole trunk, as far as a CPU can tell: their layout of the weights, and which models get them."""

import dataclasses
import gc
import re
import weakref
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scripts import importable
from torch import nn

from selfspec_cli.early_exit.draft_weights.integers import INT4
from selfspec_cli.vllm_plugin.attention.drafting import OneQueryAttention
from selfspec_cli.vllm_plugin.fused_step import drafting, models
from selfspec_cli.vllm_plugin.fused_step.launch import built, chunks
from selfspec_cli.vllm_plugin.fused_step.layout import PHASES, RECORD, Shape, planned
from selfspec_cli.vllm_plugin.fused_step.wide import layout as wide
from selfspec_cli.vllm_plugin.weights import copied as copied_weights
from selfspec_cli.vllm_plugin.weights.copied import CopiedWeight

QWEN = Shape(28, 1536, 8960, 12, 2, 128, 16, 1e-6, bias=True)
LLAMA = Shape(32, 4096, 14336, 32, 8, 128, 16, 1e-5)
QWEN3 = Shape(28, 1024, 3072, 16, 8, 128, 16, 1e-6, head_norms=True)


@pytest.mark.parametrize("shape", [QWEN, LLAMA])
@pytest.mark.parametrize("evenly", [0.0, 0.5, 1.0])
def test_every_tile_is_one_blocks_and_the_blocks_read_about_as_much(shape, evenly):
    plan = planned(shape, 132, 12, evenly)
    for place, name in ((0, "qkv"), (2, "o"), (4, "gate_up")):
        taken = [tile for one in plan.blocks for tile in range(one[place], one[place] + one[place + 1])]
        assert taken == list(range(shape.tiles[name]))
    assert all(one[5] and one[5] % 4 == 0 for one in plan.blocks)  # 32 results of a block are rounded together
    groups = shape.groups
    reads = [
        one[1] * groups["qkv"] + one[3] * (groups["o"] + groups["down"]) + one[5] * groups["gate_up"]
        for one in plan.blocks
    ]
    assert max(reads) < 1.15 * sum(reads) / len(reads)


@pytest.mark.parametrize(
    ("shape", "tokens", "records", "slots"),
    [(QWEN, 4, 4, 6), (QWEN, 8, 4, 4), (LLAMA, 1, 4, 7), (LLAMA, 8, 2, 5)],
)
def test_a_build_takes_the_shared_memory_that_there_is(shape, tokens, records, slots):
    build = built(shape, planned(shape, 132, 12, 0.5), tokens, wide.SHARED)
    assert (build.at_once, build.slots) == (records, slots)
    assert build.shared_bytes <= wide.SHARED < build.shared_bytes + 12 * (records * RECORD + 8)
    options = dict(option[2:].split("=") for option in build.options)
    assert options["SHARED"] == str(build.shared_bytes) and options["WORDS"] == str(build.words)
    assert int(options["CHUNKS"]) == chunks(shape, build.plan, records)


def test_a_build_without_room_for_weights_or_for_more_heads_than_blocks_is_refused():
    with pytest.raises(ValueError, match="65536 bytes of shared memory have no room for the weights of 4 tokens"):
        built(LLAMA, planned(LLAMA, 132, 12, 0.5), 4, 65536)
    heads = dataclasses.replace(LLAMA, heads=32)
    with pytest.raises(ValueError, match="4 tokens of 32 KV heads are more than 114 multiprocessors"):
        built(heads, planned(heads, 114, 12, 0.5), 4, wide.SHARED)


# ---- 9 to 64 tokens; tests/unit/test_emulated_trunk.py runs both kernels ---------------------------------------------


@pytest.mark.parametrize("tokens", wide.WIDTHS)
@pytest.mark.parametrize("shape", [QWEN, QWEN3, LLAMA])
def test_every_build_shares_out_each_tile_and_fits_into_a_block(shape, tokens):
    build = wide.built(shape, 132, tokens)
    assert build.shared_bytes <= wide.SHARED and build.weight_slots >= 3 and build.input_slots >= 2
    for phase in PHASES:
        cells = set()
        for block in range(build.blocks):
            tiles, groups = build.work(phase, block)
            assert len(tiles) <= build.most_tiles(phase)
            mine = {(tile, group) for tile in tiles for group in groups}
            assert not mine & cells
            cells |= mine
        assert len(cells) == shape.tiles[phase] * shape.groups[phase]


@pytest.mark.parametrize(
    ("shape", "tokens", "over"), [(QWEN, 16, 1.15), (QWEN, 32, 1.15), (LLAMA, 16, 1.15), (LLAMA, 32, 1.05)]
)
def test_the_slowest_warp_multiplies_little_more_than_the_mean(shape, tokens, over):
    """Of gate_up and down, which are most of the weights."""
    build, most, mean = wide.built(shape, 132, tokens), 0, 0.0
    for phase, rows in list(zip(PHASES, build.rows, strict=True))[2:]:
        tiles, groups = shape.tiles[phase], shape.groups[phase]
        columns = -(-groups // build.down_slices) if phase == "down" else groups
        most += -(-build.most_tiles(phase) // rows) * -(-columns // (build.warps // rows))
        mean += tiles * groups / build.blocks / build.warps
    assert most < over * mean


def test_a_block_without_room_for_many_tokens_is_refused():
    with pytest.raises(ValueError, match="60000 bytes of shared memory have no room for weights and activations of 32"):
        wide.built(LLAMA, 132, 32, 60_000)
    with pytest.raises(ValueError, match="a block has 96 tiles of rows, and no more than 12 of a warp have registers"):
        wide.built(LLAMA, 4, 16)


def test_stamps_are_those_of_the_source():
    folder = files("selfspec_cli.vllm_plugin.fused_step")
    source = "".join((folder / part).read_text() for part in wide.Build.parts)
    assert int(re.search(r"#define STAMPS_OF_LAYER (\d+)", source).group(1)) == len(wide.STAMPS)


def test_the_script_for_a_gpu_finds_what_it_imports():
    with importable(Path(__file__).resolve().parents[2] / "experiments/kernels") as find:
        assert find("wide_step").TINY.layers == 2


# ---- for which models -----------------------------------------------------------------------------------------------


def kind(name: str, module: str, *bases: type) -> type:
    return type(name, bases or (SimpleNamespace,), {"__module__": f"vllm.model_executor.models.{module}"})


def on_copy(tensors: dict[str, torch.Tensor], bias: torch.Tensor | None = None) -> Any:
    """A linear layer of vLLM's on a copy of four or eight bits."""
    copy: Any = CopiedWeight.__new__(CopiedWeight)
    nn.Module.__init__(copy)
    for name, tensor in tensors.items():
        copy.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    rows, groups = tensors["scales"].shape
    return SimpleNamespace(
        copy_of_weight=copy, bias=bias, output_size_per_partition=rows, input_size_per_partition=64 * groups
    )


def linear(rows: int, columns: int, bias: bool = False, bits: int = 4) -> Any:
    words = torch.zeros(rows, columns * bits // 32, dtype=torch.int32)
    scales = torch.zeros(rows, columns // 64, dtype=torch.float16)
    return on_copy({"words": words, "scales": scales}, torch.zeros(rows) if bias else None)


class RMSNorm:
    def __init__(self, size: int, epsilon: float = 1e-6) -> None:
        self.weight, self.variance_epsilon, self.variance_size_override = torch.ones(size).bfloat16(), epsilon, None


class RotaryEmbedding:
    is_neox_style, rotary_dim, head_size = True, 128, 128
    cos_sin_cache = torch.zeros(8, 128)

    def forward_native(self) -> None: ...


class SiluAndMul: ...


def a_layer(module: str = "qwen2", layer: str = "Qwen2DecoderLayer") -> Any:
    hidden, inner = 1536, 8960
    made: Any = kind(layer, module)()
    made.input_layernorm, made.post_attention_layernorm = RMSNorm(hidden), RMSNorm(hidden)
    made.self_attn = SimpleNamespace(
        qkv_proj=linear(2048, hidden, bias=True),
        o_proj=linear(hidden, hidden),
        attn=OneQueryAttention(SimpleNamespace(layer_name="layers.0")),
        rotary_emb=RotaryEmbedding(),
        head_dim=128,
        num_heads=12,
        num_kv_heads=2,
    )
    made.mlp = SimpleNamespace(
        gate_up_proj=linear(2 * inner, hidden), down_proj=linear(hidden, inner), act_fn=SiluAndMul()
    )
    return made


def a_decoder(model: str = "Qwen2Model", module: str = "qwen2") -> Any:
    return kind(model, module)()


CONFIG = SimpleNamespace(parallel_config=SimpleNamespace(tensor_parallel_size=1))


def reason(layers: list[Any], decoder: Any = None, config: Any = CONFIG) -> str | None:
    decoder = a_decoder() if decoder is None else decoder
    return models.reason_against(decoder, layers, layers.__getitem__, config, torch.device("cpu"))


def test_a_model_that_the_kernel_knows_lacks_a_gpu_alone_and_a_user_can_switch_the_kernel_off(monkeypatch):
    layers = [a_layer(), a_layer()]
    monkeypatch.setenv(models.SWITCH, "1")
    assert reason(layers) == "it needs an NVIDIA GPU of compute capability 9.0"
    assert models.shape_of(layers, 16) == dataclasses.replace(QWEN, layers=2, rope_float=True)
    monkeypatch.setenv(models.SWITCH, "0")
    assert reason(layers) == "SELFSPEC_FUSED_STEP is 0"


def change(path: str, value: Any) -> Any:
    def make() -> Any:
        layer = a_layer()
        owner, _, name = path.rpartition(".")
        setattr(getattr(layer, owner) if owner else layer, name, value)
        return layer

    return make


class Turned(RotaryEmbedding):
    def forward_native(self) -> None: ...


@pytest.mark.parametrize(
    ("make", "wanted"),
    [
        (change("self_attn.attn", SimpleNamespace()), "the attention is not one to the whole context"),
        (change("self_attn.o_proj", linear(1536, 1536, bias=True)), "has a bias"),
        (change("input_layernorm", SimpleNamespace(weight=torch.ones(8))), "RMS norms"),
        (change("mlp.act_fn", SimpleNamespace()), "not SiLU"),
        (change("self_attn.rotary_emb", Turned()), "rotary ones over whole heads"),
        (change("self_attn.do_llama_4_scaling", True), "scaled by their positions"),
        (change("ada_rms_norm_t_cond", object()), "depend on a condition"),
        (lambda: a_layer("granite", "GraniteDecoderLayer"), "it does not know granite.GraniteDecoderLayer"),
        (change("self_attn.num_kv_heads", 1), "are not all alike"),
    ],
)
def test_another_layer_is_left_to_the_kernels_for_single_products(make, wanted):
    assert wanted in reason([a_layer(), make()])


@pytest.mark.parametrize("copied", [linear(2048, 1536, True, bits=8), SimpleNamespace(copy_of_weight=None)])
def test_other_copies_than_those_of_four_bits_are_left_to_the_kernels_for_single_products(copied):
    layers, on_copies = [a_layer(), a_layer()], change("self_attn.qkv_proj", copied)()
    found = models.reason_against(a_decoder(), layers, lambda _: on_copies, CONFIG, torch.device("cpu"))
    assert found == "the copies are not of 4 bits"


def test_other_models_and_ranks_are_named():
    assert reason([a_layer()], a_decoder("Gemma2Model", "gemma2")) == "it does not know gemma2.Gemma2Model"
    assert reason([], a_decoder("GPT2Model", "gpt2")) == "it does not know gpt2.GPT2Model"  # it has no layers at all
    ranks = SimpleNamespace(parallel_config=SimpleNamespace(tensor_parallel_size=2))
    assert reason([a_layer()], config=ranks) == "weights are split over tensor-parallel ranks"


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"dim": 96}, "heads have 96 dimensions and 6 share a KV head; it knows 64 and 128, and at most 8"),
        ({"heads": 1}, "heads have 128 dimensions and 12 share a KV head"),
        ({"hidden": 576, "query_heads": 9, "heads": 3, "dim": 64}, "rows of 576 values are too short for 12 warps"),
        ({}, None),
    ],
)
def test_shapes_without_code_are_named(changes, wanted):
    found = models._misfit(dataclasses.replace(QWEN, **changes))
    assert (found is None) if wanted is None else wanted in found


H200 = SimpleNamespace(multi_processor_count=132, shared_memory_per_block_optin=wide.SHARED)


def a_step(monkeypatch: pytest.MonkeyPatch, layers: list[Any], copied: Any) -> Any:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: H200)
    decoder = SimpleNamespace(norm=RMSNorm(1536), embed_tokens=SimpleNamespace(weight=torch.zeros(8, 1536)))
    for layer in layers:
        layer.self_attn.scaling = 0.1
    return drafting.FusedStep(decoder, layers, copied, 16, torch.device("cpu"))


def test_one_layer_at_a_time_is_on_copies_and_only_what_kernels_read_is_kept(monkeypatch):
    alive: list[weakref.ref[Any]] = []

    def copied(number: int) -> Any:
        gc.collect()
        assert not any(one() for one in alive)
        made = a_layer()
        alive.append(weakref.ref(made.self_attn.qkv_proj.copy_of_weight.words))
        return made

    layers = [a_layer(), a_layer()]
    step = a_step(monkeypatch, layers, copied)
    step.renew()
    gc.collect()
    assert len(alive) == 4 and not any(one() for one in alive)
    weights = sum(step.shape.tiles[phase] * 16 * step.shape.groups[phase] * 64 for phase in PHASES)
    assert step.copies.numel() == 2 * weights * RECORD // 1024  # of two layers
    read = sum(tensor.numel() * tensor.element_size() for tensor in step.read_by_a_step())
    assert 0 < read - 2 * weights * RECORD // 1024 < 0.001 * weights  # and norms and biases
    step.renew(copies=False)  # fitted ones stay
    assert len(alive) == 4


OF_7B = {"hidden": 3584, "intermediate": 18944, "query_heads": 28, "heads": 4}


@pytest.mark.parametrize(
    ("changes", "requests", "wanted"),
    [
        ({}, 1, True),
        ({}, 256, True),
        ({"query_heads": 32, "heads": 32}, 8, True),  # more heads than blocks: the kernel for more tokens takes over
        (OF_7B, 8, True),
        (OF_7B, 256, True),
        ({"intermediate": 65536}, 256, False),
    ],
)
def test_only_where_every_step_has_a_kernel_are_other_copies_not_needed(monkeypatch, changes, requests, wanted):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: H200)
    shape = dataclasses.replace(LLAMA, **changes)
    assert drafting.every_step_has_a_kernel(shape, torch.device("cpu"), requests) is wanted


def test_weights_that_are_replaced_reach_the_tensors_that_graphs_read(monkeypatch):
    layers = [a_layer(), a_layer()]
    step = a_step(monkeypatch, layers, layers.__getitem__)
    step._tensors |= {"weights": step.copies}
    for name in ("final_norm", "embedding", "rope"):
        del step._tensors[name]
    addresses = {name: tensor.data_ptr() for name, tensor in step._tensors.items() if tensor is not None}
    before = {name: tensor.clone() for name, tensor in step._tensors.items() if tensor is not None}
    for layer in layers:
        for linear_ in models.linears_of(layer).values():
            linear_.copy_of_weight.words.random_(-(2**31), 2**31 - 1)
        layer.input_layernorm.weight += 1
        layer.self_attn.qkv_proj.bias += 2
    step.renew()
    fresh = a_step(monkeypatch, layers, layers.__getitem__)
    assert torch.equal(step.copies, fresh.copies)
    for name, address in addresses.items():
        assert step._tensors[name].data_ptr() == address
        assert not torch.equal(step._tensors[name], before[name]), name
    assert set(addresses) == {"norms", "bias", "weights"}


def test_what_was_unpacked_of_a_quantised_target_is_not_kept(monkeypatch):
    monkeypatch.setattr(copied_weights, "kernels_of", lambda *_: SimpleNamespace(prepare=dict))
    weight = torch.randn(32, 128)
    assert CopiedWeight(INT4, weight, True)._weight is weight
    assert CopiedWeight(INT4, weight, False)._weight is None
