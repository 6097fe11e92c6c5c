"""Products with integer copies of weights, 4 or 8 bits each, in groups along a row with one scale a group.

One token is multiplied by the kernel of one_token.py, and 2 to 32 by that of few_tokens.py, which takes 33 to 64 in two
turns, from the layout of `early_exit.draft_weights.integers`. With more, products are bound by arithmetic, and the
target's own weight is as fast, where the target has it. The tokens are rounded to 8 bits before (rounding.py), in a
compiled layer by the norm or the activation in front (`round_in_front`). These are the products of the lm_head, and of
models that fused_step/ does not know."""

from __future__ import annotations

import inspect
import itertools
import logging
import operator
import os
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import Context
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from selfspec_cli.early_exit.draft_weights.integers import GROUP, integers
from selfspec_cli.vllm_plugin import vllm_names as vllm
from selfspec_cli.vllm_plugin.weights import few_tokens, one_token, rounding
from selfspec_cli.vllm_plugin.weights.copied import CopiedLinear, CopiedWeight
from selfspec_cli.vllm_plugin.weights.one_token import width_of
from selfspec_cli.vllm_plugin.weights.rounding import none_arrived

COMPILE_SIZES = ()  # the operator chooses when it runs
MOST = 2 * rounding.MOST


def prepare(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies as they were made."""
    none_arrived(tensors["words"].device)  # not for the first time while a CUDA graph is captured
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def linear(x: Tensor, tensors: Mapping[str, Tensor], bias: Tensor | None, weight: Tensor | None) -> Tensor:
    """x [n, in] bf16 times what `prepare` made of weight [out, in] -> [n, out], bias [out] included. CUDA only."""
    out: Tensor = torch.ops.selfspec.linear_integers(x, None, None, tensors["words"], tensors["scales"], bias, weight)
    return out


# One operator for any number of tokens: what Dynamo traces once, with many, is also what one token runs through.
# rounded, factors: the tokens as rounding.py gives them, where `round_in_front` has them made; None: round them here.
@torch.library.custom_op(
    "selfspec::linear_integers",
    mutates_args=(),
    schema="(Tensor x, Tensor? rounded, Tensor? factors, Tensor words, Tensor scales, Tensor? bias, Tensor? weight) "
    "-> Tensor",
)
def _linear_integers(
    x: Tensor,
    rounded: Tensor | None,
    factors: Tensor | None,
    words: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    weight: Tensor | None,
) -> Tensor:
    tokens, bits = x.shape[0], width_of(words, x.shape[1])
    if tokens > MOST and weight is not None:
        return F.linear(x, weight, bias)
    if tokens > rounding.MOST:
        parts = (_rounded_product(part, bits, words, scales, bias) for part in x.contiguous().split(rounding.MOST))
        return torch.cat(list(parts))
    if rounded is None or factors is None:
        return _rounded_product(x.contiguous(), bits, words, scales, bias)
    return _product(tokens, rounded, factors, words, scales, bias, x.dtype)


def _rounded_product(x: Tensor, bits: int, words: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """x [n, in], contiguous, of 1 to rounding.MOST tokens, rounded here."""
    return _product(x.shape[0], *rounding.round_tokens(x, bits), words, scales, bias, x.dtype)


def _product(tokens: int, rounded: Tensor, factors: Tensor, *others: Any, **more: Any) -> Tensor:
    """Product of `tokens` rounded tokens; the other arguments are those of both kernels' functions."""
    if tokens == 1:
        return one_token.product(rounded, factors, *others, **more)
    return few_tokens.product(rounded, factors, tokens, *others, **more)


def compile_for(tokens: int, tensors: Mapping[str, Tensor], bias: Tensor | None, dtype: torch.dtype) -> None:
    """Compile what `linear` launches for `tokens` tokens of `dtype`, and launch nothing."""
    if tokens > rounding.MOST:
        return
    words, scales = tensors["words"], tensors["scales"]
    groups = scales.shape[1]
    rounded, factors = rounding.room_for(groups, rounding.padded(tokens), words.device)
    _product(tokens, rounded, factors, words, scales, bias, dtype, only_compile=True)


@_linear_integers.register_fake
def _(x: Tensor, rounded: Any, factors: Any, words: Tensor, *others: Any) -> Tensor:
    return x.new_empty(x.shape[0], words.shape[0])


def experts(
    layer: Any, w13: Mapping[str, Tensor], w2: Mapping[str, Tensor], **activation: Any
) -> tuple[Any, Any, dict[str, Tensor]]:
    """vLLM's Triton kernels for experts of 4 and of 8 bits (W4A16, W8A16), for any number of tokens."""
    bits = _width_of_copy(w13)
    config = vllm.make_wna16_moe_quant_config(
        w1_scale=w13["scales"], w2_scale=w2["scales"], group_size=GROUP, num_bits=bits, **activation
    )
    kernel = vllm.make_wna16_moe_kernel(
        moe_quant_config=config,
        moe_config=layer.moe_config,
        experts_cls=vllm.TritonWNA16Experts,
        backend=vllm.WNA16MoEBackend.TRITON,
    )
    tensors = {"w13_weight": as_bytes(w13), "w2_weight": as_bytes(w2)}
    return kernel, config, {**tensors, "w13_scale": w13["scales"], "w2_scale": w2["scales"]}


def as_bytes(copies: Mapping[str, Tensor]) -> Tensor:
    """Copies of experts as vLLM's kernels read them, uint8: q + 128 in [experts, out, in] for 8 bits; for 4, q + 8 of
    two columns in [experts, out, in / 2], the first in the low half. One expert at a time, to save memory."""
    bits, packed = _width_of_copy(copies), []
    for number in range(len(copies["scales"])):
        q = integers({name: tensor[number] for name, tensor in copies.items()}, bits).flatten(1)  # int32 [out, in]
        if bits == 8:
            packed.append((q + 128).to(torch.uint8))
        else:
            packed.append(((q[:, ::2] + 8) | ((q[:, 1::2] + 8) << 4)).to(torch.uint8))
    return torch.stack(packed)


def _width_of_copy(copies: Mapping[str, Tensor]) -> int:
    """Bits of the integers of copies [experts, ...]."""
    return width_of(copies["words"][0], copies["scales"].shape[2] * GROUP)


# ---- norms and activations that round for the product after them -----------------------------------------------------

# In the graphs that vLLM compiles the layers that draft from, a norm is an operator of vLLM's own and a product is
# ours. Where the input of products is a norm of a sum, or an activation that `Activation` has put there, it becomes an
# operator that also gives the rounded tokens, and the products take these. All else that reads the plain ones finds
# them as before.

WIDEST = 16384  # inputs of a norm: one program holds all of them


class Activation(nn.Module):
    """Stands in for vLLM's `SiluAndMul` in a layer that drafts."""

    def forward(self, x: Tensor) -> Tensor:
        """x [n, 2 * d] -> silu(x[:, :d]) * x[:, d:]."""
        out: Tensor = torch.ops.selfspec.silu_and_mul(x)
        return out


def activation(module: nn.Module, name: str) -> nn.Module | None:
    """For `shared.replace_in_layers`: what stands in for an activation whose result a product reads rounded."""
    return Activation() if type(module) is vllm.SiluAndMul else None


def graph_pass() -> vllm.InductorPass:
    """`round_in_front` as vLLM takes it, before it lowers its own operators."""
    source = inspect.getsource(sys.modules[__name__])  # a change here is another entry of the compile cache
    return vllm.CallableInductorPass(round_in_front, vllm.InductorPass.hash_source(source))


@torch.library.custom_op("selfspec::silu_and_mul", mutates_args=(), schema="(Tensor x) -> Tensor")
def _silu_and_mul(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    if not x.is_cuda or x.dim() != 2 or half % GROUP:
        return F.silu(x[..., :half]) * x[..., half:]
    return rounding.activate(x.contiguous(), 0)[0]


@_silu_and_mul.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


@torch.library.custom_op(
    "selfspec::silu_and_mul_rounded", mutates_args=(), schema="(Tensor x, int bits) -> (Tensor, Tensor, Tensor)"
)
def _silu_and_mul_rounded(x: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    return rounding.activate(x.contiguous(), bits)


@_silu_and_mul_rounded.register_fake
def _(x: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    half = x.shape[1] // 2
    return x.new_empty(x.shape[0], half), *_room(x, half)


@torch.library.custom_op(
    "selfspec::add_rms_norm_rounded",
    mutates_args=(),
    schema="(Tensor x, Tensor residual, Tensor weight, float epsilon, int bits) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _add_rms_norm_rounded(
    x: Tensor, residual: Tensor, weight: Tensor, epsilon: float, bits: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return rounding.add_and_norm(x.contiguous(), residual.contiguous(), weight, epsilon, bits)


@_add_rms_norm_rounded.register_fake
def _(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float, bits: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape), *_room(x, x.shape[1])


def _room(x: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    return rounding.room_for(columns // GROUP, rounding.MOST, x.device)


def round_in_front(graph: fx.Graph) -> None:
    """Let what comes before products with integer copies round for them, where it can (module docstring)."""
    by_input: dict[fx.Node, list[tuple[fx.Node, int]]] = {}
    for node in graph.find_nodes(op="call_function", target=torch.ops.selfspec.linear_integers.default):
        x, _, _, words, *_ = node.args
        bits = width_of(words.meta["val"], x.meta["val"].shape[-1])
        by_input.setdefault(_same_values(x), []).append((node, bits))
    for x, products in by_input.items():
        bits = products[0][1]  # copies of another width read other bytes, and round for themselves
        rounded = _rounded(graph, x, bits)
        if rounded is None:
            continue
        for product in (node for node, width in products if width == bits):
            product.args = (product.args[0], *rounded, *product.args[3:])
            product.meta.pop("eager_input_vals", None)  # Inductor compares arguments with it


def _rounded(graph: fx.Graph, x: fx.Node, bits: int) -> tuple[fx.Node, fx.Node] | None:
    """Where the rounded tokens of x and their factors are found from now on; None where nothing can round them."""
    if x.target is torch.ops.selfspec.silu_and_mul.default and x.meta["val"].dim() == 2:
        values, *rounded = _call(graph, x, torch.ops.selfspec.silu_and_mul_rounded.default, (*x.args, bits), 3)
        x.replace_all_uses_with(values)
        graph.erase_node(x)
        return rounded[0], rounded[1]
    norm = x.args[0] if x.target is operator.getitem and x.args[1] == 0 else None
    if not isinstance(norm, fx.Node) or not _is_norm(norm):
        return None
    found = _call(graph, norm, torch.ops.selfspec.add_rms_norm_rounded.default, (*norm.args[:4], bits), 4)
    for old in list(norm.users):
        old.replace_all_uses_with(found[old.args[1]])  # type: ignore[index]
        graph.erase_node(old)
    graph.erase_node(norm)
    return found[2], found[3]


def _is_norm(node: fx.Node) -> bool:
    """Whether a node is vLLM's norm of a sum, of a form that `rounding.add_and_norm` knows.
    Its weight has to be an input of the graph, because the kernel reads it before the kernel in front has ended."""
    if getattr(node.target, "name", lambda: "")() != "vllm_ir::fused_add_rms_norm":
        return False
    x, residual, weight, _, *variance = node.args
    if any(size is not None for size in variance) or not isinstance(weight, fx.Node) or weight.op != "placeholder":
        return False
    some: list[Any] = [part.meta["val"] for part in (x, residual, weight)]  # type: ignore[union-attr]
    columns = some[0].shape[-1]
    one_type = some[0].dtype is some[1].dtype
    return one_type and some[0].dim() == 2 and some[2].dim() == 1 and columns % GROUP == 0 and columns <= WIDEST


def _call(graph: fx.Graph, before: fx.Node, target: Any, args: tuple[Any, ...], results: int) -> list[fx.Node]:
    """The results of a new call, in front of a node."""
    with graph.inserting_before(before):
        call = graph.call_function(target, args)
        found = [graph.call_function(operator.getitem, (call, number)) for number in range(results)]
    values = fx.map_arg(args, lambda node: node.meta["val"])
    with values[0].fake_mode:
        call.meta["val"] = target(*values)
    for number, node in enumerate(found):
        node.meta["val"] = call.meta["val"][number]
    return found


VIEWS = (torch.ops.aten.view.default, torch.ops.aten.reshape.default, torch.ops.aten._unsafe_view.default)


def _same_values(x: fx.Node) -> fx.Node:
    """x, or what x is a view of in the same shape."""
    while x.target in VIEWS:
        source: Any = x.args[0]
        shapes = x.meta["val"].shape, source.meta["val"].shape
        if len(shapes[0]) != 2 or len(shapes[1]) != 2 or shapes[0][1] != shapes[1][1]:
            break
        x = source
    return x


# ---- compiled side by side, while vLLM compiles the layers that draft ------------------------------------------------

# Triton takes 2 to 6 seconds for a product of 2 to 32 tokens. Otherwise each is compiled when a step of that many
# tokens first runs, one after the other, between the graphs that vLLM records (results/LOG.md, "Where does the start of
# an engine with copies go?"). Triton's own mode for that makes the key of each kernel where it is asked for, so that no
# kernel is compiled twice, and leaves to threads what needs neither CUDA nor, for the most part, Python's lock.

CLASSES = (1, 2, 4, 8, 16, 32)  # tokens; the products of all numbers from one to the next are the same kernels
MOST_THREADS = 16

Copy = tuple[CopiedWeight, Tensor | None]
"""With the bias that is added to its product."""


def copies_of_layers(trunk: nn.Module) -> list[Copy]:
    """A copy of each shape that the layers multiply by; most layers of a model have the same."""
    found: dict[object, Copy] = {}
    for layer in trunk.modules():
        if isinstance(getattr(layer, "quant_method", None), CopiedLinear):
            copy: Any = layer.copy_of_weight
            bias: Any = None if getattr(layer, "skip_bias_add", False) else getattr(layer, "bias", None)
            shapes = tuple(tensor.shape for tensor in copy.parameters())
            found.setdefault((shapes, bias is None), (copy, bias))
    return [*found.values()]


def numbers_of_tokens(requests: int) -> list[int]:
    """Those of CLASSES that steps of up to `requests` requests need."""
    return [count for before, count in zip((0, *CLASSES), CLASSES, strict=False) if before < requests]


@contextmanager
def compiled_beside(
    trunk: nn.Module | None, logits: Copy | None, requests: int, device: torch.device, ranks: int
) -> Iterator[None]:
    """While the block runs, compile what draft steps of up to `requests` requests multiply by; at its end, wait for it.
    A kernel that cannot be compiled is left to the step that launches it, with a warning. trunk: None where one kernel
    takes the place of the layers' products. logits: what makes them (`TargetHead.copied`). ranks: of this host."""
    if device.type != "cuda":
        yield
        return
    from triton import AsyncCompileMode

    copies = [*([] if trunk is None else copies_of_layers(trunk)), *([] if logits is None else [logits])]
    wanted = list(itertools.product(copies, numbers_of_tokens(requests)))
    failures: list[BaseException] = []
    with ThreadPoolExecutor(_threads(ranks), thread_name_prefix="selfspec-compile") as pool:
        # A context of its own: what the block itself compiles does not wait for this.
        mode, context = AsyncCompileMode(pool, ignore_errors=True), Context()
        context.run(mode.__enter__)
        try:
            for (copy, bias), count in wanted:
                try:
                    context.run(copy.compile_for, count, bias)
                except Exception as error:
                    failures.append(error)
            yield
            failures += filter(None, [future.exception() for future in mode.raw_futures])
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for future in mode.raw_futures:
                if future.cancelled():
                    future.set_running_or_notify_cancel()  # Triton waits for all of them, and only this ends a wait
            raise
        finally:
            context.run(mode.__exit__, None, None, None)
    if failures:
        logging.getLogger("vllm.selfspec").warning(
            "draft kernels: %d could not be compiled ahead, and will be where they are first launched (%s: %s)",
            len(failures),
            type(failures[0]).__name__,
            failures[0],
        )


def _threads(ranks: int) -> int:
    """Half of this rank's share of the processors that the process may use; vLLM compiles on the others."""
    return max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)) // (2 * ranks)))
