"""8-bit copies of the draft's weights, beside the target's own.

At a small batch a draft step is bound by the bytes of weights that it reads; e4m3 copies of the first E layers' linear
weights halve them. A copy is made at load from the target's bf16 weight, one scale a row (output channel). The
target's modules are left as they are, so the verify pass, which decides on every token, runs on its own weights; copies
can only change which drafts are proposed. Weights that are loaded anew into a live engine do not reach the copies:
drafts get worse then, the output does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.vllm_plugin.decoder import has_experts
from selfspec_cli.vllm_plugin.weights.replace import shallow

if TYPE_CHECKING:
    from vllm.config import ModelConfig, ParallelConfig

PLAIN = torch.bfloat16  # of the weights that are copied, and of the activations
LARGEST = 448.0  # of e4m3
CHUNK = 2**25  # elements quantised at once, so that the fp32 values in between stay below 128 MiB


# ---- what cannot be done ------------------------------------------------------------------------------------------


def refuse_unsupported(target: ModelConfig, parallel: ParallelConfig) -> None:
    """Raises SettingsError where copies cannot be made or run: no CUDA, weights that are not plain bf16, experts, or
    more than one tensor-parallel rank. Before anything is loaded."""
    from vllm.platforms import current_platform

    ranks = parallel.tensor_parallel_size
    reasons = [
        (not current_platform.is_cuda(), f"the kernels need CUDA, and this is {current_platform.device_name}"),
        (not current_platform.supports_fp8(), "the kernels need a GPU of compute capability 8.9 or more"),
        (target.quantization is not None, f"the target's weights are quantised already ({target.quantization})"),
        (target.dtype is not PLAIN, f"copies are made of bf16 weights, not of {target.dtype}"),
        (target.is_moe, "mixture-of-experts layers have no copies"),
        (ranks > 1, f"tensor_parallel_size = {ranks}, and copies are for one GPU"),
    ]
    for unsupported, reason in reasons:
        if unsupported:
            raise _unsupported(reason)


def _unsupported(reason: str) -> SettingsError:
    return SettingsError(f"draft_weights 'fp8' is not supported here: {reason}; allowed: shared")


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


# ---- products -----------------------------------------------------------------------------------------------------


def linear_e4m3(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """x [n, in] bf16, weight [out, in] e4m3, scale float32 [out, 1] -> [n, out] bf16. CUDA only.

    One token stays in bf16 (W8A16). More are turned into e4m3 too (W8A8), with one scale a token: vLLM's CUTLASS kernel
    is faster than Marlin's W8A16 up to 16 tokens on an H200 (results/published/gpu/fp8).
    """
    return torch.ops.selfspec.linear_e4m3(x, weight, scale)


def _linear_e4m3(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return _one_token(x.contiguous(), weight, scale) if x.shape[0] == 1 else _tokens(x, weight, scale)


# One operator for Dynamo, which traces the trunk once for any number of tokens. Being implicit it is no barrier for
# Inductor, which in vLLM's own compile mode compiles what was traced once for one token and once for more (trunk.py)
# and finds in each graph the branch that belongs there: it makes the quantisation of the tokens a part of the norm
# before it.
_LIBRARY = torch.library.Library("selfspec", "FRAGMENT")
_LIBRARY.define("linear_e4m3(Tensor x, Tensor weight, Tensor scale) -> Tensor")
_LIBRARY.impl("linear_e4m3", _linear_e4m3, "CompositeImplicitAutograd")


@torch.library.custom_op(
    "selfspec::gemv_e4m3", mutates_args=(), schema="(Tensor x, Tensor weight, Tensor scale) -> Tensor"
)
def _one_token(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    from selfspec_cli.vllm_plugin.weights.gemv import gemv  # imports Triton, which a machine without a GPU may lack

    return gemv(x, weight, scale)


@_one_token.register_fake
def _(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def _tokens(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    from vllm import _custom_ops as ops

    if is_fake(x):  # traced: plain operations, which can be fused
        scales = (x.abs().amax(-1, keepdim=True).float() / LARGEST).clamp_min(1e-12)
        tokens = (x.float() / scales).clamp(-LARGEST, LARGEST).to(weight.dtype)
    else:
        tokens, scales = ops.scaled_fp8_quant(x.contiguous(), use_per_token_if_dynamic=True)
    return ops.cutlass_scaled_mm(tokens, weight.t(), scales, scale, out_dtype=x.dtype)


# ---- modules ------------------------------------------------------------------------------------------------------


class CopiedWeight(nn.Module):
    """x [..., in] bf16 -> [n, out] bf16 on a copy of `weight` [out, in]."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        copy, scale = quantise(weight)
        self.weight, self.weight_scale = _frozen(copy), _frozen(scale)

    def forward(self, x: Tensor) -> Tensor:
        return linear_e4m3(x.reshape(-1, x.shape[-1]), self.weight, self.weight_scale)


class CopiedLinear:
    """The `quant_method` of a linear layer that multiplies by its copy; vLLM's layers ask nothing else of it."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [n, in] -> [n, out]."""
        out = layer.copy_of_weight(x)
        return out if bias is None else out + bias


def copied_twin(module: nn.Module, name: str) -> nn.Module | None:
    """A linear layer on an 8-bit copy of `module`'s weight; None for what is no linear layer. For `replaced`.

    Raises SettingsError for experts, for a quantised linear layer, and for weights that are not finite.
    """
    from vllm.model_executor.layers.linear import LinearBase

    if has_experts(module):
        raise _unsupported("mixture-of-experts layers have no copies")
    return copied(module, name) if isinstance(module, LinearBase) else None


def copied(layer: Any, name: str) -> nn.Module:
    """`layer` on a copy of its weight, everything else shared."""
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or weight.dtype is not PLAIN:
        kind = type(getattr(layer, "quant_method", None)).__name__
        raise _unsupported(f"{name} ({type(layer).__name__}, {kind}) has no plain bfloat16 weight to copy")
    parameters = {key: value for key, value in layer._parameters.items() if key != "weight"}  # a bias is shared
    modules = {**layer._modules, "copy_of_weight": CopiedWeight(weight.detach())}
    return shallow(layer, _parameters=parameters, _modules=modules, quant_method=CopiedLinear())


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
