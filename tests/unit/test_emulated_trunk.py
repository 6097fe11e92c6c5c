"""The kernels for a whole trunk, run on a CPU (tests/emulated/cuda.h) and compared with PyTorch."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import programs
import pytest
import torch
from scripts import importable
from test_fused_step import on_copy
from torch import Tensor

from selfspec_cli.vllm_plugin import vllm_names
from selfspec_cli.vllm_plugin.fused_step import drafting
from selfspec_cli.vllm_plugin.fused_step import launch as few_launch
from selfspec_cli.vllm_plugin.fused_step import layout as few_layout
from selfspec_cli.vllm_plugin.fused_step.drafting import FusedStep
from selfspec_cli.vllm_plugin.fused_step.layout import Shape
from selfspec_cli.vllm_plugin.fused_step.wide import layout as many_layout

ROOT = Path(__file__).resolve().parents[2]
with importable(ROOT / "experiments/kernels") as find:
    trunk_model: Any = find("trunk_model")
with importable(ROOT / "tests/emulated") as find:
    emulated: Any = find("trunk")

pytestmark = [programs.needs("g++"), pytest.mark.slow]

CPU = torch.device("cpu")
CLOSE = {"few": 0.01, "many": 0.005}
"""Relative error by norms. One sum that is rounded the other way changes what follows; signed bytes twice as much."""
QWEN = Shape(2, 256, 512, 4, 2, 64, 16, 1e-6, bias=True)
QWEN3 = Shape(2, 128, 256, 2, 1, 128, 16, 1e-6, head_norms=True)
OWN_HEADS = Shape(2, 256, 448, 4, 4, 64, 16, 1e-5, rope_float=True)
EIGHT_OF_ONE = Shape(2, 192, 320, 8, 1, 64, 32, 1e-5)
BOTH = Shape(2, 256, 512, 4, 2, 128, 16, 1e-6, bias=True, head_norms=True)
LENGTHS = [1, 7, 8, 100, 300, 0, 17, 50]


@dataclass
class Case:
    """A step of random weights, what PyTorch makes of it, and the kernel for it with its arguments."""

    kind: str
    step: Any
    build: Any
    arguments: Any
    tensors: dict[str, Tensor | None]  # whose addresses the arguments have
    wanted: Tensor
    written: list[Tensor]
    before: list[Tensor]

    def run(self, seed: int, changes: Sequence[tuple[str, str]] = (), races: bool = False) -> int:
        """One launch in a process of its own; its exit code."""
        if races and self.kind == "few":
            changes = [*changes, ONLY_WHAT_IS_THERE]
        library = emulated.compiled(self.build, tuple(changes), races)
        self.step.out.fill_(float("nan"))
        child = os.fork()
        if child == 0:
            emulated.launch(library, self.build, self.arguments, seed)
            os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def error(self) -> float:
        """Of the outputs of open requests, by norms."""
        live = self.step.lengths > 0
        return trunk_model.error(self.step.out[live], self.wanted[live])

    def check(self) -> None:
        """Outputs, the keys and values that the step adds, and that it writes nowhere else."""
        assert self.error() < CLOSE[self.kind]
        page = self.step.model.shape.page
        for cache, old, new in zip(self.step.caches, self.before, self.written, strict=True):
            kept = cache.clone()
            for n, slot in enumerate(self.step.slots.tolist()):
                if slot >= 0:
                    place = (slot // page, slice(None), slot % page)
                    assert trunk_model.error(cache[place], new[n]) < CLOSE[self.kind]
                    kept[place] = old[place]
            assert torch.equal(kept, old)


def case(kind: str, shape: Shape, build: Any, lengths: list[int], structure: Any, **more: Any) -> Case:
    model = trunk_model.Model(shape, device="cpu")
    step = trunk_model.Step(model, lengths)
    memory = build.memory(CPU)
    for tensor in (step.out, *step.caches, *memory.values()):
        tensor.share_memory_()
    wanted, written = trunk_model.reference(step, getattr(trunk_model, f"{kind.upper()}_TOKENS"))
    tensors = {**trunk_model.tensors_of(step), **memory, "weights": trunk_model.laid_out(model)}
    numbers = {**trunk_model.numbers_of(step), **{name: value for name, value in more.items() if type(value) is int}}
    tensors |= {name: value for name, value in more.items() if isinstance(value, Tensor)}
    arguments = structure(**{name: few_launch.pointer(tensor) for name, tensor in tensors.items()}, **numbers)
    before = [cache.clone() for cache in step.caches]
    return Case(kind, step, build, arguments, tensors, wanted, written, before)


def many(shape: Shape, blocks: int, most: int, lengths: list[int], warps: int | None = None) -> Case:
    """The kernel for 9 to 64 tokens."""
    build = many_layout.built(shape, blocks, most, warps=warps)
    return case("many", shape, build, lengths, few_launch.WideArguments, tokens=len(lengths))


def few(shape: Shape, blocks: int, lengths: list[int]) -> Case:
    """The kernel for 1 to 8 tokens, with four warps, since the shapes here are small."""
    plan = few_layout.planned(shape, blocks, 4, 0.5)
    build = few_launch.built(shape, plan, len(lengths), many_layout.SHARED)
    return case("few", shape, build, lengths, few_launch.Arguments, plan=plan.tensor())


@pytest.mark.parametrize(
    ("shape", "blocks", "most", "lengths", "warps"),
    [
        (QWEN, 4, 16, [*LENGTHS, 3], 12),
        (QWEN, 7, 32, [*LENGTHS, *LENGTHS], None),
        (QWEN3, 3, 16, [300, 100, 0, 8, 7, 1, 1, 1, 0, 20, 40], 12),
        (EIGHT_OF_ONE, 8, 16, [300, 1, 7, 8, 600, 0, 17, 50, 9], 12),  # keys of two requests are split
        (OWN_HEADS, 5, 32, [*LENGTHS, *LENGTHS, *LENGTHS[1:]], 8),
        (EIGHT_OF_ONE, 8, 48, LENGTHS * 5, 8),
        (BOTH, 6, 64, LENGTHS * 8, 8),
        (BOTH, 6, 64, LENGTHS * 2, 12),
    ],
)
def test_many_tokens_give_what_pytorch_gives_in_any_order_of_threads(shape, blocks, most, lengths, warps):
    one = many(shape, blocks, most, lengths, warps)
    outs = []
    for seed in range(3):  # the second and third launch find counters that have grown
        assert one.run(seed) == 0
        outs.append(one.step.out.clone())
    one.check()
    live = one.step.lengths > 0
    assert all(torch.equal(out[live], outs[0][live]) for out in outs)  # sums have a fixed order


@pytest.mark.parametrize(
    ("shape", "blocks", "lengths"),
    [
        (QWEN, 4, [300, 7]),
        (BOTH, 6, [100, 0, 8]),
        (OWN_HEADS, 4, [17]),
        (QWEN, 16, [700]),  # keys are split, and each warp has several tiles of them
        (OWN_HEADS, 16, [500, 3, 250, 40]),
        (QWEN3, 20, [600, 1, 0, 50, 200]),
        (QWEN, 16, [1, 5, 17, 0, 130, 40]),
        (QWEN, 16, [1, 5, 17, 0, 130, 40, 300]),
        (EIGHT_OF_ONE, 24, LENGTHS),
    ],
)
def test_few_tokens_give_what_pytorch_gives(shape, blocks, lengths):
    one = few(shape, blocks, lengths)
    for seed in range(2):
        assert one.run(seed) == 0
    one.check()


@pytest.mark.parametrize("kernel", [few, many])
def test_blocks_of_the_context_can_be_left_out(kernel):
    """As `draft_context` leaves them out: the block table and the length are shorter, the positions are not."""
    lengths = [300, 100] if kernel is few else [300, 100, *[40] * 8]
    one = kernel(QWEN, 4, lengths) if kernel is few else kernel(QWEN, 4, 16, lengths)
    step, left_out = one.step, 2
    step.table[:2, 1:-left_out] = step.table[:2, 1 + left_out :].clone()
    step.lengths[:2] -= left_out * QWEN.page
    one.wanted, one.written = trunk_model.reference(step, getattr(trunk_model, f"{one.kind.upper()}_TOKENS"))
    assert one.run(1) == 0
    one.check()


FAULTS = {
    "activations are copied at once": ("        wait_for(a, bases, before, layer + 1);\n", ""),
    "a slot is read before it is full": ("barrier_wait(full + slot * 8, parity);", ""),
    "sums overwrite activations": (
        "sync_multipliers();  // copies of activations, and sums of the pass before, have been read",
        "",
    ),
    "a phase ends before all have stored": (
        "    sync_multipliers();\n    if (threadIdx.x == 0) add_release",
        "    if (threadIdx.x == 0) add_release",
    ),
    "columns in another order": ("high_magic = 0x43084308u", "high_magic = 0x43004300u"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault):
    one = many(QWEN, 6, 16, [*LENGTHS, *LENGTHS])
    assert any(one.run(seed, [FAULTS[fault]]) != 0 or not one.error() < CLOSE["many"] for seed in range(1, 4))


# Groups beyond a warp's share are read, because that is quicker than to ask, and left out. Here they are not read.
ONLY_WHAT_IS_THERE = (
    """chunk + n * RECORD), tokens[n] = *(const uint4*)(bytes + n * GROUP_BYTES);
        factor[n] = factors_at(factors + n * GROUP_FACTORS);""",
    """chunk + (n < left) * n * RECORD), tokens[n] = *(const uint4*)(bytes + (n < left) * n * GROUP_BYTES);
        factor[n] = factors_at(factors + (n < left) * n * GROUP_FACTORS);""",
)
STEPS = {
    "few tokens of a split context": lambda: few(QWEN, 16, [700]),
    "few tokens, a ring that is filled again": lambda: few(BOTH, 6, [100, 0, 8]),
    "few tokens, norms of heads": lambda: few(QWEN3, 20, [600, 1, 0, 50, 200]),
    "few tokens, all": lambda: few(EIGHT_OF_ONE, 24, LENGTHS),
    "many tokens": lambda: many(QWEN, 4, 16, [*LENGTHS, 3], 12),
    "many tokens of a split context": lambda: many(EIGHT_OF_ONE, 8, 16, [300, 1, 7, 8, 600, 0, 17, 50, 9], 12),
    "most tokens": lambda: many(BOTH, 6, 64, LENGTHS * 2, 12),
}
RACES = {
    "a chunk is asked for while lanes read the one before": (
        "few tokens, a ring that is filled again",
        "void used(u32 id) {\n        __syncwarp();",
        "void used(u32 id) {",
    ),
    "tokens are read before all lanes have written them": (
        "few tokens of a split context",
        "    if (NORM) add_over_lanes(lane, square, squares);\n    __syncwarp();",
        "    if (NORM) add_over_lanes(lane, square, squares);",
    ),
    "a slot is filled while lanes of a warp still read it": (
        "many tokens",
        "        __syncwarp();\n        if (id < ARRIVING)",
        "        if (id < ARRIVING)",
    ),
}


@pytest.mark.parametrize("step", STEPS)
def test_no_threads_race_for_shared_memory(step):
    one = STEPS[step]()
    assert all(one.run(seed, races=True) == 0 for seed in (1, 2))
    one.check()


@pytest.mark.parametrize("race", RACES)
def test_a_race_is_found(race):
    step, *change = RACES[race]
    assert STEPS[step]().run(1, [tuple(change)], races=True) == 71


# ---- as the engine calls it ------------------------------------------------------------------------------------------


class Emulated:
    """In place of `launch.Kernel`."""

    spilled = 0

    def __init__(self, build: Any, device: torch.device, folder: Path) -> None:
        self.build, self.library, self.memory = build, emulated.compiled(build), build.memory(device)

    def __call__(self, arguments: Any) -> None:
        for name, tensor in self.memory.items():
            setattr(arguments, name, tensor.data_ptr())
        emulated.launch(self.library, self.build, arguments, 1)


def decoder(model: Any) -> Any:
    """What a step reads of vLLM's decoder with such weights."""
    shape, layers = model.shape, []
    for number, layer in enumerate(model.layers):
        norms = [SimpleNamespace(weight=weight, variance_epsilon=shape.epsilon) for weight in layer["norms"]]
        copies = layer["copies"]
        attention = SimpleNamespace(
            qkv_proj=on_copy(copies["qkv"], layer["bias"]),
            o_proj=on_copy(copies["o"]),
            attn=SimpleNamespace(layer_name=f"layers.{number}"),
            rotary_emb=SimpleNamespace(cos_sin_cache=model.rope),
            head_dim=shape.dim,
            num_heads=shape.query_heads,
            num_kv_heads=shape.heads,
            scaling=shape.dim**-0.5,
        )
        mlp = SimpleNamespace(gate_up_proj=on_copy(copies["gate_up"]), down_proj=on_copy(copies["down"]))
        layers.append(
            SimpleNamespace(self_attn=attention, mlp=mlp, input_layernorm=norms[0], post_attention_layernorm=norms[1])
        )
    weights = {"norm": model.final_norm, "embed_tokens": model.embedding}
    parts = {name: SimpleNamespace(weight=weight) for name, weight in weights.items()}
    return SimpleNamespace(layers=layers, **parts)


@pytest.fixture
def six_multiprocessors(monkeypatch):
    """A GPU of that size, and blocks of four warps: none is without a share of the columns, which are few."""
    properties = SimpleNamespace(multi_processor_count=6, shared_memory_per_block_optin=many_layout.SHARED)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(drafting, "WARPS", 4)


def test_an_engines_step_of_many_tokens_is_the_wide_kernel(six_multiprocessors, monkeypatch):
    model = trunk_model.Model(QWEN, device="cpu")
    step = trunk_model.Step(model, [*LENGTHS, 9])
    monkeypatch.setattr(drafting, "Kernel", Emulated)
    metadata = SimpleNamespace(max_query_len=1, seq_lens=step.lengths, block_table=step.table)
    names = [f"layers.{number}" for number in range(QWEN.layers)]
    caches = {name: SimpleNamespace(kv_cache=cache) for name, cache in zip(names, step.caches, strict=True)}
    context = SimpleNamespace(no_compile_layers=caches, attn_metadata=dict.fromkeys(names, metadata))
    attention = (metadata, None, step.caches[0], step.slots)
    monkeypatch.setattr(vllm_names, "get_attention_context", lambda _: attention, raising=False)
    monkeypatch.setattr(vllm_names, "get_forward_context", lambda: context, raising=False)
    trunk = decoder(model)
    fused = FusedStep(trunk, trunk.layers, trunk.layers.__getitem__, 16, CPU)
    wanted, _ = trunk_model.reference(step, trunk_model.MANY_TOKENS)
    buffers = SimpleNamespace(input_ids=step.ids, positions=step.positions)
    out = fused(len(step.lengths), buffers)
    live = step.lengths > 0
    assert out is not None and trunk_model.error(out[live], wanted[live]) < CLOSE["many"]
    some = fused(5, buffers)  # two heads of five tokens are more than six blocks, so it is the same kernel
    assert some is not None and trunk_model.error(some[live[:5]], wanted[:5][live[:5]]) < CLOSE["many"]
    assert fused.tokens == (16,) and fused.most == 64


@pytest.mark.parametrize(("spilled", "alone"), [(0, True), (10_000, False)])
def test_nothing_but_the_kernels_holds_copies_only_where_they_can_run(six_multiprocessors, monkeypatch, spilled, alone):
    """Else steps would multiply by the target's own weights, and drafting would cost what decoding does."""
    kernel = type("Spilling", (), {"spilled": spilled, "__init__": lambda self, *_: None})
    monkeypatch.setattr(drafting, "Kernel", kernel)
    monkeypatch.setattr(drafting, "reason_against", lambda *_: None)
    config = SimpleNamespace(
        cache_config=SimpleNamespace(block_size=16), scheduler_config=SimpleNamespace(max_num_seqs=1)
    )
    trunk = decoder(trunk_model.Model(QWEN, device="cpu"))
    made = drafting.fused_step(trunk, trunk.layers, trunk.layers.__getitem__, config, CPU, alone=True)
    assert (made is not None) is alone
