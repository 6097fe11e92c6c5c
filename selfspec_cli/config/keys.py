"""What a config measures, as short keys: which points are equal, which share an engine, and whose baseline is whose."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import Any

from selfspec_cli.config.schema import (
    EARLY_EXIT,
    SPECULATIVE,
    GateConfig,
    HeadConfig,
    Method,
    ModelConfig,
    RunConfig,
    Runner,
    gate_threshold,
    to_plain,
)
from selfspec_cli.early_exit.gates import GATES
from selfspec_cli.early_exit.settings import OPTIONS

KEY_LENGTH = 12  # hex digits of a run key; 48 bits are far more than any results folder needs


def baseline_of(cfg: RunConfig) -> RunConfig:
    """The baseline that `cfg` is compared with: same model, workload, engine and seed, no method."""
    default = RunConfig()
    return replace(
        cfg,
        method=Method.baseline,
        gate=GateConfig(),
        head=HeadConfig(),
        layer=None,
        k=default.k,
        tau=default.tau,
        tau_v=default.tau_v,
        threshold=None,
        vocab=default.vocab,
        draft_weights=default.draft_weights,
        verification=default.verification,
        acceptance_length=None,
        runner=default.runner,
    )


def draft_options(cfg: RunConfig) -> dict[str, str]:
    """What of `draft_weights` and `verification` is not the default; they came later, and keys of earlier runs stay."""
    default = RunConfig()
    names = [name for name in ("draft_weights", "verification") if getattr(cfg, name) != getattr(default, name)]
    return {name: getattr(cfg, name) for name in names}


def method_settings(cfg: RunConfig) -> dict[str, Any]:
    """Only those method knobs that can change what this run does; a knob that has no effect is not in it."""
    settings: dict[str, Any] = {"method": cfg.method.value}
    if cfg.method is Method.baseline:
        return settings
    if cfg.method is not Method.ngram:
        settings |= {"layer": cfg.layer}
    if cfg.method in EARLY_EXIT:
        settings |= {"head": _head_facts(cfg.head), "vocab": cfg.vocab}
        if not cfg.head.path:
            settings["head_dir"] = cfg.head_dir if cfg.head.kind != "lens" else None
    if cfg.method is Method.layer_skip:
        settings |= draft_options(cfg)
    if cfg.method in SPECULATIVE:
        settings |= {"k": cfg.k}
        settings |= {"acceptance_length": cfg.acceptance_length} if cfg.acceptance_length is not None else {}
    return settings | ({"runner": cfg.runner.value} if cfg.runner is not Runner.auto else {})


def uses(cfg: RunConfig, key: str) -> bool:
    """Whether the method and the gate of `cfg` look at `key` at all; True for what is no setting of either.

    key: of a setting, or of a group of them such as gate.
    """
    about = [option.knob for name, option in OPTIONS.items() if name == key or name.startswith(f"{key}.")]
    if not about or not any(knob.methods for knob in about):
        return True
    if not any(cfg.method in knob.methods for knob in about):
        return False
    gate = GATES[cfg.gate.kind]
    used = {
        "gate.calibration": gate.needs_calibration,
        "tau": gate.key == "tau" and cfg.threshold is None,
        "tau_v": gate.key == "tau_v" and cfg.threshold is None,
        "threshold": gate.key is not None,
    }
    return used.get(key, True)


def _head_facts(head: HeadConfig) -> dict[str, Any]:
    """A head's fields; those left at their default are not in it, so that a field added later changes no key."""
    default = HeadConfig()
    facts = to_plain(head)
    return {key: facts[key] for key in facts if key in ("kind", "path") or getattr(head, key) != getattr(default, key)}


def _model_facts(model: ModelConfig) -> dict[str, Any]:
    """What of a model's config reaches the engine; `resolved` has put the rest into `layer` and `k`."""
    return {key: value for key, value in to_plain(model).items() if key not in ("exit_layer", "draft_length")}


def engine_key(cfg: RunConfig) -> str:
    """Runs with equal keys can share one live engine; gate, threshold, workload and seed are no part of it."""
    facts = {"model": _model_facts(cfg.model), "engine": to_plain(cfg.engine), **method_settings(cfg)}
    if cfg.model.load_format == "dummy":
        facts["seed"] = cfg.seed  # the weights themselves depend on it
    return _digest(facts)


def run_key(cfg: RunConfig) -> str:
    """Names what `cfg` measures: equal for two configs exactly when no knob that has an effect differs."""
    facts: dict[str, Any] = {name: to_plain(getattr(cfg, name)) for name in ("engine", "workload")}
    facts |= {"model": _model_facts(cfg.model)} | method_settings(cfg)
    if cfg.method is Method.layer_skip:
        facts |= {"gate": cfg.gate.kind, "threshold": gate_threshold(cfg)}
    if cfg.gate.kind == "calibrated":
        facts["calibration"] = cfg.gate.calibration
    measuring = ("seed", "repeats", "warmup", "perplexity_tokens")
    return _digest(facts | {name: getattr(cfg, name) for name in measuring})


def _digest(facts: dict[str, Any]) -> str:
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:KEY_LENGTH]
