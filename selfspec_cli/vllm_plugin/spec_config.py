"""`speculative_config={"method": "layer_skip", ...}` as users write it -> a config that vLLM knows.

vLLM sees its own method `draft_model`, whose draft is the target itself; that gives lookahead slots in the KV cache,
the rejection sampler and the counters. Our own settings must reach the workers too, which get a pickled configuration:

- Method `layer_skip` compiles the same target whatever E, k and the gate are, so its settings stay out of what vLLM
  hashes into its compile cache: they are an attribute of the SpeculativeConfig object, and are pickled with it.
- Method `skip` and collecting compile something else, so theirs are in `additional_config`, which is hashed.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any

from selfspec_cli.early_exit.draft_weights import DRAFT_WEIGHTS, require_draft_weights
from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.early_exit.gates import GATES, require_device
from selfspec_cli.early_exit.length_table import VLLM_KEY
from selfspec_cli.early_exit.resolved import ResolvedSettings
from selfspec_cli.early_exit.settings import METHODS, USER_KEYS
from selfspec_cli.early_exit.thresholds import warnings_for
from selfspec_cli.vllm_plugin import compile_cache, versions
from selfspec_cli.vllm_plugin.hooks import COLLECT_KEY, SETTINGS_KEY

if TYPE_CHECKING:
    from transformers import PretrainedConfig
    from vllm.config import ModelConfig, ParallelConfig, SpeculativeConfig, VllmConfig
    from vllm.engine.arg_utils import EngineArgs

WORKER_EXTENSION = "selfspec_cli.vllm_plugin.worker.EarlyExitWorker"

VLLM_KEYS = (
    "draft_sample_method",
    "rejection_sample_method",
    "synthetic_acceptance_rates",
    "synthetic_acceptance_length",
    "enable_adaptive_verification",
    "num_speculative_tokens_per_batch_size",
)
"""Of vLLM's own keys of a speculative_config, those that mean something for a draft that is the target itself; in every
known release (see `vllm_keys`)."""

Original = Callable[["EngineArgs", "ModelConfig", "ParallelConfig"], "SpeculativeConfig | None"]


def settings_of(vllm_config: VllmConfig) -> ResolvedSettings | None:
    """The early-exit settings that a worker's configuration carries, None if it has none."""
    spec = vllm_config.speculative_config
    data = _additional(vllm_config).get(SETTINGS_KEY) if spec is None else getattr(spec, SETTINGS_KEY, None)
    return None if data is None else ResolvedSettings.from_dict(data)


def collects(vllm_config: VllmConfig) -> tuple[int, ...]:
    """Exit layers whose hidden states are to be collected; empty for an engine that only generates."""
    return tuple(_additional(vllm_config).get(COLLECT_KEY, ()))


def understand_layer_skip(original: Original) -> Original:
    """Replacement for `EngineArgs.create_speculative_config`. The arguments that it is given stay as they are."""

    def create_speculative_config(
        self: EngineArgs, target_model_config: ModelConfig, target_parallel_config: ParallelConfig
    ) -> SpeculativeConfig | None:
        spec = _spec_of(self)
        if spec.get("method") not in METHODS:
            if "draft_weights" in spec:
                raise SettingsError(f"draft_weights = {spec['draft_weights']!r} is for early exit; method "
                                    f"{spec.get('method')!r} has no use for it; allowed with: layer_skip")  # fmt: skip
            return original(self, target_model_config, target_parallel_config)
        _refuse_engine(self)
        _refuse_keys(spec)
        settings = ResolvedSettings.from_user(spec, _num_layers(target_model_config), passthrough=vllm_keys())
        if settings.verify:
            _refuse_runner()
            _refuse_model(target_model_config)
            _refuse_adapters(self, target_model_config)
            _refuse_gate(settings)
        if settings.verify and DRAFT_WEIGHTS[settings.draft_weights].copies:
            from selfspec_cli.vllm_plugin.weights.copied import facts_of  # imports torch

            require_draft_weights(settings.draft_weights, facts_of(target_model_config, target_parallel_config))
        from selfspec_cli.vllm_plugin.described import EarlyExitConfig, in_words  # imports vLLM

        compile_cache.keep_on_cpu()
        logger = logging.getLogger("vllm.selfspec")  # below vLLM's own logger, which users configure
        logger.info("selfspec: %s", in_words(settings, _num_layers(target_model_config)))
        for warning in warnings_for(settings, target_model_config.get_vocab_size()):
            logger.warning(warning)
        if not target_parallel_config.worker_extension_cls:
            target_parallel_config.worker_extension_cls = WORKER_EXTENSION
        if not settings.verify:
            self.additional_config = {**(self.additional_config or {}), SETTINGS_KEY: settings.to_dict()}
            return None
        args = copy.copy(self)  # the original writes what it is given into the arguments
        args.speculative_config = _as_draft_model(spec, settings, target_model_config)
        args.spec_method = args.spec_model = args.spec_tokens = None  # they are in `spec`
        config = original(args, _overrides_reach_the_draft(target_model_config), target_parallel_config)
        assert config is not None
        _refuse_misread(config, target_model_config)
        config.target_model_config = target_model_config
        # vLLM 0.33 shortens the target's context to that of a draft whose own config allows less.
        config.draft_model_config.max_model_len = target_model_config.max_model_len
        object.__setattr__(config, SETTINGS_KEY, settings.to_dict())  # no field of the dataclass, on purpose
        object.__setattr__(config, "__class__", EarlyExitConfig)
        return config

    return create_speculative_config


def _spec_of(args: EngineArgs) -> dict[str, Any]:
    """The speculative_config, with what vLLM's options --spec-method, --spec-model and --spec-tokens put into it.

    `vllm serve` accepts dashes in the keys of its JSON; so does the original.
    """
    spec = {key.replace("-", "_"): value for key, value in (args.speculative_config or {}).items()}
    given = {"method": args.spec_method, "model": args.spec_model, "num_speculative_tokens": args.spec_tokens}
    ours = (args.spec_method or spec.get("method")) in METHODS
    for key, value in given.items():
        if ours and value is not None and key in spec:
            raise SettingsError(f"{key} = {spec[key]!r} in the speculative_config and {value!r} by an option of the "
                                "command line mean the same setting; give one")  # fmt: skip
        spec |= {} if value is None else {key: value}
    return spec


def _additional(vllm_config: VllmConfig) -> Mapping[str, Any]:
    config = vllm_config.additional_config
    return config if isinstance(config, Mapping) else {}


def _num_layers(model_config: ModelConfig) -> int:
    return int(model_config.hf_text_config.num_hidden_layers)


def vllm_keys() -> tuple[str, ...]:
    """`VLLM_KEYS`, and those that only the installed release has."""
    found = versions.installed()
    release = None if found is None else versions.known(found[1])
    return (*VLLM_KEYS, *(release.speculative_keys if release else ()))


def _refuse_keys(spec: Mapping[str, Any]) -> None:
    """Keys that vLLM knows and that would change nothing here."""
    from vllm.config import SpeculativeConfig

    used = vllm_keys() if spec["method"] == "layer_skip" else ()
    unused = {field.name for field in fields(SpeculativeConfig)}.difference(USER_KEYS, used)
    for key, value in spec.items():
        if value is not None and key in unused:
            raise SettingsError(
                f"{key} = {value!r} has no meaning for method {spec['method']!r}, whose draft is the target "
                f"itself: leave it out; of vLLM's own keys allowed: {', '.join(used) or 'none'}"
            )


def require_runner(device: str, v2: bool | None) -> None:
    """Raises SettingsError for a model runner of vLLM's without early exit on such a device ("cpu", "cuda", ...).

    v2: whether it is the V2 runner; None where vLLM chooses.
    """
    needed = "V2" if device == "cuda" else "V1"
    if v2 is not None and v2 != (needed == "V2"):
        raise SettingsError(
            f"early exit on {device} needs vLLM's {needed} model runner; unset VLLM_USE_V2_MODEL_RUNNER={int(v2)}"
        )


def _refuse_runner() -> None:
    from vllm import envs
    from vllm.platforms import current_platform

    require_runner(current_platform.device_type, envs.VLLM_USE_V2_MODEL_RUNNER)


NO_TARGETS = {
    "is_hybrid": "it has layers with a recurrent state, in which rejected drafts would stay",
    "is_attention_free": "it has layers with a recurrent state, in which rejected drafts would stay",
    "uses_mrope": "its positions have several dimensions (M-RoPE), and drafts are made at plain positions",
    "is_encoder_decoder": "its decoder also attends to an encoder's states, which a draft step does not have",
    "is_diffusion": "it makes several tokens at once, and none of them after the other",
}
"""Property of vLLM's ModelConfig that early exit cannot have -> why."""


def _refuse_model(target: ModelConfig) -> None:
    """What a draft would spoil or get wrong. A rejected draft leaves nothing behind in a KV cache that is ever read; a
    recurrent state it would have moved on for good."""
    if target.runner_type != "generate":
        raise SettingsError(
            f"model {target.model} is not supported with early exit: vLLM runs it as a {target.runner_type} model, "
            "which generates no tokens; leave the speculative_config out"
        )
    for name, reason in NO_TARGETS.items():
        if getattr(target, name):
            raise SettingsError(
                f"model {target.model} is not supported with early exit: {reason}; allowed: decoders of attention "
                "layers with plain positions; this one can be served without a speculative_config, or with vLLM's "
                "method 'ngram'"
            )


def _refuse_adapters(args: EngineArgs, target: ModelConfig) -> None:
    """Drafts leave adapters out (weights/adapters.py), which cannot be done with those of experts."""
    if args.enable_lora and target.is_moe:
        raise SettingsError(
            "enable_lora = True is not supported with early exit for a mixture of experts: vLLM applies the adapters "
            "inside the experts' kernels, for the tokens of the verify pass; allowed: False, with the adapter merged "
            "into the model's weights"
        )


ONE_ONLY = {
    "pipeline_parallel_size": (
        "draft and target share every layer, so all layers must be on one worker",
        "tensor_parallel_size splits the model over GPUs instead",
    ),
    "data_parallel_size": (
        "ranks would draft different numbers of steps and wait for each other",
        "start one server for each GPU, or each group of tensor_parallel_size GPUs, instead",
    ),
    "prefill_context_parallel_size": ("a draft step's attention is not split over ranks", "use tensor_parallel_size"),
    "decode_context_parallel_size": ("a draft step's attention is not split over ranks", "use tensor_parallel_size"),
}
"""Argument of an engine of which early exit takes 1 only -> why, and what to do instead."""


def _refuse_gate(settings: ResolvedSettings) -> None:
    """A gate of another package may have no expression for CUDA; before the model is loaded is the time to say so."""
    from vllm.platforms import current_platform

    if current_platform.is_cuda():
        require_device(GATES[settings.gate.kind].rule(settings.threshold, settings.calibration))


def _refuse_engine(args: EngineArgs) -> None:
    """What no runner of ours can do is refused before anything starts, with what to do instead."""
    for name, (reason, instead) in ONE_ONLY.items():
        value = getattr(args, name)
        if value > 1:
            raise SettingsError(f"{name} = {value} is not supported with early exit ({reason}); allowed: 1; {instead}")
    if args.watermark_config is not None:
        raise SettingsError(
            "watermark_config is not supported with early exit: drafts would be drawn without the watermark; serve "
            "watermarked text without a speculative_config"
        )
    if args.offload_group_size or args.offload_backend == "prefetch":
        raise SettingsError(
            f"offload_group_size = {args.offload_group_size} (weights fetched while layers run) is not supported with "
            "early exit: layers share buffers, which are right only if every pass runs all layers; allowed: "
            "cpu_offload_gb"
        )


def _refuse_misread(config: SpeculativeConfig, target: ModelConfig) -> None:
    """vLLM guesses a draft's method from the model's name and type, whatever method it was given."""
    if config.method != "draft_model":
        raise SettingsError(
            f"model {target.model} is not supported with early exit: as a draft, vLLM takes it for one of method "
            f"{config.method!r} by its name or its type; link the model to a folder of another name and give that"
        )


def _as_draft_model(spec: dict[str, Any], settings: ResolvedSettings, target: ModelConfig) -> dict[str, Any]:
    """vLLM's own keys, with the target as its own draft model."""
    # Lengths by load are ours to follow, also where they are written as vLLM writes them: it would capture its graphs
    # for the batch sizes of its list alone, and requests have lengths of their own.
    ours = {*USER_KEYS, VLLM_KEY} - {"method", "num_speculative_tokens"}
    kept = {key: value for key, value in spec.items() if key not in ours}
    return {
        **kept,
        "method": "draft_model",
        "model": target.model,
        "revision": target.revision,
        "code_revision": target.code_revision,
        "num_speculative_tokens": settings.k,
        "quantization": target.quantization,
    }


def _overrides_reach_the_draft(target: ModelConfig) -> ModelConfig:
    """`target` with its hf_overrides as a function: vLLM applies functions to the draft's config too, and no dicts."""
    overrides = target.hf_overrides
    if not overrides or callable(overrides):
        return target
    changed = copy.copy(target)
    changed.hf_overrides = partial(_override, overrides)
    return changed


def _override(values: Mapping[str, Any], config: PretrainedConfig) -> PretrainedConfig:
    """Set `values` in a model's config, and nested ones in the configs inside it, as vLLM does for the target."""
    for name, value in values.items():
        inner = getattr(config, name, None)
        if isinstance(value, Mapping) and hasattr(inner, "to_dict"):
            _override(value, inner)
        else:
            setattr(config, name, value)
    return config
