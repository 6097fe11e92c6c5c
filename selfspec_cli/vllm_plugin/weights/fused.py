"""Norms and activations that round their result for the product after them, in the same kernel (rounding.py).

In the graphs that vLLM compiles the layers that draft from, a norm is an operator of vLLM's own and a product is ours
(lowbit.py). `round_in_front` is a pass over such a graph: where the input of products is a norm of a sum, or an
activation that `Activation` has put there, it becomes an operator that also gives the rounded tokens, and the products
take these. All else that reads the plain ones finds them as before.
"""

from __future__ import annotations

import inspect
import operator
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from selfspec_cli.early_exit.draft_weights.integers import GROUP
from selfspec_cli.vllm_plugin.weights import rounding
from selfspec_cli.vllm_plugin.weights.lowbit_one_token import width_of

if TYPE_CHECKING:
    from selfspec_cli.vllm_plugin.vllm_names import InductorPass

WIDEST = 16384  # inputs of a norm: one program holds all of them


class Activation(nn.Module):
    """Stands in for vLLM's `SiluAndMul` in a layer that drafts."""

    def forward(self, x: Tensor) -> Tensor:
        """x [n, 2 * d] -> silu(x[:, :d]) * x[:, d:]."""
        out: Tensor = torch.ops.selfspec.silu_and_mul(x)
        return out


def activation(module: nn.Module, name: str) -> nn.Module | None:
    """For `replace.replace_in_layers`: what stands in for an activation whose result a product reads rounded."""
    from selfspec_cli.vllm_plugin.vllm_names import SiluAndMul

    return Activation() if type(module) is SiluAndMul else None


def graph_pass() -> InductorPass:
    """`round_in_front` as vLLM takes it, before it lowers its own operators."""
    from selfspec_cli.vllm_plugin.vllm_names import CallableInductorPass, InductorPass

    source = inspect.getsource(sys.modules[__name__])  # a change here is another entry of the compile cache
    return CallableInductorPass(round_in_front, InductorPass.hash_source(source))


# ---- operators ------------------------------------------------------------------------------------------------------


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


# ---- the pass -------------------------------------------------------------------------------------------------------


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

    Its weight has to be an input of the graph, because the kernel reads it before the kernel in front has ended.
    """
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
