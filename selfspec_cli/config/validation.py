"""Values that cannot mean anything are refused before an engine starts, each with what is allowed instead."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path

from selfspec_cli.config.keys import uses
from selfspec_cli.config.schema import (
    DRAFT_LENGTH,
    ConfigError,
    DraftWeights,
    GateConfig,
    GateKind,
    Method,
    RunConfig,
    Runner,
    Verification,
    gate_threshold,
    head_spec,
)
from selfspec_cli.early_exit.draft_weights import DRAFT_WEIGHTS, WeightFacts
from selfspec_cli.early_exit.errors import SettingsError, closest
from selfspec_cli.early_exit.gates import GATES
from selfspec_cli.early_exit.settings import THRESHOLD_KEYS, check_threshold

# What vLLM 0.32 knows. A load format that a plugin of vLLM registers is written as engine.extra.load_format.
DTYPES = ("auto", "float32", "bfloat16", "float16", "float", "half")
LOAD_FORMATS = (
    "auto",
    "dummy",
    "safetensors",
    "pt",
    "hf",
    "npcache",
    "mistral",
    "fastsafetensors",
    "instanttensor",
    "ipc_cache",
    "modelexpress",
    "runai_streamer",
    "runai_streamer_sharded",
    "sharded_state",
    "tensorizer",
)


def validate(cfg: RunConfig) -> None:
    """Refuse values that cannot mean anything, before an engine starts.

    What only the loaded model can tell (E < L, the head's shape) is the engine's to refuse.

    Raises:
        ConfigError: naming the key, the value and what is allowed.
    """
    at_least: list[tuple[str, float | None, int]] = [
        ("layer", cfg.layer, 1),
        ("k", cfg.k, 1),
        ("repeats", cfg.repeats, 3),
        ("warmup", cfg.warmup, 0),
        ("seed", cfg.seed, 0),
        ("perplexity_tokens", cfg.perplexity_tokens, 0),
        ("tau_v", cfg.tau_v, 0),
        ("model.tensor_parallel_size", cfg.model.tensor_parallel_size, 1),
        ("model.max_model_len", cfg.model.max_model_len, 1),
        ("engine.max_num_seqs", cfg.engine.max_num_seqs, 1),
        ("engine.max_num_batched_tokens", cfg.engine.max_num_batched_tokens, 1),
        *((f"workload.{name}", getattr(cfg.workload, name), 1) for name in _COUNTS),
        ("workload.temperature", cfg.workload.temperature, 0),
    ]
    for key, value, least in at_least:
        if value is not None and not value >= least:  # written so that NaN is refused too
            raise ConfigError(f"{key}={value}: must be at least {least}")
        if value == math.inf:
            raise ConfigError(f"{key}={value}: must be finite")
    for key, word, known in (
        ("model.dtype", cfg.model.dtype, DTYPES),
        ("model.load_format", cfg.model.load_format, LOAD_FORMATS),
    ):
        if word not in known:
            raise ConfigError(closest(word, known, key))
    if cfg.tau is not None and not 0 <= cfg.tau <= 1:
        raise ConfigError(f"tau={cfg.tau}: a probability, must lie in [0, 1]")
    _validate_threshold(cfg)
    _validate_engine(cfg)
    _validate_method(cfg)
    _validate_draft_weights(cfg)
    _validate_verification(cfg)
    _validate_runner(cfg)
    head_spec(cfg.head)
    if not re.fullmatch(r"full|[1-9]\d*", cfg.vocab) and not Path(cfg.vocab).is_file():
        raise ConfigError(f'vocab={cfg.vocab}: must be "full", a number of tokens, 1 or more, or a file of token ids')
    prompts = cfg.workload.prompts
    if prompts not in ("heldout", "random") and not Path(prompts).is_file():
        raise ConfigError(f'workload.prompts={prompts}: must be "heldout", "random" or a text file that exists')


_COUNTS = ("input_len", "output_len", "num_prompts", "batch")


def validate_command(points: Sequence[RunConfig], given: Mapping[str, str]) -> None:
    """Refuse what one point alone does not show: several values of what a command has one of, and settings of the
    method that no point uses. A value that is the default asks for nothing, and a baseline uses no setting.

    Args:
        points: all of the command. given: what was typed for each key, such as {"tau_v": "tau_v=4,5,6"}.

    Raises:
        ConfigError: naming what was typed, and the methods or gates that use it.
    """
    for key in ("results_dir", "head_dir", "tracker.kind", "tracker.project", "tracker.entity"):
        values = dict.fromkeys(str(attrgetter(key)(cfg)) for cfg in points)
        if len(values) > 1:
            raise ConfigError(f"{key}={','.join(values)}: one command takes one value of it")
    drafting = [cfg for cfg in points if cfg.method is not Method.baseline]
    for key, typed in given.items():
        if any(uses(cfg, key) for cfg in drafting):
            continue
        idle = [cfg for cfg in drafting if attrgetter(key)(cfg) != attrgetter(key)(RunConfig())]
        if idle:
            raise ConfigError(f"{typed} is not used by {_why_unused(key, idle)}")


def _why_unused(key: str, idle: Sequence[RunConfig]) -> str:
    """Who does not use `key`, and who would; `idle` are the points that set it for nothing."""
    every = [RunConfig(method=method, gate=GateConfig(kind)) for method, kind in itertools.product(Method, GateKind)]
    able = [cfg for cfg in every if uses(cfg, key)]
    methods, gates = (dict.fromkeys(cfg.method for cfg in able), dict.fromkeys(cfg.gate.kind for cfg in able))
    # The point that comes nearest to using it tells the user most.
    cfg = max(idle, key=lambda cfg: (cfg.method in methods, cfg.gate.kind in gates))
    if cfg.method not in methods:
        return f"method {cfg.method.value!r}; methods that use {key}: {', '.join(methods)}"
    if cfg.gate.kind in gates:
        return f"gate {cfg.gate.kind.value!r} where threshold={cfg.threshold:g} takes its place; give one of them"
    takes = " or ".join(name for name in THRESHOLD_KEYS if uses(cfg, name)) or "no threshold"
    return f"gate {cfg.gate.kind.value!r}, which takes {takes}; gates that use {key}: {', '.join(gates)}"


def _validate_threshold(cfg: RunConfig) -> None:
    """The threshold in force, whichever key it is from."""
    kind = cfg.gate.kind.value
    key = GATES[kind].key if cfg.threshold is None else None
    try:
        check_threshold(kind, gate_threshold(cfg), key or "threshold")
    except SettingsError as error:
        raise ConfigError(str(error)) from error


def _validate_method(cfg: RunConfig) -> None:
    if cfg.method is Method.draft_model and cfg.model.load_format != "dummy":
        raise ConfigError(
            f"method=draft_model with model.load_format={cfg.model.load_format}: it measures what a separate draft of "
            "E layers costs, and such a draft exists with dummy weights only; model.load_format=dummy"
        )
    length, k = cfg.acceptance_length, cfg.k or DRAFT_LENGTH
    if length is not None and not 1 <= length <= k + 1:
        raise ConfigError(f"acceptance_length={length}: tokens a verify step yields, must lie in [1, k + 1 = {k + 1}]")
    if length is not None and cfg.engine.name == "cpu":
        raise ConfigError(
            f"acceptance_length={length}: vLLM's CPU build has no synthetic acceptance; choose a GPU: engine=h100"
        )
    if cfg.model.load_format == "dummy" and (cfg.perplexity_tokens or cfg.workload.prompts != "random"):
        raise ConfigError(
            f"model.load_format=dummy with perplexity_tokens={cfg.perplexity_tokens} and workload.prompts="
            f"{cfg.workload.prompts}: dummy weights have no text; set perplexity_tokens=0 workload.prompts=random"
        )


def _validate_draft_weights(cfg: RunConfig) -> None:
    """What a config alone tells; `spec_config` asks vLLM again once it has read the model's own."""
    weights, method = cfg.draft_weights, cfg.method
    if weights is DraftWeights.shared or method is Method.baseline:
        return
    if method is not Method.layer_skip:
        raise ConfigError(
            f"draft_weights={weights} with method={method}: it has no early-exit draft; use method=layer_skip, or "
            "draft_weights=shared"
        )
    facts = WeightFacts(
        device="cpu" if cfg.engine.name == "cpu" else "cuda",
        quantization=cfg.model.quantization,
        tensor_parallel_size=cfg.model.tensor_parallel_size,
    )
    reason = DRAFT_WEIGHTS[weights].reason_against(facts)
    if reason is not None:
        raise ConfigError(f"draft_weights={weights}: {reason}; use draft_weights=shared")


def _validate_verification(cfg: RunConfig) -> None:
    """vLLM itself refuses what only it can know, such as the V1 runner where the environment asks for it."""
    if cfg.verification is Verification.full or cfg.method is Method.baseline:
        return
    reasons = [
        (f"method={cfg.method}", cfg.method is not Method.layer_skip, "it is for early exit; use method=layer_skip"),
        (f"engine={cfg.engine.name}", cfg.engine.name == "cpu", "it needs CUDA graphs; choose a GPU: engine=h100"),
        ("engine.enforce_eager=true", cfg.engine.enforce_eager, "it needs CUDA graphs; leave it out"),
        ("runner=v1", cfg.runner is Runner.v1, "that runner cannot do it; use runner=v2"),
    ]
    _refuse_any(f"verification={cfg.verification}", reasons, "verification=full")


def _validate_runner(cfg: RunConfig) -> None:
    runner, on_cpu = cfg.runner, cfg.engine.name == "cpu"
    if runner is Runner.auto or cfg.method is Method.baseline:
        return
    reasons = [
        (f"engine={cfg.engine.name}", on_cpu, "vLLM's CPU build has one runner; choose a GPU: engine=h100"),
        (
            f"method={cfg.method}",
            runner is Runner.v1 and cfg.method is Method.layer_skip,
            "early exit on CUDA is written for the other one; use runner=v2",
        ),
    ]
    _refuse_any(f"runner={runner}", reasons, "runner=auto")


def _refuse_any(asked: str, reasons: list[tuple[str, bool, str]], otherwise: str) -> None:
    """Raises ConfigError for the first (setting, whether it forbids what is asked, why and what to do) that does."""
    for setting, forbids, reason in reasons:
        if forbids:
            raise ConfigError(f"{asked} with {setting}: {reason}, or {otherwise}")


def _validate_engine(cfg: RunConfig) -> None:
    extra = cfg.engine.extra.get("pipeline_parallel_size", 1)
    for key, value in (
        ("model.pipeline_parallel_size", cfg.model.pipeline_parallel_size),
        ("engine.extra.pipeline_parallel_size", extra),
    ):
        if value != 1:
            raise ConfigError(
                f"{key}={value}: pipeline parallelism is not supported, the draft and the target share every layer "
                "in one worker; use model.tensor_parallel_size"
            )
    if cfg.workload.batch > cfg.engine.max_num_seqs:
        raise ConfigError(
            f"workload.batch={cfg.workload.batch}: the engine runs engine.max_num_seqs={cfg.engine.max_num_seqs} "
            "requests at once; raise that too"
        )
    if cfg.workload.batch > cfg.workload.num_prompts:
        raise ConfigError(
            f"workload.batch={cfg.workload.batch} with workload.num_prompts={cfg.workload.num_prompts}: fewer requests "
            f"than are to be in flight at once; use workload.num_prompts={cfg.workload.batch} or more"
        )
    share = cfg.engine.gpu_memory_utilization
    if share is not None and not 0 < share <= 1:
        raise ConfigError(f"engine.gpu_memory_utilization={share}: a fraction, must lie in (0, 1]")
    cache = cfg.engine.kv_cache_gib
    if cache is not None and not 0 < cache < math.inf:
        raise ConfigError(f"engine.kv_cache_gib={cache}: GiB, must be more than 0, and finite")
