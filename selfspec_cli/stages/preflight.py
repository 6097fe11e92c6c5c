"""What is refused before an engine starts: a model that is not there, an exit it has not, a head not fitted."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

from selfspec_cli.artifacts import calibrations, head_files
from selfspec_cli.config.facts import device_of, exit_layer, model_facts
from selfspec_cli.config.schema import EARLY_EXIT, ConfigError, Method, RunConfig, vocab_size
from selfspec_cli.early_exit.settings import deepest_exit_layer
from selfspec_cli.early_exit.thresholds import warnings_for


def check(cfg: RunConfig) -> None:
    """Refuse a point that could not run. A model on the Hub is not looked at here; the engine checks it.

    Raises:
        ConfigError, HeadError: the model path, the exit layer, the head or its draft vocabulary.
    """
    check_model(cfg)
    if cfg.method is Method.baseline:
        return
    layer = exit_layer(cfg)
    if layer is not None and cfg.method in EARLY_EXIT:
        head_files.check_head(cfg, layer, model_facts(cfg))


def head_file(cfg: RunConfig, layer: int) -> Path | None:
    """The fitted head that `cfg` uses at `layer`; raises as `head_files.full_head`."""
    return head_files.full_head(cfg, layer)


def check_model(cfg: RunConfig) -> None:
    """Refuse a model that is not there, and an exit layer or a draft vocabulary that it has not.

    Raises:
        ConfigError: naming which.
    """
    facts = model_facts(cfg)
    layers, tokens = facts.layers, facts.vocab_size
    if cfg.method is Method.baseline:
        return
    deepest = None if layers is None else deepest_exit_layer(layers, cfg.draft_weights)
    if deepest is not None and cfg.layer is not None and cfg.layer > deepest:
        raise ConfigError(f"layer={cfg.layer}: {cfg.model.name} has {layers} layers; must be in 1..{deepest}")
    if cfg.vocab.isdigit() and tokens is not None and int(cfg.vocab) > tokens:
        raise ConfigError(f"vocab={cfg.vocab}: larger than the vocabulary; must be in 1..{tokens}, or full")


def with_calibration(cfg: RunConfig) -> RunConfig:
    """`cfg` with what gate `calibrated` reads from its file, see `calibrations.settled`; raises ConfigError."""
    return calibrations.settled(cfg, exit_layer(cfg))


def warnings(cfg: RunConfig) -> list[str]:
    """Settings that are allowed but do nothing: a threshold that the gate can never pass, or never fail."""
    if cfg.method is not Method.layer_skip:
        return []
    used = replace(cfg, gate=replace(cfg.gate, calibration=calibrations.of(cfg)))
    return warnings_for(used, vocab_size(cfg) or model_facts(cfg).vocab_size)


def for_this_machine(cfg: RunConfig) -> RunConfig:
    """`cfg` as this machine can run it: eager on the CPU where torch.compile would find no C++ compiler.

    The row's key and its config.yaml are those of the eager run, so it is never taken for a compiled one.
    """
    if device_of(cfg) != "cpu" or cfg.engine.enforce_eager or cpp_compiler() is not None:
        return cfg
    return replace(cfg, engine=replace(cfg.engine, enforce_eager=True))


def cpp_compiler() -> str | None:
    """The C++ compiler that torch.compile would use on the CPU."""
    names = (os.environ.get("CXX", ""), "g++", "clang++")
    return next((found for name in names if name and (found := shutil.which(name))), None)
