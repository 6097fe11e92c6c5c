"""The draft model: the target's own decoder, cut after E layers. No weight is copied, but on request (`draft_weights`:
weights/copied.py), and no architecture is named.

More than sixty of vLLM's decoders loop over `islice(self.layers, self.start_layer, self.end_layer)`, because pipeline
parallelism needs it. A second view of the same module whose `end_layer` is E is therefore the first E layers plus the
final norm. Attention layers find their KV cache by name, so the view shares that too. On CUDA its linear layers
multiply by their weights in a way of their own (weights/linear.py).
"""

from __future__ import annotations

import copy
import types
from typing import TYPE_CHECKING, Any

from torch import nn

from selfspec_cli.early_exit.draft_weights import DRAFT_WEIGHTS
from selfspec_cli.vllm_plugin.weights.copied import kernels_of, on_copies
from selfspec_cli.vllm_plugin.weights.experts import on_copied_experts
from selfspec_cli.vllm_plugin.weights.linear import on_own_weight
from selfspec_cli.vllm_plugin.weights.replace import Make, replace_in_layers

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def cut(decoder: nn.Module, layers: int) -> None:
    """Make `decoder` itself end after its first `layers` layers (method `skip`). Call before its first forward."""
    decoder.end_layer = layers  # type: ignore[assignment]


def first_layers(decoder: nn.Module, layers: int, vllm_config: VllmConfig, draft_weights: str = "shared") -> nn.Module:
    """A module over `decoder`'s own parameters that runs its first `layers` layers and the final norm.

    Call it as `trunk(input_ids [n], positions [n], None)` -> normed hidden states [n, hidden]. Where vLLM compiles the
    target in its own mode the trunk is compiled too, as a function of its own. draft_weights: a kind that makes copies
    (early_exit/draft_weights) puts them in place of the linear weights of those layers; raises SettingsError where
    there can be none.
    """
    trunk = _view(decoder, layers, draft_weights)
    cut(trunk, layers)
    # The view shares the dict of submodules with the target, which must keep its own layers.
    make, experts = _replacements(draft_weights, vllm_config)
    changed = replace_in_layers(decoder.layers, layers, vllm_config, make, experts)  # type: ignore[arg-type]
    trunk.__dict__["_modules"] = {**decoder._modules, "layers": changed}
    if hasattr(trunk, "aux_hidden_state_layers"):
        trunk.aux_hidden_state_layers = ()  # type: ignore[assignment]
    if not getattr(trunk, "do_not_compile", True):
        _compile_anew(trunk, layers, vllm_config, draft_weights)
    return trunk


def _replacements(draft_weights: str, vllm_config: VllmConfig) -> tuple[Make, Make | None]:
    """What makes the linear layers, and the mixtures of experts (None: they stay the target's)."""
    kind = DRAFT_WEIGHTS[draft_weights]
    if not kind.copies:
        return on_own_weight, None
    return on_copies(kind, vllm_config.model_config.dtype), on_copied_experts(kind, vllm_config)


def _view(decoder: nn.Module, layers: int, draft_weights: str) -> nn.Module:
    """A shallow copy (same parameters, same submodules) of a subclass whose `forward` is a function of its own.

    Dynamo keeps compiled code by code object and vLLM drops all guards; one code object for two depths would run
    whichever was compiled first. The name enters vLLM's cache key, so depths do not share an artifact on disk either.
    """
    base: Any = type(decoder)
    forward = base.forward
    name = f"{forward.__name__}_{_tag(layers, draft_weights)}"
    code = forward.__code__.replace(co_name=name, co_qualname=f"{base.__qualname__}.{name}")
    own = types.FunctionType(code, forward.__globals__, name, forward.__defaults__, forward.__closure__)
    own.__kwdefaults__, own.__annotations__ = forward.__kwdefaults__, dict(forward.__annotations__)
    members = {"forward": own, "__module__": base.__module__}
    view_class = type(f"{base.__name__}First{layers}Layers", (base,), members)
    view: nn.Module = object.__new__(view_class)
    view.__dict__.update(decoder.__dict__)
    return view


def _tag(layers: int, draft_weights: str) -> str:
    return f"first_{layers}_layers" + (f"_{draft_weights}" if DRAFT_WEIGHTS[draft_weights].copies else "")


def _compile_anew(trunk: nn.Module, layers: int, vllm_config: VllmConfig, draft_weights: str) -> None:
    """Give the view its own torch.compile wrapper instead of the target's."""
    from vllm.compilation.backends import set_model_tag
    from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper
    from vllm.config import set_current_vllm_config

    config = copy.copy(vllm_config)
    # Two depths of one model, or two kinds of weights, must not share an artifact in vLLM's compile cache.
    tag = _tag(layers, draft_weights)
    config.additional_config = {**vllm_config.additional_config, "selfspec_trunk": tag}
    kernels = kernels_of(DRAFT_WEIGHTS[draft_weights], next(trunk.parameters()).device)
    if kernels is not None:
        config.compilation_config = compilation = copy.copy(vllm_config.compilation_config)
        compilation.compile_sizes = sorted({*kernels.COMPILE_SIZES, *(compilation.compile_sizes or ())})
    state: dict[str, Any] = trunk.__dict__
    state.update(compiled=False, aot_compiled_fn=None, was_aot_compile_fn_loaded_from_disk=False, _compile_tag=tag)
    with set_model_tag(tag), set_current_vllm_config(config):
        TorchCompileWithNoGuardsWrapper.__init__(trunk)


def attention_names(trunk: nn.Module, vllm_config: VllmConfig, layers: int) -> set[str]:
    """Names, as the KV cache knows them, of the attention modules in the first `layers` layers."""
    modules = {id(module) for layer in trunk.layers[:layers] for module in layer.modules()}  # type: ignore[index]
    context = vllm_config.compilation_config.static_forward_context
    return {name for name, module in context.items() if id(module) in modules}
