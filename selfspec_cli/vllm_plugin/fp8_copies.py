"""8-bit copies of the draft's weights, beside the target's own.

At a small batch a draft step is bound by the bytes of weights that it reads; e4m3 copies of the first E layers' linear
weights halve them. A copy is made at load from the target's bf16 weight, one scale a row (output channel), and is
multiplied by vLLM's own kernels. The target's modules are left as they are, so the verify pass, which decides on every
token, runs on its own weights; copies can only change which drafts are proposed. Weights that are loaded anew into a
live engine do not reach the copies: drafts get worse then, the output does not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from selfspec_cli.early_exit.settings import SettingsError
from selfspec_cli.vllm_plugin.decoder import has_experts

if TYPE_CHECKING:
    from vllm.config import ModelConfig, ParallelConfig, VllmConfig

PLAIN = torch.bfloat16  # of the weights that are copied, and of the activations
LARGEST = 448.0  # of e4m3
CHUNK = 2**25  # elements quantised at once, so that the fp32 values in between stay below 128 MiB

Make = Callable[[nn.Module, str], nn.Module | None]
"""(module, its dotted name) -> what stands in its place, or None to look at its children."""


# ---- what cannot be done ------------------------------------------------------------------------------------------


def refuse_unsupported(target: ModelConfig, parallel: ParallelConfig) -> None:
    """Raises SettingsError where copies cannot be made or run: no CUDA, weights that are not plain bf16, experts, or
    more than one tensor-parallel rank. Before anything is loaded."""
    from vllm.platforms import current_platform

    ranks = parallel.tensor_parallel_size
    reasons = [
        (not current_platform.is_cuda(), f"the kernels need CUDA, and this is {current_platform.device_name}"),
        (target.quantization is not None, f"the target's weights are quantised already ({target.quantization})"),
        (target.dtype is not PLAIN, f"copies are made of bf16 weights, not of {target.dtype}"),
        (target.is_moe, "mixture-of-experts layers have no copies"),
        (ranks > 1, f"tensor_parallel_size = {ranks}, and copies are for one GPU"),
    ]
    for unsupported, reason in reasons:
        if unsupported:
            raise SettingsError(f"draft_weights 'fp8' is not supported here: {reason}; allowed: shared")


# ---- quantisation -------------------------------------------------------------------------------------------------


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight [out, in] as e4m3 [out, in] and its scales, float32 [out, 1]: weight is about e4m3 * scale.

    Symmetric, one scale a row, the largest magnitude of the row at 448. An error is at most a sixteenth of the value (3
    mantissa bits), or half the smallest step, 2^-10 of the scale. A row of zeros stays zeros.

    Raises:
        SettingsError: a value is NaN or infinite.
    """
    copy = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    scale = torch.empty((len(weight), 1), dtype=torch.float32, device=weight.device)
    step = max(1, CHUNK // weight.shape[1])
    for start in range(0, len(weight), step):
        rows = slice(start, start + step)
        values = weight[rows].float()
        largest = values.abs().amax(dim=1, keepdim=True)  # [rows, 1]; NaN where a value is
        scale[rows] = torch.where(largest == 0, 1.0, largest / LARGEST)
        # Rounding may leave the largest value just beyond 448, which e4m3 would turn into NaN.
        copy[rows] = (values / scale[rows]).clamp_(-LARGEST, LARGEST).to(copy.dtype)
    if not scale.isfinite().all():
        raise SettingsError("draft_weights 'fp8' needs finite weights: one is NaN or infinite; allowed: shared")
    return copy, scale


# ---- kernels ------------------------------------------------------------------------------------------------------


class CopiedWeight(nn.Module):
    """x [..., in] bf16 -> [n, out] bf16 on a copy of `weight` [out, in]; activations in e4m3 too (W8A8), one scale a
    token, found in each call.

    vLLM's CUTLASS kernel: on an H200 faster than Marlin's W8A16 up to 16 tokens, and no slower at 32 once Inductor has
    made the quantisation of the activations a part of the norm before it (results/LOG.md).
    """

    def __init__(self, weight: Tensor) -> None:
        from vllm import _custom_ops as ops

        super().__init__()
        self._quantise, self._multiply = ops.scaled_fp8_quant, ops.cutlass_scaled_mm
        copy, scale = quantise(weight)
        self.weight, self.weight_scale = _frozen(copy), _frozen(scale)

    def forward(self, x: Tensor) -> Tensor:
        x = x.reshape(-1, x.shape[-1])
        if torch.compiler.is_compiling():  # Inductor makes plain operations part of the norm before them
            scales = (x.abs().amax(-1, keepdim=True).float() / LARGEST).clamp_min(1e-12)
            tokens = (x.float() / scales).clamp(-LARGEST, LARGEST).to(self.weight.dtype)
        else:
            tokens, scales = self._quantise(x, use_per_token_if_dynamic=True)
        return self._multiply(tokens, self.weight.t(), scales, self.weight_scale, out_dtype=x.dtype)


# ---- the trunk ----------------------------------------------------------------------------------------------------


class CopiedLinear:
    """The `quant_method` of a linear layer that multiplies by its copy; vLLM's layers ask nothing else of it."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [n, in] -> [n, out]."""
        out = layer.copy_of_weight(x)
        return out if bias is None else out + bias


def copied_layers(layers: nn.ModuleList, count: int, vllm_config: VllmConfig) -> nn.ModuleList:
    """The first `count` of `layers`, their linear layers on 8-bit copies and everything else shared.

    What vLLM looks up by name in a forward pass (attention and its KV cache) stays the same object. Raises
    SettingsError for a layer with experts, for a quantised linear layer, and for weights that are not finite.
    """
    from vllm.model_executor.layers.linear import LinearBase

    by_name = vllm_config.compilation_config.static_forward_context.values()
    layers = nn.ModuleList(list(layers)[:count])
    if has_experts(layers):
        raise SettingsError("draft_weights 'fp8' is not supported here: mixture-of-experts layers have no copies; "
                            "allowed: shared")  # fmt: skip

    def make(module: nn.Module, name: str) -> nn.Module | None:
        return _twin(module, name) if isinstance(module, LinearBase) else None

    keep = {id(module) for module in by_name}
    return nn.ModuleList(replaced(layer, make, keep, f"layers.{i}") for i, layer in enumerate(layers))


def replaced(module: nn.Module, make: Make, keep: Collection[int] = (), name: str = "") -> nn.Module:
    """`module` with every part for which `make` has a replacement replaced; `module` itself if there is none.

    What holds a replaced part is copied shallowly, all else is shared, and `module` is not changed. Modules whose id is
    in `keep` are shared whole.
    """
    if id(module) in keep:
        return module
    made = make(module, name)
    if made is not None:
        return made
    children = {key: child for key, child in module._modules.items() if child is not None}
    parts = {key: replaced(child, make, keep, f"{name}.{key}") for key, child in children.items()}
    changed = {key: part for key, part in parts.items() if part is not children[key]}
    return _shallow(module, _modules={**module._modules, **changed}) if changed else module


def _twin(layer: Any, name: str) -> nn.Module:
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or weight.dtype is not PLAIN:
        kind = type(getattr(layer, "quant_method", None)).__name__
        raise SettingsError(
            f"draft_weights 'fp8' is not supported here: {name} ({type(layer).__name__}, {kind}) has no plain bfloat16 "
            "weight to copy; allowed: shared"
        )
    parameters = {key: value for key, value in layer._parameters.items() if key != "weight"}  # a bias is shared
    modules = {**layer._modules, "copy_of_weight": CopiedWeight(weight.detach())}
    return _shallow(layer, _parameters=parameters, _modules=modules, quant_method=CopiedLinear())


def _shallow(module: nn.Module, **changes: Any) -> nn.Module:
    """Another module of the same class and state but for `changes`; bound methods that it stores are its own."""
    twin: nn.Module = object.__new__(type(module))
    for key, value in {**module.__dict__, **changes}.items():
        own = isinstance(value, MethodType) and value.__self__ is module
        twin.__dict__[key] = MethodType(value.__func__, twin) if own else value
    return twin


# ---- the head -----------------------------------------------------------------------------------------------------


class CopiedProjection:
    """x [n, hidden] -> logits [n, rows] on an 8-bit copy of lm_head rows [rows, hidden]. bias: [rows] or None."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._copy = CopiedWeight(weight)
        self.bias = bias

    @property
    def tensors(self) -> list[Tensor]:
        """What a call reads, apart from the bias."""
        return [*self._copy.parameters()]

    def logits(self, x: Tensor) -> Tensor:
        """[n, hidden] -> [n, rows]."""
        logits: Tensor = self._copy(x)
        return logits if self.bias is None else logits + self.bias


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
