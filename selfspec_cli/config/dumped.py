"""Dumped configs, read back: settings of earlier versions by today's names, without those that asked for nothing."""

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from selfspec_cli.config.schema import ConfigError, RunConfig
from selfspec_cli.early_exit.contexts import SETTING, own_keys
from selfspec_cli.early_exit.gates import GATES
from selfspec_cli.early_exit.gates.base import THRESHOLD_KEYS

ANY = object()
RETIRED: dict[str, Any] = {
    "head.kl": False,
    "verification": "full",
    "verification_from": None,
    "model.pipeline_parallel_size": 1,
    "engine.nvtx": False,
    "gate.calibration": None,
    "read_first": True,
    "bandit": False,
    "adaptive_length": False,
    "draft_cost": None,
    "load.e2e_limit": None,
    "load.low_clients": None,
    "load.frontend": "python",
    "load.category": "category",
    **dict.fromkeys(("model.exit_layer", "model.draft_length", "engine.name", "load.period", "workload.path"), ANY),
    **dict.fromkeys(("tracker.project", "tracker.entity", "launcher.price_hour"), ANY),
    **dict.fromkeys((f"launcher.{name}" for name in ("tries", "address", "cluster", "partition", "minutes")), ANY),
}
"""Settings that there were before, by dotted key, with the value at which they asked for nothing; ANY: what they asked
for is written elsewhere in the config, or no part of what is measured."""


def load_config(path: str | Path) -> RunConfig:
    """Read a config dumped as YAML, or that of a measured point (.json); raises ConfigError if it cannot be read."""
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
        given = json.loads(text) if file.suffix == ".json" else yaml.safe_load(text)
        if file.suffix == ".json" and isinstance(given, dict):
            given = given.get("config")
        if not isinstance(given, dict):
            raise ConfigError(
                f"{path} holds no config; allowed: a config that was dumped as YAML, or the file of a "
                "point, results/runs/ID.json"
            )
        loaded = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(RunConfig), in_todays_words(given)))
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is no YAML: {' '.join(str(error).split())}") from error
    except Exception as error:  # OmegaConf's and JSON's
        raise ConfigError(f"{path}: {first_line(error)}") from error
    assert isinstance(loaded, RunConfig)
    return loaded


def first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def in_todays_words(dumped: Mapping[str, Any]) -> dict[str, Any]:
    """A dumped config by today's names of settings, without those that are gone and asked for nothing."""
    config = copy.deepcopy(dict(dumped))
    for key, idle in RETIRED.items():
        section, _, name = key.rpartition(".")
        holder = config.get(section) if section else config
        if isinstance(holder, dict) and name in holder and (idle is ANY or holder[name] == idle):
            del holder[name]
    # Settings that are said by another name of theirs.
    kind = (config.get("gate") or {}).get("kind")
    rule = next((gate for gate in GATES.values() if gate.name == kind), None)
    for name in THRESHOLD_KEYS[1:]:
        value = config.pop(name, None)
        if value is not None and rule is not None and rule.key == name and config.get("threshold") is None:
            config["threshold"] = value
    engine = config.get("engine") or {}
    for name in ("enable_chunked_prefill", "async_scheduling"):
        if (value := engine.pop(name, None)) is not None:
            engine["extra"] = {name: value} | (engine.get("extra") or {})
    for name, context in own_keys().items():
        if (value := config.pop(name, None)) is not None:
            config[SETTING] = f"{context}:{value}"
    return config
