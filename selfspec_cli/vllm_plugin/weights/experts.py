"""The draft on copies of experts' weights (early_exit/draft_weights), in vLLM's own mixture-of-experts layers.

A layer's router, and experts that every token passes through, stay the target's own. The copied experts are run by the
same part of vLLM as the target's: on the CPU from dequantised weights, on CUDA by the module of kernels of the kind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from selfspec_cli.early_exit.draft_weights.base import DraftWeights
from selfspec_cli.vllm_plugin.weights.copied import kernels_of
from selfspec_cli.vllm_plugin.weights.replace import Make, shallow_copy, with_replaced

if TYPE_CHECKING:
    from selfspec_cli.vllm_plugin.vllm_names import VllmConfig

SUFFIX = ".draft"  # of the name by which a forward pass finds the copy; the target's own has none


def on_copied_experts(kind: DraftWeights, vllm_config: VllmConfig) -> Make:
    """For `replace_in_layers`: a mixture of experts on copies of its experts' weights.

    What is made raises SettingsError for experts whose weights are not plain and of the model's dtype.
    """
    from selfspec_cli.vllm_plugin.vllm_names import MoERunner

    def runner(module: nn.Module, name: str) -> nn.Module | None:
        return _copied(kind, module, name, vllm_config) if isinstance(module, MoERunner) else None

    def make(mixture: nn.Module, name: str) -> nn.Module:
        changed = with_replaced(mixture, runner, name=name)
        if changed is mixture:
            raise kind.impossible(f"the experts of {name} ({type(mixture).__name__}) are not run by vLLM's MoERunner")
        return changed

    return make


def found_by_name() -> bool:
    """Whether vLLM finds the experts of a layer by the layer's name; else by counting calls in a forward pass."""
    from selfspec_cli.vllm_plugin.vllm_names import HAS_OPAQUE_TYPE, envs

    return bool(HAS_OPAQUE_TYPE and envs.VLLM_USE_LAYERNAME)


def _copied(kind: DraftWeights, runner: Any, name: str, vllm_config: VllmConfig) -> nn.Module:
    """`runner` over experts on copies, under a name of its own; everything else is shared."""
    if not found_by_name():  # vLLM would count layers instead, and find the target's own experts
        raise kind.impossible(f"copies of experts need PyTorch 2.11, and this is {torch.__version__}")
    experts = _copied_experts(kind, runner.routed_experts, name, vllm_config)
    modules = {**runner._modules, "routed_experts": experts}
    copy = shallow_copy(runner, _modules=modules, layer_name=runner.layer_name + SUFFIX)
    vllm_config.compilation_config.static_forward_context[copy.layer_name] = copy
    return copy


def _copied_experts(kind: DraftWeights, experts: Any, name: str, vllm_config: VllmConfig) -> nn.Module:
    """`experts` (vLLM's RoutedExperts) on copies of its weights."""
    from selfspec_cli.vllm_plugin.vllm_names import UnquantizedFusedMoEMethod, set_current_vllm_config

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
        with set_current_vllm_config(vllm_config):
            method = UnquantizedFusedMoEMethod(experts.moe_config)
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
    from selfspec_cli.vllm_plugin.vllm_names import FusedMoEMethodBase

    class CopiedExperts(FusedMoEMethodBase):
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


# ---- the target's own weights ---------------------------------------------------------------------------------------


def plain_experts(kind: DraftWeights, experts: Any, name: str) -> dict[str, Tensor]:
    """The weights of this rank's experts: "w13_weight" [experts, 2 * intermediate, hidden], gate above up, and
    "w2_weight" [experts, hidden, intermediate]. Raises SettingsError where vLLM holds them in another form.
    """
    from selfspec_cli.vllm_plugin.vllm_names import UnquantizedFusedMoEMethod, is_zentorch_moe_supported

    method = experts.quant_method
    if type(method) is not UnquantizedFusedMoEMethod:
        raise kind.impossible(f"the experts of {name} are quantised ({type(method).__name__})")
    weights = {key: getattr(experts, key).detach() for key in ("w13_weight", "w2_weight")}
    backend = method.unquantized_backend.name
    if backend == "TRITON":
        return weights
    if backend != "CPU":
        raise kind.impossible(
            f"vLLM's backend {backend} keeps experts in a layout of its own; moe_backend='triton' has plain ones"
        )
    if is_zentorch_moe_supported(experts):
        return weights  # zentorch's kernels read them as they are
    kernel: Any = method.moe_kernel.fused_experts
    gate_and_up, down = (_unpacked(weight, kernel.isa) for weight in weights.values())
    size = experts.moe_config.intermediate_size_per_partition  # the CPU's kernels pad it with zeros
    gate, up = gate_and_up.chunk(2, dim=1)
    return {
        "w13_weight": torch.cat([gate[:, :size], up[:, :size]], dim=1),
        "w2_weight": down[:, :, :size].contiguous(),
    }


def _unpacked(packed: Tensor, isa: str) -> Tensor:
    """What vLLM's CPU build packed, [experts, out, in].

    Packing moves values and changes none, in each expert alike. Where it moves them is seen by packing the numbers of
    their places, a byte at a time, for bfloat16 holds no larger integers.
    """
    from selfspec_cli.vllm_plugin.vllm_names import _custom_ops as ops

    places = torch.arange(packed[0].numel()).view_as(packed[:1])
    source = torch.zeros_like(places)
    for shift in range(0, places.numel().bit_length(), 8):
        digits = ops.cpu_prepack_moe_weight(((places >> shift) & 255).to(packed.dtype), isa)
        source += digits.long() << shift
    plain = torch.empty_like(packed)
    plain.flatten(1)[:, source.flatten()] = packed.flatten(1)
    return plain
