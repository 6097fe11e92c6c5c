"""The draft on copies of the target's weights, of any kind (early_exit/draft_weights).

The target's modules are left as they are, so the verify pass, which decides on every token, runs on its own weights;
copies can only change which drafts are proposed. Weights that are loaded anew into a live engine reach the copies by
renewed.py.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from selfspec_cli.early_exit.draft_weights.base import DraftWeights, WeightFacts
from selfspec_cli.vllm_plugin.weights.replace import Make, shallow_copy

if TYPE_CHECKING:
    from selfspec_cli.early_exit.fitted_weights import FittedWeights
    from selfspec_cli.vllm_plugin.vllm_names import InductorPass, ModelConfig, ParallelConfig


class Kernels(Protocol):
    """The module that `DraftWeights.kernels` names. It is imported where the weights are on a CUDA device, only there.

    COMPILE_SIZES: numbers of tokens for which a compiled trunk needs a graph of its own, because `linear` takes another
    path for them.
    """

    COMPILE_SIZES: tuple[int, ...]

    def prepare(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A copy (`DraftWeights.quantise`) as the kernels read it; called once a weight, at load, on the device."""

    def linear(self, x: Tensor, tensors: Mapping[str, Tensor], bias: Tensor | None, weight: Tensor | None) -> Tensor:
        """x [n, in] -> [n, out] on what `prepare` returned, bias [out] included.

        weight: the target's own, [out, in], for numbers of tokens at which the copy saves no time; None where the
        target holds it in another form.

        Dynamo traces it once for any number of tokens, and CUDA graphs record it: what it calls must be registered as
        an operator of torch with a fake implementation.
        """

    def compile_for(self, tokens: int, tensors: Mapping[str, Tensor], bias: Tensor | None, dtype: torch.dtype) -> None:
        """Compile what `linear` launches for `tokens` tokens of `dtype`, from any thread; where that takes no time, or
        happens elsewhere, do nothing."""

    def activation(self, module: nn.Module, name: str) -> nn.Module | None:
        """What stands in for a part of a layer that is an activation; None to leave it, and for all other parts."""

    def graph_pass(self) -> InductorPass | None:
        """A pass over the graphs of the compiled layers, before vLLM lowers operators of its own; None: no pass."""

    def experts(
        self, layer: Any, w13: Mapping[str, Tensor], w2: Mapping[str, Tensor], **activation: Any
    ) -> tuple[Any, Any, dict[str, Tensor]]:
        """vLLM's kernel for experts on copies (FusedMoEKernel), its FusedMoEQuantConfig, and the layer's parameters:
        what the kernel reads as "w13_weight" and "w2_weight", and all else that it holds.

        layer: vLLM's RoutedExperts. w13, w2: copies of [experts, out, in], each tensor with the experts first.
        activation: arguments of the FusedMoEQuantConfig. Called only if `DraftWeights.experts` says that there are such
        kernels.
        """


def kernels_of(kind: DraftWeights, device: torch.device) -> Kernels | None:
    """The fast products of `kind` for weights on `device`, None where PyTorch multiplies by dequantised copies."""
    if kind.kernels is None or device.type != "cuda":
        return None
    return cast(Kernels, importlib.import_module(kind.kernels))


def facts_of(target: ModelConfig, parallel: ParallelConfig) -> WeightFacts:
    """What `DraftWeights.reason_against` asks of the target that vLLM has configured, and of this machine."""
    from selfspec_cli.vllm_plugin.vllm_names import current_platform

    capability = current_platform.get_device_capability() if current_platform.is_cuda() else None
    return WeightFacts(
        device="cuda" if current_platform.is_cuda() else "cpu",
        dtype=str(target.dtype).removeprefix("torch."),
        quantization=target.quantization or "",
        is_moe=target.is_moe,
        expert_parallel=bool(parallel.enable_expert_parallel),
        row_lengths=_row_lengths(target, parallel),
        capability=None if capability is None else (capability.major, capability.minor),
        device_name=current_platform.device_name,
    )


def _row_lengths(target: ModelConfig, parallel: ParallelConfig) -> tuple[int, ...]:
    """Lengths of a rank's rows of weights that every layer has, as far as the config names them."""
    config, ranks = target.hf_text_config, parallel.tensor_parallel_size
    intermediate = None if target.is_moe else getattr(config, "intermediate_size", None)
    return (int(target.get_hidden_size()), *([] if not isinstance(intermediate, int) else [intermediate // ranks]))


# ---- modules ------------------------------------------------------------------------------------------------------


class CopiedWeight(nn.Module):
    """x [..., in] -> [n, out] on a copy of `weight` [out, in].

    With kernels it keeps the tensors that these read. Without, the copy is dequantised once, to the weight's own dtype,
    which PyTorch multiplies by: that drafts the same tokens but for rounding, and saves no time.

    shared: the target holds `weight` itself, so keeping it takes no memory.
    """

    def __init__(self, kind: DraftWeights, weight: Tensor, shared: bool = True) -> None:
        super().__init__()
        copy = kind.quantise(weight)
        self._kernels = kernels_of(kind, weight.device)
        if self._kernels is None:
            tensors = {"weight": kind.dequantise(copy, weight.dtype)}
        else:
            tensors = self._kernels.prepare(copy)
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        self._names, self._dtype = tuple(tensors), weight.dtype
        # No parameter: a draft step of a few tokens does not read it, and the target counts it.
        self._weight = None if self._kernels is None or not shared else weight

    def compile_for(self, tokens: int, bias: Tensor | None) -> None:
        """See `Kernels.compile_for`; nothing without kernels."""
        if self._kernels is not None:
            self._kernels.compile_for(tokens, self._tensors(), bias, self._dtype)

    def _tensors(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in self._names}

    def read_by_a_step(self) -> list[Tensor]:
        """What one step multiplies by."""
        return list(self._tensors().values())

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        x, tensors = x.reshape(-1, x.shape[-1]), self._tensors()
        if self._kernels is None:
            return F.linear(x, tensors["weight"], bias)
        return self._kernels.linear(x, tensors, bias, self._weight)


class CopiedLinear:
    """The `quant_method` of a linear layer that multiplies by its copy; vLLM's layers ask nothing else of it."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., in] -> [..., out]; models of Hugging Face's have a dimension before the tokens'."""
        out: Tensor = layer.copy_of_weight(x, bias)
        return out.view(*x.shape[:-1], out.shape[-1])


# ---- replacements for the target's linear layers --------------------------------------------------------------------


def on_copies(kind: DraftWeights, dtype: torch.dtype, fitted: FittedWeights | None = None) -> Make:
    """For `replace.replace_in_layers`: a linear layer on a copy of its weight, None for what is no linear layer.

    dtype: of the target's weights. fitted: copies of that kind, made from data, to take where it has one. What is made
    raises SettingsError for a linear layer whose weight is not plain and of that dtype, and for weights that are not
    finite. Experts: experts.py.
    """
    from selfspec_cli.vllm_plugin.vllm_names import LinearBase

    def make(module: nn.Module, name: str) -> nn.Module | None:
        if not isinstance(module, LinearBase):
            return None
        stored = fitted.kind_of(name) if fitted is not None and name in fitted.copies else kind
        return copied(stored, dtype, module, name)

    return make


def copied(kind: DraftWeights, dtype: torch.dtype, layer: Any, name: str) -> nn.Module:
    """`layer` on a copy of its weight, everything else shared."""
    weight = plain_weight(layer)
    if weight is None or weight.dtype is not dtype:
        method = type(getattr(layer, "quant_method", None)).__name__
        wanted = str(dtype).removeprefix("torch.")
        raise kind.impossible(f"{name} ({type(layer).__name__}, {method}) has no plain {wanted} weight to copy")
    parameters = {key: value for key, value in layer._parameters.items() if key != "weight"}  # a bias is shared
    own = getattr(layer, "weight", None)
    shared = isinstance(own, Tensor) and own.data_ptr() == weight.data_ptr()
    modules = {**layer._modules, "copy_of_weight": CopiedWeight(kind, weight, shared)}
    return shallow_copy(layer, _parameters=parameters, _modules=modules, quant_method=CopiedLinear())


def plain_weight(layer: Any) -> Tensor | None:
    """The weight [out, in] that a linear layer multiplies by; None for one of which it cannot be had.

    vLLM's CPU build packs linear weights into buffers of its kernels' own and empties the parameter, and a quantised
    layer has another form for each method. Both are read back: what the layer makes of the unit vectors.
    """
    weight, method = getattr(layer, "weight", None), getattr(layer, "quant_method", None)
    if isinstance(weight, Tensor) and weight.dtype in (torch.float32, torch.float16, torch.bfloat16):
        if weight.numel() or not hasattr(layer, "cpu_linear"):
            return weight.detach() if weight.dim() == 2 else None
        return _unpacked(layer, weight.dtype)
    dtype = getattr(layer, "params_dtype", None)
    return None if method is None or dtype is None else _unpacked(layer, dtype)


UNIT_VECTORS = 512  # multiplied at once, so that they take little memory compared with the weight


@torch.inference_mode()
def _unpacked(layer: Any, dtype: torch.dtype) -> Tensor:
    """What vLLM packed, [out, in]: exact but for rounding to `dtype`, because every sum has one term that is not zero.

    A layer that rounds its tokens by a scale from the checkpoint (static fp8) takes that scale in place of ones: it is
    rounded to one, where a 1 might be beyond the greatest value.
    """
    columns, parts = int(layer.input_size_per_partition), []
    device = next(layer.parameters()).device
    scale = getattr(layer, "input_scale", None)
    one = float(scale.max()) if isinstance(scale, Tensor) and scale.numel() else 1.0
    for start in range(0, columns, UNIT_VECTORS):
        count = min(UNIT_VECTORS, columns - start)
        units = torch.zeros(count, columns, dtype=dtype, device=device)
        units[torch.arange(count), torch.arange(start, start + count)] = one
        parts.append(layer.quant_method.apply(layer, units, None) / one)
    return torch.cat(parts).t().contiguous()
