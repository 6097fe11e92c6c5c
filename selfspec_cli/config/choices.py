"""What a group can be set to: choices of conf/ and ./conf, and names that need no file; experiments.

A choice is a file conf/GROUP/NAME.yaml, or NAME in conf/GROUP.yaml; of equal names ./conf and ./experiments win.
"""

from dataclasses import fields, is_dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, get_type_hints

from selfspec_cli.config import paths, schema
from selfspec_cli.config.schema import GROUPS, ConfigError, HeadConfig, RunConfig, head_spec
from selfspec_cli.early_exit.errors import SettingsError, closest
from selfspec_cli.early_exit.heads import HeadSpec, examples
from selfspec_cli.early_exit.knobs import Knob, options

EXPERIMENT = "experiment"
GATEWAY = "gateway"  # conf/gateway/, which `selfspec gateway` reads; no group of a run
TUNED = "tuned"  # conf/tuned/, see config/tuned.py; no group either
_BY_KIND = {"gate": schema.GateConfig, "launcher": schema.LauncherConfig, "tracker": schema.TrackerConfig}
NAMED_GROUPS = ("head", *_BY_KIND)
"""Groups whose choices are names of a registry, or words of their setting `kind`, and need no file."""
_SUFFIX = ".yaml"


def conf_dirs() -> list[Path]:
    """Folders of choices; the first that has a name wins."""
    user = Path.cwd() / "conf"
    packaged = paths.data_dir() / "conf"
    return [user, packaged] if user.is_dir() and user.resolve() != packaged.resolve() else [packaged]


def file_choices(group: str) -> dict[str, Path]:
    """The names for which a group has settings in a file, sorted, each with the file."""
    found: dict[str, Path] = {}
    for folder in reversed(conf_dirs()):
        together = folder / f"{group}{_SUFFIX}"
        found |= dict.fromkeys(_named_in(together), together) if together.is_file() else {}
        found |= {file.stem: file for file in (folder / group).glob(f"*{_SUFFIX}")}
    return dict(sorted(found.items()))


def _named_in(file: Path) -> dict[str, Any]:
    """The choices of a file that holds several: names with settings below them."""
    stat = file.stat()
    content = _read_once(file, stat.st_mtime_ns, stat.st_size)
    return {name: settings or {} for name, settings in content.items() if _is_choice(name, settings)}


def _is_choice(name: Any, settings: Any) -> bool:
    return isinstance(name, str) and (settings is None or isinstance(settings, dict))


@lru_cache(maxsize=64)
def _read_once(file: Path, mtime_ns: int, size: int) -> dict[Any, Any]:
    return paths.read_yaml(file)


def settings_of(group: str, name: str) -> dict[str, Any]:
    """The settings of a choice that a file has; raises ConfigError for an unreadable file or an unknown key."""
    file = file_choices(group)[name]
    kind = get_type_hints(RunConfig)[group]
    keys = [column.name for column in fields(kind)] if is_dataclass(kind) else None
    if file.parent.name == group:
        return paths.read_yaml(file, keys)
    return paths.checked_mapping(_named_in(file)[name], f"{file}: {name}", keys)


def choices(group: str) -> list[str]:
    """The names that a group can be set to: packaged, the user's own, and those that need no file."""
    known = examples() if group == "head" else _kind(group).words() if group in NAMED_GROUPS else ()
    return list(dict.fromkeys([*known, *file_choices(group)]))


def _kind(group: str) -> Knob:
    return options(RunConfig)[f"{group}.kind"].knob


def of_name(group: str, word: str) -> Any:
    """The settings that a name of `NAMED_GROUPS` means, such as the gate varH; raises ConfigError for another name."""
    try:
        if group != "head":
            if word not in _kind(group).words():
                raise ConfigError(_kind(group).wrong_word(word, group))
            return _BY_KIND[group](schema.LauncherKind(word) if group == "launcher" else word)
        spec = HeadSpec.from_name(word)
    except SettingsError as error:
        files = file_choices(group)
        own = f"; of ./conf/{group}: {', '.join(files)}" if files else ""
        raise ConfigError(f"{error}{own}") from error
    given = HeadConfig(kind=spec.kind, rank=spec.rank, bias=spec.bias)
    return given if head_spec(given) == spec else replace(given, target=spec.target)


def experiment_files() -> dict[str, Path]:
    folders = (paths.experiments_dir(), Path.cwd() / "experiments")
    return {file.stem: file for folder in folders for file in sorted(folder.glob(f"*{_SUFFIX}"))}


def experiment_overrides(name: str) -> list[list[str]]:
    """The overrides of an experiment, once for each of its grids; raises ConfigError where there is none."""
    files = experiment_files()
    if name not in files:
        raise ConfigError(closest(name, sorted(files), EXPERIMENT))
    content = _read(files[name])
    return [[str(override) for override in [*content["overrides"], *grid]] for grid in content.get("grids") or [[]]]


def experiment_targets(name: str) -> list[dict[str, Any]]:
    """The targets that an experiment states, as its file has them; none for a name that there is not (any more)."""
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
        elif entry.is_dir():
            names = [f"./conf/{entry.name}/{file.name}" for file in sorted(entry.iterdir()) if file.suffix != _SUFFIX]
            found += [f"{name} is not read: a choice is a file NAME{_SUFFIX}" for name in names if "/." not in name]
        elif entry.suffix in (".yml", ".json", ".toml") or (entry.suffix == _SUFFIX and entry.stem not in GROUPS):
            found.append(f"./conf/{entry.name} is not read: a choice is NAME in ./conf/GROUP{_SUFFIX}")
        elif entry.suffix == _SUFFIX:
            strange = [str(name) for name, settings in paths.read_yaml(entry).items() if not _is_choice(name, settings)]
            if strange:
                not_read = f"./conf/{entry.name}: {', '.join(strange)} is not read"
                found.append(f"{not_read}: a choice is NAME with its settings below it")
    return found


def _read(file: Path) -> dict[str, Any]:
    """An experiment file; raises ConfigError for one of another shape."""
    content = paths.read_yaml(file, ("title", "overrides", "grids", "targets"))
    if not isinstance(content.get("overrides"), list):
        raise ConfigError(f"{file}: it must be a mapping with a list `overrides`")
    return content
