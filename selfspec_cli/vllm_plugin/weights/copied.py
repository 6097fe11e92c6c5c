"""The draft on copies of the target's weights, of any kind (early_exit/draft_weights).

The target's modules are left as they are: copies can only change which drafts are proposed. Of a mixture of experts the
router, and experts that every token passes through, stay the target's own; the copied experts are run by the same part
of vLLM, on the CPU from dequantised weights, on CUDA by the module of kernels of the kind.

Weights that are replaced in a live engine reach the copies: these, and rows of the lm_head that were gathered for a
draft vocabulary, are filled anew in place, because CUDA graphs hold their addresses. What was fitted to the old weights
(an exit head's file, copies that were made from data) cannot be; the log says so."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from selfspec_cli.early_exit.draft_weights.base import DraftWeights
from selfspec_cli.early_exit.fitted_weights import FittedWeights
from selfspec_cli.early_exit.resolved import ResolvedSettings
from selfspec_cli.vllm_plugin import vllm_names as vllm
from selfspec_cli.vllm_plugin.weights.shared import Make, shallow_copy, with_replaced
from selfspec_cli.vllm_plugin.wrap import Function, around


class Kernels(Protocol):
    """The module that `DraftWeights.kernels` names, imported only where the weights are on a CUDA device.
    COMPILE_SIZES: numbers of tokens for which a compiled trunk needs a graph of its own, because `linear` takes another
    path for them."""

    COMPILE_SIZES: tuple[int, ...]

    def prepare(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A copy (`DraftWeights.quantise`) as the kernels read it; called once a weight, at load, on the device.
        fused_step/models.py takes tensors called words and scales for `integers` copies: other layouts have others."""

    def linear(self, x: Tensor, tensors: Mapping[str, Tensor], bias: Tensor | None, weight: Tensor | None) -> Tensor:
        """x [n, in] -> [n, out] on what `prepare` returned, bias [out] included.
        weight: the target's own, [out, in], for numbers of tokens at which the copy saves no time; None where the
        target holds it in another form. Dynamo traces it once for any number of tokens, and CUDA graphs record it: what
        it calls must be registered as an operator of torch with a fake implementation."""

    def compile_for(self, tokens: int, tensors: Mapping[str, Tensor], bias: Tensor | None, dtype: torch.dtype) -> None:
        """Compile what `linear` launches for `tokens` tokens of `dtype`, from any thread, where that takes time."""

    def activation(self, module: nn.Module, name: str) -> nn.Module | None:
        """What stands in for a part of a layer that is an activation; None to leave it, and for all other parts."""

    def graph_pass(self) -> vllm.InductorPass | None:
        """A pass over the graphs of the compiled layers, before vLLM lowers operators of its own; None: no pass."""

    def experts(
        self, layer: Any, w13: Mapping[str, Tensor], w2: Mapping[str, Tensor], **activation: Any
    ) -> tuple[Any, Any, dict[str, Tensor]]:
        """vLLM's kernel for experts on copies (FusedMoEKernel), its FusedMoEQuantConfig, and the layer's parameters:
        what the kernel reads as "w13_weight" and "w2_weight", and all else that it holds. Called where
        `DraftWeights.experts` is true. layer: vLLM's RoutedExperts. w13, w2: copies of [experts, out, in], each tensor
        with the experts first. activation: arguments of the FusedMoEQuantConfig."""


def kernels_of(kind: DraftWeights, device: torch.device) -> Kernels | None:
    """The fast products of `kind` for weights on `device`, None where PyTorch multiplies by dequantised copies."""
    if kind.kernels is None or device.type != "cuda":
        return None
    return cast(Kernels, importlib.import_module(kind.kernels))


class CopiedWeight(nn.Module):
    """x [..., in] -> [n, out] on a copy of `weight` [out, in]. With kernels it keeps the tensors that these read.
    Without, PyTorch multiplies by the copy, dequantised to the weight's own dtype: the same drafts but for rounding, in
    the same time as the target's.
    shared: the target holds `weight` itself, so keeping it takes no memory."""

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


def on_copies(kind: DraftWeights, dtype: torch.dtype, fitted: FittedWeights | None = None) -> Make:
    """For `shared.replace_in_layers`: a linear layer on a copy of its weight, None for what is no linear layer.
    dtype: of the target's weights. fitted: copies of that kind, made from data, to take where it has one. What is made
    raises SettingsError for a weight that is not plain, of another dtype, or not finite. Experts:
    `on_copied_experts`."""

    def make(module: nn.Module, name: str) -> nn.Module | None:
        if not isinstance(module, vllm.LinearBase):
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
    layer has another form for each method. Both are read back: what the layer makes of the unit vectors."""
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
    rounded to one, where a 1 might be beyond the greatest value."""
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


SUFFIX = ".draft"  # of the name by which a forward pass finds the copy; the target's own has none


def on_copied_experts(kind: DraftWeights, vllm_config: vllm.VllmConfig) -> Make:
    """For `replace_in_layers`: a mixture of experts on copies of its experts' weights.
    What is made raises SettingsError for experts whose weights are not plain and of the model's dtype."""

    def runner(module: nn.Module, name: str) -> nn.Module | None:
        return _copied_runner(kind, module, name, vllm_config) if isinstance(module, vllm.MoERunner) else None

    def make(mixture: nn.Module, name: str) -> nn.Module:
        changed = with_replaced(mixture, runner, name=name)
        if changed is mixture:
            raise kind.impossible(f"the experts of {name} ({type(mixture).__name__}) are not run by vLLM's MoERunner")
        return changed

    return make


def found_by_name() -> bool:
    """Whether vLLM finds the experts of a layer by the layer's name; else by counting calls in a forward pass."""
    return bool(vllm.HAS_OPAQUE_TYPE and vllm.envs.VLLM_USE_LAYERNAME)


def _copied_runner(kind: DraftWeights, runner: Any, name: str, vllm_config: vllm.VllmConfig) -> nn.Module:
    """`runner` over experts on copies, under a name of its own; everything else is shared."""
    if not found_by_name():  # vLLM would count layers instead, and find the target's own experts
        raise kind.impossible(f"copies of experts need PyTorch 2.11, and this is {torch.__version__}")
    experts = _copied_experts(kind, runner.routed_experts, name, vllm_config)
    modules = {**runner._modules, "routed_experts": experts}
    copy = shallow_copy(runner, _modules=modules, layer_name=runner.layer_name + SUFFIX)
    vllm_config.compilation_config.static_forward_context[copy.layer_name] = copy
    return copy


def _copied_experts(kind: DraftWeights, experts: Any, name: str, vllm_config: vllm.VllmConfig) -> nn.Module:
    """`experts` (vLLM's RoutedExperts) on copies of its weights."""
    own = plain_experts(kind, experts, name)
    if own["w13_weight"].dtype is not vllm_config.model_config.dtype or experts.moe_config.has_bias:
        raise kind.impossible(f"the experts of {name} have biases, or weights of another dtype than the model's")
    # Scales lie along a row, so the rows of all experts are quantised as those of one weight.
    copies = {key: (weight.shape, kind.quantise(weight.flatten(0, 1))) for key, weight in own.items()}
    copy = shallow_copy(experts, _parameters=dict(experts._parameters), _modules=dict(experts._modules))
    kernels = kernels_of(kind, own["w13_weight"].device)
    if kernels is None:
        dtype = own["w13_weight"].dtype
        weights = {key: kind.dequantise(tensors, dtype).view(shape) for key, (shape, tensors) in copies.items()}
        with vllm.set_current_vllm_config(vllm_config):
            method = vllm.UnquantizedFusedMoEMethod(experts.moe_config)
        return _with_method(copy, method, weights)
    by_expert = {
        key: {part: tensor.view(shape[0], shape[1], -1) for part, tensor in tensors.items()}
        for key, (shape, tensors) in copies.items()
    }
    names = {"gemm1_alpha": "swiglu_alpha", "gemm1_beta": "swiglu_beta", "gemm1_clamp_limit": "swiglu_limit"}
    activation = {name: getattr(experts, own_name, None) for name, own_name in names.items()}
    kernel, config, tensors = kernels.experts(experts, by_expert["w13_weight"], by_expert["w2_weight"], **activation)
    return _with_method(copy, _method_of(experts, kernel, config), tensors)


def _method_of(experts: Any, kernel: Any, config: Any) -> Any:
    """A method for vLLM's layer that runs `kernel`."""

    class CopiedExperts(vllm.FusedMoEMethodBase):
        """Multiplies by the parameters of the layer that it is given, which are there already."""

        def create_weights(self, *args: Any, **kwargs: Any) -> None:
            """Asked for when a layer is made; this one is."""

        def get_fused_moe_quant_config(self, layer: Any) -> Any:
            return config

        def apply(
            self,
            layer: Any,
            x: Tensor,
            topk_weights: Tensor,
            topk_ids: Tensor,
            shared_experts: Any,
            shared_experts_input: Tensor | None,
        ) -> Any:
            return kernel.apply(
                hidden_states=x,
                w1=layer.w13_weight,
                w2=layer.w2_weight,
                topk_weights=topk_weights,
                topk_ids=topk_ids,
                activation=layer.activation,
                apply_router_weight_on_input=layer.apply_router_weight_on_input,
                global_num_experts=layer.global_num_experts,
                expert_map=layer.expert_map,
                shared_experts=shared_experts,
                shared_experts_input=shared_experts_input,
            )

    method = CopiedExperts(experts.moe_config)
    method.moe_kernel, method.moe_quant_config = kernel, config
    return method


def _with_method(experts: Any, method: Any, tensors: dict[str, Tensor]) -> nn.Module:
    """`experts` with these parameters and this `quant_method`, which brings them into the layout that it reads."""
    experts._modules.pop("quant_method", None)  # vLLM's own methods are modules
    experts.__dict__.pop("quant_method", None)
    experts.quant_method = method
    for name, tensor in tensors.items():
        experts._parameters[name] = nn.Parameter(tensor, requires_grad=False)
    method.process_weights_after_loading(experts)
    module: nn.Module = experts
    return module


def plain_experts(kind: DraftWeights, experts: Any, name: str) -> dict[str, Tensor]:
    """The weights of this rank's experts: "w13_weight" [experts, 2 * intermediate, hidden], gate above up, and
    "w2_weight" [experts, hidden, intermediate]. Raises SettingsError where vLLM holds them in another form."""
    method = experts.quant_method
    if type(method) is not vllm.UnquantizedFusedMoEMethod:
        raise kind.impossible(f"the experts of {name} are quantised ({type(method).__name__})")
    weights = {key: getattr(experts, key).detach() for key in ("w13_weight", "w2_weight")}
    backend = method.unquantized_backend.name
    if backend == "TRITON":
        return weights
    if backend != "CPU":
        raise kind.impossible(
            f"vLLM's backend {backend} keeps experts in a layout of its own; moe_backend='triton' has plain ones"
        )
    if vllm.is_zentorch_moe_supported(experts):
        return weights  # zentorch's kernels read them as they are
    kernel: Any = method.moe_kernel.fused_experts
    gate_and_up, down = (_unpacked_experts(weight, kernel.isa) for weight in weights.values())
    size = experts.moe_config.intermediate_size_per_partition  # the CPU's kernels pad it with zeros
    gate, up = gate_and_up.chunk(2, dim=1)
    return {"w13_weight": torch.cat([gate[:, :size], up[:, :size]], dim=1), "w2_weight": down[:, :, :size].contiguous()}


def _unpacked_experts(packed: Tensor, isa: str) -> Tensor:
    """What vLLM's CPU build packed, [experts, out, in]. Where it moved values is seen by packing the numbers of their
    places, a byte at a time, for bfloat16 holds no larger integers."""
    places = torch.arange(packed[0].numel()).view_as(packed[:1])
    source = torch.zeros_like(places)
    for shift in range(0, places.numel().bit_length(), 8):
        digits = vllm._custom_ops.cpu_prepack_moe_weight(((places >> shift) & 255).to(packed.dtype), isa)
        source += digits.long() << shift
    plain = torch.empty_like(packed)
    plain.flatten(1)[:, source.flatten()] = packed.flatten(1)
    return plain


@around
def after_new_weights(original: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Override of the methods of vLLM's `Worker` after which a live model has other weights."""
    answer = original(self, *args, **kwargs)
    runner = self.model_runner
    drafter: Any = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
    if hasattr(drafter, "renew"):
        drafter.renew()
    return answer


@around
def keep_weights_asleep(original: Function, self: Any, level: int = 1, *args: Any, **kwargs: Any) -> Any:
    """Override of `sleep` of vLLM's `Worker`: with drafts of ours, level 2, which drops all that was allocated while
    the model was loaded, is level 1, which keeps it on the host. New weights bring copies back, but nothing else: an
    exit head, token ids, the layout of a kernel, counters that kernels leave at zero."""
    if level == 2 and hasattr(getattr(self.model_runner, "speculator", None), "renew"):
        logging.getLogger("vllm.selfspec").warning(
            "sleep at level 2 keeps weights on the host, as level 1 does: early exit has more than weights to keep"
        )
        level = 1
    return original(self, level, *args, **kwargs)


class Watch:
    """Whether weights were loaded into a live model past vLLM's own methods: trainers call the model's `load_weights`,
    some of them many times for one set of weights, so what follows from it waits for the next round."""

    def __init__(self, model: nn.Module) -> None:
        self.stale = False
        load: Function = model.load_weights  # type: ignore[assignment]

        def load_weights(*args: Any, **kwargs: Any) -> Any:
            self.stale = True
            return load(*args, **kwargs)

        model.load_weights = load_weights  # type: ignore[assignment]


@torch.inference_mode()
def renew(trunk: nn.Module, head: Any, settings: ResolvedSettings, vllm_config: vllm.VllmConfig) -> None:
    """Fill every copy in a draft's layers and its head from the target's weights of now, one layer at a time."""
    layers: tuple[nn.Module, ...] = trunk.drafting_layers  # type: ignore[assignment]
    by_name = vllm_config.compilation_config.static_forward_context
    known = dict(by_name)
    if settings.draft_weights_path is None:
        for place, layer in enumerate(layers):
            refill(layer, trunk.remade_layer(place))  # type: ignore[operator]
            by_name.update(known)  # copies of experts are found by name in a forward pass: those that draft
    head.renew()
    paths = {"head_path": settings.head.path, "draft_weights_path": settings.draft_weights_path}
    fitted = [name for name, path in paths.items() if path is not None]
    if fitted:
        logging.getLogger("vllm.selfspec").warning(
            "the model has new weights, and %s was fitted to the old ones: drafts may be accepted less often, the "
            "output stays the model's own",
            " and ".join(fitted),
        )


def refill(old: nn.Module, new: nn.Module) -> None:
    """Copy every tensor of `new` into the one of the same name in `old`, but those that they share."""
    made = dict(new.named_modules())
    for name, part in old.named_modules():
        other = made[name]
        if other is part:
            continue
        for tensors, others in ((part._parameters, other._parameters), (part._buffers, other._buffers)):
            for key, tensor in others.items():
                mine = tensors.get(key)
                if tensor is None or mine is None or mine is tensor:
                    continue
                mine.data.copy_(tensor.data)
