"""What is refused before an engine starts: a model that is not there, an exit it has not, a head not fitted."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

from selfspec_cli.artifacts import calibrations, head_files
from selfspec_cli.config import paths
from selfspec_cli.config.schema import ConfigError, HeadKind, Method, RunConfig, gate_threshold
from selfspec_cli.early_exit.settings import DraftSettings, calibration_from_dict, warnings_for


def check(cfg: RunConfig) -> None:
    """Refuse a point that could not run. A model on the Hub is not looked at here; the engine checks it.

    Raises:
        ConfigError, HeadError: the model path, the exit layer, the head or its draft vocabulary.
    """
    check_model(cfg)
    if cfg.method is Method.baseline:
        return
    layers = num_layers(cfg, Path(paths.model_path(cfg.model)).expanduser())
    layer = cfg.layer if cfg.layer is not None else layers // 2 if layers else None
    if layer is not None and (cfg.head.kind is not HeadKind.lens or cfg.head.path is not None):
        head_file(cfg, layer)


def head_file(cfg: RunConfig, layer: int) -> Path | None:
    """The fitted head that `cfg` uses at `layer`; raises as `head_files.full_head`."""
    return head_files.full_head(cfg, layer)


def check_model(cfg: RunConfig) -> None:
    """Refuse a model that is not there, and an exit layer or a draft vocabulary that it has not.

    Raises:
        ConfigError: naming which.
    """
    folder = Path(paths.model_path(cfg.model)).expanduser()
    if cfg.method is Method.baseline:
        return
    layers, tokens = num_layers(cfg, folder), number(cfg, "vocab_size", folder)
    if layers is not None and cfg.layer is not None and cfg.layer >= layers:
        raise ConfigError(f"layer={cfg.layer}: {cfg.model.name} has {layers} layers; must be in 1..{layers - 1}")
    if cfg.vocab.isdigit() and tokens is not None and int(cfg.vocab) > tokens:
        raise ConfigError(f"vocab={cfg.vocab}: larger than the vocabulary; must be in 1..{tokens}, or full")


def with_saved_gate(cfg: RunConfig) -> RunConfig:
    """`cfg` with what gate `calibrated` reads from its file, see `calibrations.with_saved_gate`; raises ConfigError."""
    return calibrations.with_saved_gate(cfg, exit_layer(cfg))


def exit_layer(cfg: RunConfig) -> int | None:
    """The exit layer in force, half the layers where none is given; None where only the Hub knows how many."""
    if cfg.layer is not None:
        return cfg.layer
    layers = num_layers(cfg, Path(paths.model_path(cfg.model)).expanduser())
    return layers // 2 if layers else None


def warnings(cfg: RunConfig) -> list[str]:
    """Settings that are allowed but do nothing: a threshold that the gate can never pass, or never fail."""
    if cfg.method is not Method.layer_skip:
        return []
    document = calibrations.map_of(cfg)
    calibration = None if document is None else calibration_from_dict(document)
    settings = DraftSettings(1, gate=cfg.gate.kind.value, threshold=gate_threshold(cfg), calibration=calibration)
    vocabulary = int(cfg.vocab) if cfg.vocab.isdigit() else number(cfg, "vocab_size")
    return warnings_for(settings, vocabulary)


def runnable(cfg: RunConfig) -> RunConfig:
    """`cfg` as this machine can run it: eager on the CPU where torch.compile would find no C++ compiler.

    The row's key and its config.yaml are those of the eager run, so it is never taken for a compiled one.
    """
    if cfg.engine.name != "cpu" or cfg.engine.enforce_eager or cpp_compiler() is not None:
        return cfg
    return replace(cfg, engine=replace(cfg.engine, enforce_eager=True))


def cpp_compiler() -> str | None:
    """The C++ compiler that torch.compile would use on the CPU."""
    names = (os.environ.get("CXX", ""), "g++", "clang++")
    return next((found for name in names if name and (found := shutil.which(name))), None)


def num_layers(cfg: RunConfig, folder: Path) -> int | None:
    """Decoder layers of a model in a folder, by its config.json; None where that does not say."""
    return number(cfg, "num_hidden_layers", folder)


def number(cfg: RunConfig, key: str, folder: Path | None = None) -> int | None:
    """An integer of a model's config.json; None where that does not say."""
    try:
        folder = folder or Path(paths.model_path(cfg.model)).expanduser()
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    for source in (cfg.model.hf_overrides, found, found.get("text_config") or {}):
        if isinstance(source.get(key), int):
            return source[key]
    return None
