"""Files of tuned settings: overrides that `selfspec tune` found for a model, which `tuned=MODEL` puts before the
user's.

A file is conf/tuned/NAME-FINGERPRINT.yaml. Two models may share a name (orgA/M and orgB/M), and one name may come to
mean other weights, so a file is used for the model that it was made for alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from selfspec_cli.config import paths
from selfspec_cli.config.choices import TUNED, conf_dirs, file_choices
from selfspec_cli.config.model_files import SHORT, folder_name, model_fingerprint, safe_name
from selfspec_cli.config.schema import ConfigError, GateConfig, RunConfig, gate_threshold
from selfspec_cli.early_exit.errors import closest, nearest
from selfspec_cli.early_exit.settings import arm_settings
from selfspec_cli.early_exit.view import DraftView
from selfspec_cli.whole import atomic_write

if TYPE_CHECKING:
    from selfspec_cli.early_exit.replay import Setting

_MORE = ("head_dir", "runner")  # written down only if not the default, as the settings of an arm are


@dataclass(frozen=True)
class TunedFile:
    """model: how its user named the model. overrides: as typed on the command line."""

    path: Path
    model: str
    fingerprint: str
    overrides: list[str]

    @property
    def owner(self) -> str:
        return f"{self.model} (weights {self.fingerprint[:SHORT]})"


def apply(cfg: RunConfig, setting: Setting) -> RunConfig:
    return replace(cfg, gate=GateConfig(setting.gate), threshold=setting.threshold, k=setting.k)


def overrides(cfg: RunConfig) -> list[str]:
    """The overrides of the drafting of `cfg`, without model and workload."""
    threshold, default = gate_threshold(cfg), RunConfig()
    layer, *view = DraftView.of(cfg).overrides()
    words = [layer, f"k={cfg.k}", *view]
    words += [f"{name}={value}" for name in _MORE if (value := getattr(cfg, name)) != getattr(default, name)]
    words += [f"{name}={value}" for name, value in arm_settings(replace(cfg, acceptance_length=None)).items()]
    words += [f"gate={cfg.gate.kind}"] + ([f"threshold={threshold:g}"] if threshold is not None else [])
    return words


def write(conf: Path, cfg: RunConfig, words: list[str], title: str) -> Path:
    """Write the file of the model of `cfg` into the folder `conf`, atomically. words: the overrides."""
    import yaml

    file = conf / TUNED / f"{folder_name(cfg)}.yaml"
    header = f"# Written by selfspec tune; use it with: selfspec sweep tuned={safe_name(cfg.model.name)}\n"
    model = {"path": cfg.model.path, "fingerprint": model_fingerprint(cfg)}
    document = {"title": title, "model": model, "overrides": words}
    atomic_write(file, header + yaml.safe_dump(document, sort_keys=False, allow_unicode=True))
    return file


def find(name: str) -> list[TunedFile]:
    """Every file for models called `name`; raises ConfigError, which names the nearest, where there is none."""
    names = _files()
    matching = [file for file, model in names.items() if model == safe_name(name)]
    if not matching:
        known, presets = sorted(set(names.values())), file_choices("model")
        model = name if name in presets else nearest(name, presets) or name
        meant = "" if model == name else f"; did you mean {model!r}?"
        which = closest(name, known, TUNED) if known else f"tuned={name}: no model was tuned yet{meant}"
        raise ConfigError(f"{which}; make it with: selfspec tune model={model}")
    return [_read(file) for file in matching]


def models() -> list[str]:
    return sorted(set(_files().values()))


def _files() -> dict[Path, str]:
    """Every file, with its model's name; the first folder that has a file of a name wins."""
    files = {file.name: file for folder in reversed(conf_dirs()) for file in sorted((folder / TUNED).glob("*.yaml"))}
    pattern = re.compile(rf"(.+)-[0-9a-f]{{{SHORT}}}\.yaml")
    return {file: match[1] for name, file in files.items() if (match := pattern.fullmatch(name))}


def choose(name: str, matches: Sequence[tuple[TunedFile, Sequence[RunConfig]]]) -> TunedFile:
    """The file that belongs to the model of the command. matches: every file of `find`, with the configs that name the
    model once the file's overrides are applied. Raises ConfigError where no file is of that model's weights, or several
    are, each of the model that it names itself."""
    right = [file for file, cfgs in matches if all(model_fingerprint(cfg) == file.fingerprint for cfg in cfgs)]
    if len(right) == 1:
        return right[0]
    if right:
        owners = " and ".join(file.owner for file in right)
        raise ConfigError(
            f"tuned={name}: several models of that name were tuned, {owners}; name one: "
            f"model={right[0].model} tuned={name}"
        )
    file, cfgs = matches[0]
    cfg = next(cfg for cfg in cfgs if model_fingerprint(cfg) != file.fingerprint)
    raise ConfigError(
        f"tuned={name}: {file.path} was made for {file.owner}, and this is {cfg.model.path} (weights "
        f"{model_fingerprint(cfg)[:SHORT]}); tune this one: selfspec tune model={cfg.model.path}"
    )


def _read(path: Path) -> TunedFile:
    content = paths.read_yaml(path, ("title", "model", "overrides"))
    model, words = content.get("model"), content.get("overrides")
    if not isinstance(words, list) or not isinstance(model, dict) or not {"path", "fingerprint"} <= model.keys():
        raise ConfigError(f"{path}: it is no file that selfspec tune wrote; make it again with: selfspec tune")
    return TunedFile(path, str(model["path"]), str(model["fingerprint"]), [str(word) for word in words])
