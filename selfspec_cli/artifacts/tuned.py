"""Files of tuned settings: overrides that `tuned=MODEL` puts before the user's own.

`config/choices.py` reads them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from selfspec_cli.config.choices import TUNED
from selfspec_cli.config.model_digest import folder_name, model_fingerprint, safe_name
from selfspec_cli.config.schema import GateConfig, RunConfig, gate_threshold
from selfspec_cli.early_exit.replay import Setting
from selfspec_cli.early_exit.settings import arm_settings
from selfspec_cli.early_exit.view import DraftView
from selfspec_cli.whole import atomic_write

_MORE = ("head_dir", "runner")
"""Written down only if not the default, as the settings of an arm are."""


def apply(cfg: RunConfig, setting: Setting) -> RunConfig:
    """Return `cfg` with a tuned gate, threshold and draft length."""
    return replace(cfg, gate=GateConfig(setting.gate), threshold=setting.threshold, k=setting.k)


def overrides(cfg: RunConfig) -> list[str]:
    """Return the overrides of the drafting of `cfg`, without model and workload."""
    threshold, default = gate_threshold(cfg), RunConfig()
    layer, *view = DraftView.of(cfg).overrides()
    words = [layer, f"k={cfg.k}", *view]
    words += [f"{name}={value}" for name in _MORE if (value := getattr(cfg, name)) != getattr(default, name)]
    words += [f"{name}={value}" for name, value in arm_settings(replace(cfg, acceptance_length=None)).items()]
    words += [f"gate={cfg.gate.kind}"] + ([f"threshold={threshold:g}"] if threshold is not None else [])
    return words


def write(conf: Path, cfg: RunConfig, words: list[str], title: str) -> Path:
    """Write the file of the model of `cfg` into the configuration folder `conf`, atomically.

    words: the overrides. title: for people.
    """
    import yaml

    file = conf / TUNED / f"{folder_name(cfg)}.yaml"
    header = f"# Written by selfspec tune; use it with: selfspec sweep tuned={safe_name(cfg.model.name)}\n"
    model = {"path": cfg.model.path, "fingerprint": model_fingerprint(cfg)}
    document = {"title": title, "model": model, "overrides": words}
    atomic_write(file, header + yaml.safe_dump(document, sort_keys=False, allow_unicode=True))
    return file
