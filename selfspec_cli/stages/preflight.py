"""What is refused before an engine starts: a model that is not there, an exit it has not, a head not fitted."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

from selfspec_cli import paths
from selfspec_cli.config import ConfigError, HeadKind, Method, RunConfig


def check(cfg: RunConfig) -> None:
    """Refuse a point that could not run. A model on the Hub is not looked at here; the engine checks it.

    Raises:
        ConfigError: the model path, the exit layer or the head.
    """
    folder = Path(paths.model_path(cfg.model)).expanduser()
    if cfg.method is Method.baseline:
        return
    layers = num_layers(cfg, folder)
    if layers is not None and cfg.layer is not None and cfg.layer >= layers:
        raise ConfigError(f"layer={cfg.layer}: {cfg.model.name} has {layers} layers; must be in 1..{layers - 1}")
    layer = cfg.layer if cfg.layer is not None else layers // 2 if layers else None
    if cfg.head.kind is not HeadKind.lens and layer is not None:
        head_file(cfg, layer)


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
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    for source in (cfg.model.hf_overrides, found, found.get("text_config") or {}):
        if isinstance(source.get("num_hidden_layers"), int):
            return source["num_hidden_layers"]
    return None


def head_file(cfg: RunConfig, layer: int) -> Path | None:
    """The fitted head that `cfg` uses at `layer`; None for the lens, which has no file.

    Raises:
        ConfigError: there is none; says how to fit it. More than one fits; names them.
    """
    kind = cfg.head.kind.value
    if cfg.head.kind is HeadKind.lens:
        return None
    if cfg.head.path is not None:
        path = Path(cfg.head.path).expanduser()
        if not path.is_file():
            raise ConfigError(f"head.path={cfg.head.path}: there is no such file")
        return path
    from selfspec_cli.early_exit.artifact import find_head  # imports torch
    from selfspec_cli.early_exit.settings import SettingsError

    try:
        return find_head(paths.head_folder(cfg), layer, kind)
    except SettingsError as error:
        option = "" if cfg.model.path == paths.REFERENCE else f" model={cfg.model.path}"
        fit = f"selfspec fit-lsq --layer {layer}{option}"
        hint = f"; fit it with: {fit}" if cfg.head.kind is HeadKind.lsq else ""
        raise ConfigError(f"head={kind}: {error}{hint}") from error
