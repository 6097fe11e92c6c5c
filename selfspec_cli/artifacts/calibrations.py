"""Files of gate `calibrated`: the map that `selfspec roc` fitted, and the threshold at which it breaks even."""

import hashlib
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from selfspec_cli.config.facts import exit_layer
from selfspec_cli.config.model_digest import head_folder
from selfspec_cli.config.schema import ConfigError, GateConfig, RunConfig, Runner, gate_threshold, head_spec
from selfspec_cli.early_exit.calibration import Calibration
from selfspec_cli.early_exit.contexts import Context
from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.early_exit.thresholds import calibration_from_dict, check_threshold
from selfspec_cli.early_exit.view import DraftView
from selfspec_cli.whole import atomic_write


@dataclass(frozen=True)
class SavedGate:
    """A calibration with its threshold: the acceptance probability below which a draft step does not pay."""

    calibration: Calibration
    threshold: float
    about: dict[str, Any] = field(default_factory=dict)


def path_for(cfg: RunConfig, layer: int) -> Path:
    """Return the file of the calibration of this model's exit: next to its heads, one for each `exit_name`."""
    return head_folder(cfg) / f"gate-E{layer}-{exit_name(cfg)}.json"


def exit_name(cfg: RunConfig) -> str:
    """Return the part of a file's name after the exit layer: the head, and every draft option that is not the default.

    A head with a path has a digest of the path in it, a vocabulary list a digest of its contents: `a/v.txt` and
    `b/v.txt` are two vocabularies.
    """
    parts = [head_spec(cfg.head, cfg.layer).name]
    if cfg.head.path is not None:
        parts.append(_digest(bytes(Path(cfg.head.path).expanduser().resolve())))
    if cfg.vocab.isdigit():
        parts.append(cfg.vocab)
    elif cfg.vocab != "full":
        file = Path(cfg.vocab)
        parts += [file.stem, _digest(file.read_bytes())]
    view = DraftView.of(cfg)
    options = replace(view, context=Context()).options()
    weights = {name: options.pop(name) for name in ("draft_weights",) if name in options}
    drawn = {} if cfg.draft_sample_method == RunConfig.draft_sample_method else {"drawn": cfg.draft_sample_method}
    parts += [_named(name, str(value)) for name, value in (weights | drawn | options).items()]
    parts += [] if view.context.is_full else [str(view.context).replace(":", "")]
    parts += [cfg.runner.value] if cfg.runner is not Runner.auto else []
    parts += [f"accept{cfg.acceptance_length:g}"] if cfg.acceptance_length is not None else []
    return "-".join(parts)


def save(path: Path, gate: SavedGate) -> None:
    """Write the file atomically; `load` reads it back to an equal object."""
    document = {"calibration": gate.calibration.to_dict(), "threshold": gate.threshold, "about": gate.about}
    atomic_write(path, json.dumps(document, indent=2) + "\n")


def load(path: str | Path) -> SavedGate:
    """Read and check a file.

    Raises:
        ConfigError: it does not exist, or is no calibration.
    """
    try:
        document = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
        threshold = check_threshold("calibrated", document["threshold"])
        assert threshold is not None
        return SavedGate(calibration_from_dict(document["calibration"]), threshold, document.get("about", {}))
    except OSError as error:
        raise ConfigError(f"gate.calibration={path}: {error.strerror}; make one with: selfspec roc") from error
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        reason = str(error) if isinstance(error, SettingsError) else "it is no file that selfspec roc wrote"
        raise ConfigError(f"gate.calibration={path}: {reason}") from error


def with_calibration(cfg: RunConfig) -> RunConfig:
    """Fill in the file of gate `calibrated`, and its threshold if none is given; other gates stay as they are.

    Raises:
        ConfigError: the file is missing or wrong.
    """
    if cfg.gate.kind != "calibrated":
        return cfg
    file = cfg.gate.calibration
    if file is None:
        if (layer := exit_layer(cfg)) is None:
            raise ConfigError("gate=calibrated: this model's exit layer is not known yet; name it: layer=E")
        path = path_for(cfg, layer)
        if not path.is_file():
            raise ConfigError(
                f"gate=calibrated: there is no {path}; make it with: selfspec roc layer={layer}, and the model, head, "
                "vocabulary and draft options of this run"
            )
        file = str(path)
    saved = load(file)
    given = gate_threshold(cfg)
    gate = GateConfig("calibrated", file)
    return replace(cfg, gate=gate, threshold=saved.threshold if given is None else given)


def map_of(cfg: RunConfig) -> dict[str, Any] | None:
    """Return the map of gate `calibrated` as JSON, after `with_calibration`; None for other gates."""
    if cfg.gate.kind != "calibrated" or cfg.gate.calibration is None:
        return None
    return load(cfg.gate.calibration).calibration.to_dict()


def _named(option: str, value: str) -> str:
    """Return a draft option as part of a file's name; a path as a digest of its absolute form, as for a head."""
    if option == "draft_weights_path":
        return _digest(bytes(Path(value).expanduser().resolve()))
    return f"skip{value}" if option == "skip_layers" else value


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:8]
