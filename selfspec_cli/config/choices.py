"""What a group can be set to: files of conf/ and ./conf, and the names of the registries; experiments and tuned files.

A user's ./conf and ./experiments add names and take the place of packaged ones.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from selfspec_cli.config import paths
from selfspec_cli.config.schema import GROUPS, ConfigError, GateConfig, HeadConfig, ModelConfig, head_spec
from selfspec_cli.early_exit.errors import SettingsError, closest
from selfspec_cli.early_exit.gates import GATES
from selfspec_cli.early_exit.head_spec import HeadSpec, examples

EXPERIMENT = "experiment"
GATEWAY = "gateway"  # conf/gateway/, which `selfspec gateway` reads; no group of a run
TUNED = "tuned"  # what `selfspec tune` found, by the model's name; see tuned_files.py
REGISTRY_GROUPS = ("gate", "head")  # their choices are names of a registry and need no file
_SUFFIX = ".yaml"
_EXPERIMENT_KEYS = ("title", "overrides", "grids", "targets")


def conf_dirs() -> list[Path]:
    """Folders of choices; the first that has a name wins."""
    user = Path.cwd() / "conf"
    packaged = paths.conf_dir()
    return [user, packaged] if user.is_dir() and user.resolve() != packaged.resolve() else [packaged]


def file_choices(group: str) -> list[str]:
    """The names for which a group has a file."""
    return sorted({file.stem for folder in conf_dirs() for file in (folder / group).glob(f"*{_SUFFIX}")})


def choices(group: str) -> list[str]:
    """The names that a group can be set to: packaged, the user's own, and for gates and heads those of the registry."""
    known = {"gate": tuple(GATES), "head": examples()}.get(group, ())
    return list(dict.fromkeys([*known, *file_choices(group)]))


def of_registry(group: str, word: str) -> Any:
    """The setting that a word of a registry means: a gate's name, or a head's such as translator_r15.

    Raises:
        ConfigError: there is none of that name, naming the nearest.
    """
    try:
        if group == "gate":
            return GateConfig(GATES[word].name)
        spec = HeadSpec.from_name(word)
    except SettingsError as error:
        files = file_choices(group)
        own = f"; of ./conf/{group}: {', '.join(files)}" if files else ""
        raise ConfigError(f"{error}{own}") from error
    given = HeadConfig(kind=spec.kind, rank=spec.rank, bias=spec.bias)
    return given if head_spec(given) == spec else replace(given, target=spec.target)


def named_model(word: str) -> ModelConfig | None:
    """What of a model's settings a folder or a Hugging Face id says: path and name; None for a preset's name.

    A folder is called by its own name, a model of the Hub by its whole id, because many have the same last part.
    """
    paths.refuse_address(word, "model")
    if not paths.looks_like_model_path(word):
        return None
    folder = word.startswith(("/", ".", "~")) or Path(word).is_dir()
    return ModelConfig(path=word, name=(Path(word).expanduser().resolve().name if folder else word) or word)


def experiment_files() -> dict[str, Path]:
    """Every experiment by name."""
    folders = (paths.experiments_dir(), Path.cwd() / "experiments")
    return {file.stem: file for folder in folders for file in sorted(folder.glob(f"*{_SUFFIX}"))}


def experiment_overrides(name: str) -> list[list[str]]:
    """The overrides of one experiment file, once for each of its grids.

    Raises:
        ConfigError: no such experiment, or a file of another shape.
    """
    files = experiment_files()
    if name not in files:
        raise ConfigError(closest(name, sorted(files), EXPERIMENT))
    content = _read(files[name])
    return [[str(override) for override in [*content["overrides"], *grid]] for grid in content.get("grids") or [[]]]


def experiment_targets(name: str) -> list[dict[str, Any]]:
    """The targets that an experiment states, as its file has them; none for a name that there is not (any more).

    Raises:
        ConfigError: a file of another shape.
    """
    files = experiment_files()
    targets = _read(files[name]).get("targets") or [] if name in files else []
    if not isinstance(targets, list) or not all(isinstance(target, dict) for target in targets):
        raise ConfigError(f"{files[name]}: `targets` must be a list of mappings")
    return targets


def unread_files() -> list[str]:
    """What lies in ./conf and is read by nobody, with what it may have been meant to be."""
    folder, found = Path.cwd() / "conf", []
    if conf_dirs()[0] != folder:
        return []
    groups = [*GROUPS, TUNED, GATEWAY]
    for entry in sorted(folder.iterdir()):
        if entry.is_dir() and entry.name not in groups:
            found.append(f"./conf/{entry.name}/ is not read: {closest(entry.name, groups, 'group')}")
        elif entry.is_file() and entry.suffix in (_SUFFIX, ".yml", ".json", ".toml"):
            found.append(f"./conf/{entry.name} is not read: a choice is a file ./conf/GROUP/NAME{_SUFFIX}")
        elif entry.name in groups:
            names = [f"./conf/{entry.name}/{file.name}" for file in sorted(entry.iterdir()) if file.suffix != _SUFFIX]
            found += [f"{name} is not read: a choice is a file NAME{_SUFFIX}" for name in names if "/." not in name]
    return found


def _read(file: Path) -> dict[str, Any]:
    """An experiment file: title, overrides, grids, targets."""
    content = paths.read_yaml(file, _EXPERIMENT_KEYS)
    if not isinstance(content.get("overrides"), list):
        raise ConfigError(f"{file}: it must be a mapping with a list `overrides`")
    return content
