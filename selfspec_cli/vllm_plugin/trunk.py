"""The draft model: the target itself, whose decoder is cut after E layers. No weight is copied, but on request
(`draft_weights`: weights/copied.py), and no architecture is named.

The view is of the whole causal LM, so whatever stands between decoder and logits (MiniCPM divides there) is the
target's. Inside it the decoder (decoder.py says where) has a list of layers of its own, so some of them can be left
out, and its loop ends after those that draft. Attention layers find their KV cache by name, so the view shares that
too, and a layer that is left out has its keys and values written by the next verify pass, as every layer has. On CUDA
the view's linear layers multiply by their weights in a way of their own (weights/shared.py), and its attention is one
kernel (attention/)."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from selfspec_cli.early_exit.draft_weights import DRAFT_WEIGHTS
from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.early_exit.fitted_weights import FittedWeights
from selfspec_cli.early_exit.resolved import ResolvedSettings
from selfspec_cli.early_exit.view import as_text, drafting_layers
from selfspec_cli.vllm_plugin import compile_cache
from selfspec_cli.vllm_plugin import vllm_names as vllm
from selfspec_cli.vllm_plugin.attention.drafting import OPERATOR, on_one_query
from selfspec_cli.vllm_plugin.decoder import has_experts, place_of
from selfspec_cli.vllm_plugin.exit_head import load_exit_head
from selfspec_cli.vllm_plugin.spec_config import collects, settings_of
from selfspec_cli.vllm_plugin.weights.copied import Kernels, found_by_name, kernels_of, on_copied_experts, on_copies
from selfspec_cli.vllm_plugin.weights.shared import (
    Make,
    multiplies_with_pytorch,
    on_own_weight,
    replace_in_layers,
    shallow_copy,
)
from selfspec_cli.vllm_plugin.wrap import around


def first_layers(
    model: nn.Module,
    layers: int,
    vllm_config: vllm.VllmConfig,
    draft_weights: str = "shared",
    skipped: Sequence[int] = (),
    fitted: FittedWeights | None = None,
    compiled: bool = True,
) -> nn.Module:
    """A module over the parameters of `model` that runs its first `layers` layers but `skipped`, and all after them.
    Called as `trunk(input_ids [n], positions [n], intermediate_tensors=None)` it gives hidden states [n, hidden], as
    `compute_logits` takes them. Its `drafting_layers` are those that it runs, in its `drafting_decoder`;
    `remade_layer(i)` makes number i of them anew (`layer_maker`). Where vLLM compiles the target, the trunk is compiled
    as a function of its own, and a target that is not compiled yet gets the key of a plain engine (compile_cache.py).
    draft_weights: a kind that makes copies puts them in place of the linear weights of those layers; raises
    SettingsError where there can be none. fitted: copies that were made from data, to take instead. compiled: False
    for a trunk that hardly runs, which a start then does not wait for."""
    place = place_of(model)
    compile_cache.share_with_plain(place.modules, vllm_config)
    own, chosen = place.layers, drafting_layers(layers, skipped)
    if skipped:
        _refuse_experts_by_order(place.decoder, vllm_config)
    tag = _tag(layers, draft_weights, skipped)
    kernels = kernels_of(DRAFT_WEIGHTS[draft_weights], _device_of(place.decoder))
    remade_layer = layer_maker(model, layers, vllm_config, draft_weights, skipped, fitted)
    changed = [remade_layer(place) for place in range(len(chosen))]
    # A view shares the dict of submodules with the target, which must keep its own layers.
    rest = list(own)[layers:] if place.ends_at_end_layer else []
    trunk = decoder = _view(place.decoder, tag)
    parts = {name: nn.ModuleList([*changed, *rest]) if part is own else part for name, part in trunk._modules.items()}
    trunk.__dict__["_modules"] = parts
    state: dict[str, Any] = trunk.__dict__
    if place.ends_at_end_layer:
        state["end_layer"] = len(chosen)
    elif kinds := getattr(getattr(trunk, "config", None), "layer_types", None):
        state["config"] = copy.copy(trunk.config)  # a model of Hugging Face's asks it for the kind of layer number i
        state["config"].layer_types = [kinds[i] for i in chosen]
    if "aux_hidden_state_layers" in state:
        state["aux_hidden_state_layers"] = ()
    outwards = place.modules[::-1]
    for inner, outer in zip([None, *outwards], outwards, strict=False):
        if inner is not None:
            trunk = _with_child(outer, inner, trunk, tag)
        if not getattr(trunk, "do_not_compile", True):
            if compiled:
                _compile_anew(trunk, tag, vllm_config, kernels)
            else:
                trunk.__dict__["do_not_compile"] = True
    trunk.__dict__.update(drafting_layers=tuple(changed), drafting_decoder=decoder, remade_layer=remade_layer)
    return trunk


def layer_maker(
    model: nn.Module,
    layers: int,
    vllm_config: vllm.VllmConfig,
    draft_weights: str = "shared",
    skipped: Sequence[int] = (),
    fitted: FittedWeights | None = None,
) -> Callable[[int], nn.Module]:
    """What makes number i of the layers that draft, from the weights that the target has then. See `first_layers`."""
    place, chosen = place_of(model), drafting_layers(layers, skipped)
    device = _device_of(place.decoder)
    make, experts = _replacements(draft_weights, vllm_config, fitted, kernels_of(DRAFT_WEIGHTS[draft_weights], device))
    attention = on_one_query(vllm_config, device)

    def made_layer(number: int) -> nn.Module:
        return replace_in_layers(place.layers, [chosen[number]], vllm_config, make, experts, attention)[0]

    return made_layer


def _device_of(module: nn.Module) -> torch.device:
    return next(module.parameters()).device


def _with_child(module: nn.Module, child: nn.Module, other: nn.Module, tag: str) -> nn.Module:
    """`module` with `other` in the place of its part `child`: a view where it is compiled, else a shallow copy."""
    parts = {name: other if part is child else part for name, part in module._modules.items()}
    if getattr(module, "do_not_compile", True):
        return shallow_copy(module, _modules=parts)
    view = _view(module, tag)
    view.__dict__["_modules"] = parts
    return view


def _refuse_experts_by_order(decoder: nn.Module, vllm_config: vllm.VllmConfig) -> None:
    """Raises SettingsError where vLLM finds experts by the order in which layers ask, which a subset would break."""
    if has_experts(decoder) and not found_by_name() and vllm_config.compilation_config.fast_moe_cold_start:
        raise SettingsError(
            "skip_layers is not supported for this mixture of experts: vLLM finds the experts of a layer by counting "
            "calls here; allowed: no skip_layers, or compilation_config={'fast_moe_cold_start': False}"
        )


def _replacements(
    draft_weights: str, vllm_config: vllm.VllmConfig, fitted: FittedWeights | None, kernels: Kernels | None
) -> tuple[Make, Make | None]:
    """What makes the linear layers and activations, and the mixtures of experts (None: they stay the target's)."""
    kind, dtype = DRAFT_WEIGHTS[draft_weights], vllm_config.model_config.dtype
    if not kind.copies:
        return on_own_weight if multiplies_with_pytorch(vllm_config) else lambda module, name: None, None
    linear = on_copies(kind, dtype, fitted)
    experts = on_copied_experts(kind, vllm_config)
    if kernels is None:
        return linear, experts
    return lambda module, name: linear(module, name) or kernels.activation(module, name), experts


def _view(decoder: nn.Module, tag: str) -> nn.Module:
    """A shallow copy (same parameters, same submodules) of a subclass whose `forward` is a function of its own. Dynamo
    keeps compiled code by code object and vLLM drops all guards; one code object for two depths would run whichever was
    compiled first. The name enters vLLM's cache key, so depths do not share an artifact on disk either."""
    base: Any = type(decoder)
    forward = base.forward
    name = f"{forward.__name__}_{tag}"
    code = forward.__code__.replace(co_name=name, co_qualname=f"{base.__qualname__}.{name}")
    own = types.FunctionType(code, forward.__globals__, name, forward.__defaults__, forward.__closure__)
    own.__kwdefaults__, own.__annotations__ = forward.__kwdefaults__, dict(forward.__annotations__)
    own.__dict__.update(forward.__dict__)  # what a decorated one wraps has the names of its arguments
    members = {"forward": own, "__module__": base.__module__}
    view_class = type(f"{base.__name__}_{tag}", (base,), members)
    view: nn.Module = object.__new__(view_class)
    view.__dict__.update(decoder.__dict__)
    return view


def _tag(layers: int, draft_weights: str, skipped: Sequence[int]) -> str:
    """A Python name that tells views apart."""
    without = "_without_" + (as_text(skipped) or "").replace("-", "to").replace(",", "_") if skipped else ""
    return f"first_{layers}_layers{without}" + (f"_{draft_weights}" if DRAFT_WEIGHTS[draft_weights].copies else "")


def _compile_anew(trunk: nn.Module, tag: str, vllm_config: vllm.VllmConfig, kernels: Kernels | None) -> None:
    """Give the view its own torch.compile wrapper instead of the target's."""
    config = compile_cache.as_plain(vllm_config)
    # Two views of one model must not share an artifact in vLLM's compile cache.
    config.additional_config = {**vllm_config.additional_config, "selfspec_trunk": tag}
    compilation = config.compilation_config
    if compilation.splitting_ops:  # vLLM cuts a model at attention, so that equal layers are compiled once
        compilation.splitting_ops = [*compilation.splitting_ops, OPERATOR]
    if kernels is not None:
        compilation.compile_sizes = sorted({*kernels.COMPILE_SIZES, *(compilation.compile_sizes or ())})
        _add_pass(compilation, kernels.graph_pass())
    state: dict[str, Any] = trunk.__dict__
    state.update(compiled=False, aot_compiled_fn=None, was_aot_compile_fn_loaded_from_disk=False)
    state.update(vllm_config=config, compilation_config=compilation)  # by these an artifact on disk is found again
    with vllm.set_current_vllm_config(config):
        vllm.TorchCompileWithNoGuardsWrapper.__init__(trunk, compile_prefix=tag)


def _add_pass(compilation: vllm.CompilationConfig, added: vllm.InductorPass | None) -> None:
    """Have the graphs go through `added`, unless the user has given vLLM a pass: it takes one."""
    options = compilation.inductor_compile_config
    if added is not None and vllm.current_platform.pass_key not in options:
        compilation.inductor_compile_config = {**options, vllm.current_platform.pass_key: added}


def attention_names(trunk: nn.Module, vllm_config: vllm.VllmConfig) -> set[str]:
    """Names, as the KV cache knows them, of the attention modules in the layers that `trunk` runs."""
    layers: tuple[nn.Module, ...] = trunk.drafting_layers  # type: ignore[assignment]
    modules = {id(module) for layer in layers for module in layer.modules()}
    context = vllm_config.compilation_config.static_forward_context
    return {name for name, module in context.items() if id(module) in modules}


# ---- what is done to a target right after it is loaded ---------------------------------------------------------------


@around
def after_loading(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Override of a model runner's `load_model`: cut the target (method `skip`), or tap it (to fit exit heads)."""
    original(self, *args, **kwargs)
    settings, layers = settings_of(self.vllm_config), collects(self.vllm_config)
    if settings is not None and not settings.verify:
        _decode_with_first_layers(self.get_model(), settings, self.vllm_config)
    if layers:
        from selfspec_cli.vllm_plugin.fitting import Tap

        Tap(self.get_model(), layers)


def _decode_with_first_layers(model: nn.Module, settings: ResolvedSettings, vllm_config: vllm.VllmConfig) -> None:
    """Method `skip`: the model itself ends after E layers and speaks through the exit head. Lossy. Every path to the
    logits goes through `compute_logits`, so prompt log-probabilities (perplexity) are the truncated model's own too."""
    head = load_exit_head(settings, model, vllm_config)
    place = place_of(model)
    if place.ends_at_end_layer:
        place.decoder.end_layer = settings.layer  # type: ignore[assignment]
    else:
        setattr(place.decoder, place.name, nn.ModuleList(list(place.layers)[: settings.layer]))

    def compute_logits(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return head.to_full_logits(head.logits(hidden_states))

    model.compute_logits = compute_logits  # type: ignore[assignment]


class DraftPositions:
    """What positions of draft steps are to the model: as they are, or moved and once for each dimension.
    shifts: int64 [most], what each request of a round is moved by; CUDA graphs read it, so it is filled in place."""

    def __init__(self, vllm_config: vllm.VllmConfig, most: int, device: torch.device) -> None:
        """most: tokens of a step, or of the run in which vLLM measures memory."""
        model = vllm_config.model_config
        self.several = bool(model.uses_mrope)
        self.shifts = torch.zeros(most if self.several else 0, dtype=torch.int64, device=device)
        # One place more than is used keeps rows from being contiguous, which torch.compile would specialise on.
        room = (model.mrope_num_dims, most + 1) if self.several else (0, 0)
        self._room = torch.zeros(room, dtype=torch.int64, device=device)

    def of(self, positions: Tensor) -> Tensor:
        """int64 [n] -> what the model takes: the same, or [dimensions, n]. A row that does not draft stays at 0."""
        if not self.several:
            return positions
        moved = self._room[:, : len(positions)]
        return moved.copy_(positions).add_(self.shifts[: len(positions)]).clamp_min_(0)
