"""`speculative_config={"method": "layer_skip", ...}` as users write it -> a config that vLLM knows.

vLLM sees its own method `draft_model`, whose draft is the target itself; that gives lookahead slots in the KV cache,
the rejection sampler and the counters. Our own settings must reach the workers too, which get a pickled configuration:

- Method `layer_skip` compiles the same target whatever E, k and the gate are, so its settings are an attribute of the
  SpeculativeConfig object, which is pickled with it, and which compile_cache.py leaves out where vLLM compiles.
- Method `skip` and collecting compile something else, so theirs are in `additional_config`, which is in every key.

With setting `strict`, what an engine with early exit would warn of ends it, as an error that says the same."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from selfspec_cli.early_exit.defaults import completed
from selfspec_cli.early_exit.draft_weights import DRAFT_WEIGHTS, require_draft_weights
from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.early_exit.length_table import VLLM_KEY
from selfspec_cli.early_exit.resolved import ResolvedSettings, flat_head_warning, warnings_for
from selfspec_cli.early_exit.settings import METHOD_ALIASES, METHODS, USER_KEYS
from selfspec_cli.vllm_plugin import compile_cache, overrides, refusals, releases
from selfspec_cli.vllm_plugin import vllm_names as vllm
from selfspec_cli.vllm_plugin.detection import COLLECT_KEY, SETTINGS_KEY
from selfspec_cli.vllm_plugin.target_facts import facts_of, target_of

WORKER_EXTENSION = "selfspec_cli.vllm_plugin.worker.EarlyExitWorker"

VLLM_KEYS = (
    "draft_sample_method",
    "rejection_sample_method",
    "synthetic_acceptance_rates",
    "synthetic_acceptance_length",
    "num_speculative_tokens_per_batch_size",
)
"""vLLM's own keys that mean something for a draft that is the target itself, in every known release (`vllm_keys`)."""


def settings_of(vllm_config: vllm.VllmConfig) -> ResolvedSettings | None:
    """The early-exit settings that a worker's configuration carries, None if it has none."""
    spec = vllm_config.speculative_config
    data = _additional(vllm_config).get(SETTINGS_KEY) if spec is None else getattr(spec, SETTINGS_KEY, None)
    return None if data is None else ResolvedSettings.from_dict(data)


def collects(vllm_config: vllm.VllmConfig) -> tuple[int, ...]:
    """Exit layers whose hidden states are to be collected; empty for an engine that only generates."""
    return tuple(_additional(vllm_config).get(COLLECT_KEY, ()))


def understand_layer_skip(
    original: Callable[..., vllm.SpeculativeConfig | None],
    self: vllm.EngineArgs,
    target_model_config: vllm.ModelConfig,
    target_parallel_config: vllm.ParallelConfig,
) -> vllm.SpeculativeConfig | None:
    """What the original, `EngineArgs.create_speculative_config`, makes of a request for early exit; `self` stays."""
    set_strict(False)  # an engine before this one in the process may have been strict
    overrides.name_in(self, target_parallel_config)
    spec = _spec_of(self)
    spec["method"] = METHOD_ALIASES.get(spec.get("method", ""), spec.get("method"))
    if spec["method"] not in METHODS:
        if "draft_weights" in spec:
            raise SettingsError(
                f"draft_weights = {spec['draft_weights']!r} is for early exit; method "
                f"{spec.get('method')!r} has no use for it; allowed with: layer_skip"
            )
        return original(self, target_model_config, target_parallel_config)
    refusals.refuse_engine(self)
    _refuse_keys(spec)
    why = None
    if spec["method"] == "layer_skip":
        spec, why = completed(spec, target_of(self, target_model_config, target_parallel_config))
    settings = ResolvedSettings.from_user(spec, _num_layers(target_model_config), passthrough=vllm_keys())
    set_strict(settings.strict)
    if settings.verify:
        refusals.refuse_runner()
        refusals.refuse_model(target_model_config)
        refusals.refuse_latents(target_model_config)
        refusals.refuse_adapters(self, target_model_config)
        refusals.refuse_gate(settings)
    if settings.verify and DRAFT_WEIGHTS[settings.draft_weights].copies:
        require_draft_weights(settings.draft_weights, facts_of(target_model_config, target_parallel_config))
        refusals.refuse_fitted_copies(settings.draft_weights_path, target_parallel_config.tensor_parallel_size)
    if settings.vocab != ResolvedSettings.vocab:  # before anything is loaded
        from selfspec_cli.early_exit.draft_vocab import ids_of  # imports torch

        ids_of(settings.vocab, target_model_config.get_vocab_size())
    from selfspec_cli.vllm_plugin.described import EarlyExitConfig, in_words  # imports vLLM

    compile_cache.keep_on_cpu()
    logger = logging.getLogger("vllm.selfspec")  # below vLLM's own logger, which users configure
    logger.info("selfspec: %s%s", in_words(settings, _num_layers(target_model_config)), f"; {why}" if why else "")
    flat = flat_head_warning(settings.gate.kind, settings.head.path, settings.layer)
    for warning in [*warnings_for(settings, target_model_config.get_vocab_size()), *([flat] if flat else [])]:
        logger.warning(warning)
    if not target_parallel_config.worker_extension_cls:
        target_parallel_config.worker_extension_cls = WORKER_EXTENSION
    if (chunk := _leave_out_chunks(target_model_config)) is not None:
        logger.info("selfspec: no context is longer than a chunk of %d tokens: layers attend to all of it", chunk)
    if not settings.verify:
        self.additional_config = {**(self.additional_config or {}), SETTINGS_KEY: settings.to_dict()}
        return None
    args = copy.copy(self)  # the original writes what it is given into the arguments
    args.speculative_config = _as_draft_model(spec, settings, target_model_config)
    args.spec_method = args.spec_model = args.spec_tokens = None  # they are in `spec`
    config = original(args, target_model_config, target_parallel_config)
    assert config is not None
    _draft_is_target(config, target_model_config)
    object.__setattr__(config, SETTINGS_KEY, settings.to_dict())  # no field of the dataclass, on purpose
    object.__setattr__(config, "__class__", EarlyExitConfig)
    return config


def _spec_of(args: vllm.EngineArgs) -> dict[str, Any]:
    """The speculative_config, with what vLLM's options --spec-method, --spec-model and --spec-tokens put into it.
    `vllm serve` accepts dashes in the keys of its JSON; so does the original."""
    spec = {key.replace("-", "_"): value for key, value in (args.speculative_config or {}).items()}
    given = {"method": args.spec_method, "model": args.spec_model, "num_speculative_tokens": args.spec_tokens}
    ours = (args.spec_method or spec.get("method")) in METHODS
    for key, value in given.items():
        if ours and value is not None and key in spec:
            raise SettingsError(
                f"{key} = {spec[key]!r} in the speculative_config and {value!r} by an option of the "
                "command line mean the same setting; give one"
            )
        spec |= {} if value is None else {key: value}
    return spec


def _additional(vllm_config: vllm.VllmConfig) -> Mapping[str, Any]:
    config = vllm_config.additional_config
    return config if isinstance(config, Mapping) else {}


def _num_layers(model_config: vllm.ModelConfig) -> int:
    return int(model_config.hf_text_config.num_hidden_layers)


def vllm_keys() -> tuple[str, ...]:
    """`VLLM_KEYS`, and those that only the installed release has."""
    found = releases.installed()
    release = None if found is None else releases.known(found[1])
    return (*VLLM_KEYS, *(release.speculative_keys if release else ()))


def _refuse_keys(spec: Mapping[str, Any]) -> None:
    """Keys that vLLM knows and that would change nothing here."""
    used = vllm_keys() if spec["method"] == "layer_skip" else ()
    unused = {field.name for field in fields(vllm.SpeculativeConfig)}.difference(USER_KEYS, used)
    for key, value in spec.items():
        if value is not None and key in unused:
            raise SettingsError(
                f"{key} = {value!r} has no meaning for method {spec['method']!r}, whose draft is the target "
                f"itself: leave it out; of vLLM's own keys allowed: {', '.join(used) or 'none'}"
            )


def _as_draft_model(spec: dict[str, Any], settings: ResolvedSettings, target: vllm.ModelConfig) -> dict[str, Any]:
    """vLLM's own keys, for a method that has no draft model: of one vLLM guesses the method from its config's name, so
    that MiMo and DeepSeek-V3 would become their own MTP heads. `_draft_is_target` makes the target the draft."""
    # Lengths by load are ours to follow, also where they are written as vLLM writes them: it would capture its graphs
    # for the batch sizes of its list alone, and requests have lengths of their own.
    ours = {*USER_KEYS, VLLM_KEY} - {"method", "num_speculative_tokens"}
    kept = {key: value for key, value in spec.items() if key not in ours}
    return {**kept, "method": "ngram", "model": target.model, "num_speculative_tokens": settings.width}


def _leave_out_chunks(target: vllm.ModelConfig) -> int | None:
    """Where no context is longer than the chunk in which layers attend (Llama 4), let them attend to all of it: the
    tokens are the same, and vLLM records CUDA graphs of whole steps, without which draft steps wait for the host.
    Returns the chunk that was left out; None where there is none, or contexts are longer."""
    chunk = getattr(target.hf_text_config, "attention_chunk_size", None)
    if not chunk or target.max_model_len > chunk:
        return None
    target.hf_text_config.attention_chunk_size = target.attention_chunk_size = None
    return int(chunk)


def _draft_is_target(config: vllm.SpeculativeConfig, target: vllm.ModelConfig) -> None:
    """Make `config` that of vLLM's method `draft_model` whose draft has the target's own configuration."""
    config.method = "draft_model"
    config.prompt_lookup_min = config.prompt_lookup_max = 0
    config.quantization = target.quantization
    config.draft_model_config = copy.copy(target)
    config.draft_model_config.runner_type = "draft"
    config.draft_tensor_parallel_size = config.target_parallel_config.tensor_parallel_size


LOGGER = "vllm.selfspec"
"""Below vLLM's own logger; every warning of this package in an engine's processes goes through it."""
OF_CLIENTS = ("requests",)
"""Modules that warn of what one client sent, which never ends an engine."""


def _refuse(record: logging.LogRecord) -> bool:
    """A filter that raises SettingsError in place of a warning, but for what is of a client."""
    if record.levelno >= logging.WARNING and record.module not in OF_CLIENTS:
        raise SettingsError(f"strict = True, and early exit warns: {record.getMessage()}")
    return True


def set_strict(on: bool) -> None:
    """Of the engine that this process is about to make, or to be a worker of."""
    logger = logging.getLogger(LOGGER)
    if on == (_refuse in logger.filters):
        return
    (logger.addFilter if on else logger.removeFilter)(_refuse)
    # A filter sees no more than the level lets through, and VLLM_LOGGING_LEVEL may keep warnings out of the log.
    logger.setLevel(min(logger.getEffectiveLevel(), logging.WARNING) if on else logging.NOTSET)
