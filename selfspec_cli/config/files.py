"""YAML files of choices -> a config: the only caller of Hydra's composition."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from selfspec_cli.config import retired
from selfspec_cli.config.choices import REGISTRY_GROUPS, conf_dirs
from selfspec_cli.config.schema import GROUPS, ConfigError, RunConfig
from selfspec_cli.early_exit.errors import closest

_ROOT = "selfspec_run"


@dataclass
class _Root(RunConfig):
    """The schema plus Hydra's list of the groups and the choice that each begins with."""

    defaults: list[Any] = field(default_factory=list)


class Composed:
    """What Hydra made of files, and the config that it is with values set in it."""

    def __init__(self, made: DictConfig, overrides: tuple[str, ...]) -> None:
        self._made, self._overrides = made, overrides
        self._known: dict[tuple[Any, ...], RunConfig] = {}

    @cached_property
    def refers_to(self) -> frozenset[str]:
        """The keys to which interpolations in the files refer."""
        return frozenset(_references(OmegaConf.to_container(self._made, resolve=False), ()))

    def config(self, values: Mapping[str, Any]) -> RunConfig:
        """The config in the schema's types, interpolations resolved with `values` (by dotted key); raises ConfigError.
        The same values give the same object."""
        key = tuple(values.items())
        if key not in self._known:
            made = copy.deepcopy(self._made) if values else self._made
            for name, value in values.items():
                OmegaConf.update(made, name, value)
            try:
                plain = _escaped(OmegaConf.to_container(made, resolve=True))
                cfg = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(RunConfig), plain))
            except OmegaConfBaseException as error:
                raise ConfigError(_explain(error, self._overrides)) from error
            assert isinstance(cfg, RunConfig)
            self._known[key] = cfg
        return self._known[key]


class Files:
    """Composes files into configs, each choice of them once."""

    def __init__(self, base: RunConfig | None, search: list[str]) -> None:
        self._base, self._search = base, search
        self._known = {} if base else _known_for(_stamp())

    def compose(self, overrides: tuple[str, ...]) -> Composed:
        """What Hydra makes of these choices of groups; raises ConfigError."""
        if overrides not in self._known:
            self._known[overrides] = self._compose(overrides)
        return self._known[overrides]

    def _compose(self, overrides: tuple[str, ...]) -> Composed:
        _register(self._base, {override.split("=")[0].lstrip("+") for override in overrides})
        try:
            return Composed(compose(config_name=_ROOT, overrides=[*self._search, *overrides]), overrides)
        except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
            raise ConfigError(_explain(error, overrides)) from error
        except (OSError, UnicodeDecodeError) as error:  # a file that cannot be read, or that holds no mapping
            why = getattr(error, "strerror", None) or "it must be a mapping of settings, in UTF-8"
            raise ConfigError(f"{_file_of(overrides)}: {why}") from error


@lru_cache(maxsize=4)
def _known_for(stamp: tuple[Any, ...]) -> dict[tuple[str, ...], Composed]:
    """What was composed of the files as they are now; a process that composes often, such as a test run, asks again."""
    return {}


def _stamp() -> tuple[Any, ...]:
    """Changes when a file of choices does."""
    files = sorted(file for folder in conf_dirs() for group in GROUPS for file in (folder / group).glob("*.yaml"))
    return tuple((str(file), (found := file.stat()).st_mtime_ns, found.st_size) for file in files)


@contextmanager
def open_files(base: RunConfig | None = None) -> Iterator[Files]:
    """The choices of conf/ and ./conf. base: a config to start from instead of the schema's defaults."""
    primary, *others = conf_dirs()
    quoted = ",".join(QuotedString(f"file://{folder}", Quote.single).with_quotes() for folder in others)
    with initialize_config_dir(str(primary), job_name="selfspec", version_base="1.3"):
        yield Files(base, [f"hydra.searchpath=[{quoted}]"] if others else [])


def _register(base: RunConfig | None, overridden: set[str]) -> None:
    """Store the root config. A loaded config gives way only in the groups that are chosen anew."""
    values = {} if base is None else {column.name: getattr(base, column.name) for column in fields(RunConfig)}
    groups = GROUPS if base is None else {group: GROUPS[group] for group in GROUPS if group in overridden}
    for group in groups:
        values.pop(group, None)
    defaults = [{group: choice} for group, choice in groups.items() if group not in REGISTRY_GROUPS]
    ConfigStore.instance().store(name=_ROOT, node=_Root(**values, defaults=["_self_", *defaults]))


def _escaped(value: Any) -> Any:
    """The same values with every `${` in a text as it stands: OmegaConf takes no interpolation for one."""
    if isinstance(value, dict):
        return {name: _escaped(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [*map(_escaped, value)]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def _references(value: Any, place: tuple[str, ...]) -> Iterator[str]:
    """The keys to which the interpolations below `value` refer: ${workload.batch}, or ${.batch} from beside it."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _references(inner, (*place, str(name)))
    elif isinstance(value, str) and "${" in value:
        for dots, name in re.findall(r"\$\{\s*(\.*)([\w.]+)\s*\}", value):
            yield ".".join([*place[: len(place) - len(dots)], name] if dots else [name])


def _file_of(overrides: Sequence[str]) -> str:
    """The file among chosen ones that holds no mapping, or cannot be read; what was chosen where it is not found."""
    for override in overrides:
        group, _, name = override.lstrip("+").partition("=")
        for file in (folder / group / f"{name}.yaml" for folder in conf_dirs()):
            try:
                if file.exists() and not isinstance(yaml.safe_load(file.read_text(encoding="utf-8")) or {}, dict):
                    return str(file)
            except (OSError, ValueError):
                return str(file)
    return " ".join(overrides)


def _explain(error: Exception, overrides: Sequence[str]) -> str:
    """What Hydra found wrong, in a line or two, with the nearest spelling where a YAML file has an unknown key."""
    text = f"{error}\n{error.__cause__ or ''}"
    full_key = re.search(r"full_key: ([\w.]+)", text)
    unknown = re.search(r"Key '(\w+)' (?:is )?not in '(\w+)'", text)
    if unknown and unknown[2] in _schemas():
        place = first_line(error).partition(":")[0]  # In 'gate/mine'
        return f"{place}: {closest(unknown[1], [column.name for column in fields(_schemas()[unknown[2]])], 'key')}"
    culprits = [override for override in overrides if full_key and override.split("=")[0].lstrip("+") == full_key[1]]
    if culprits:
        return f"{culprits[0]}: {first_line(error.__cause__ or error)}"
    lines = [line.strip() for line in text.splitlines()]
    noise = ("full_key:", "object_type=", "reference_type=", "To append to your config")
    return " ".join(dict.fromkeys(line for line in lines if line and not line.startswith(noise)))


def _schemas() -> dict[str, type]:
    kinds = [RunConfig, *(kind for kind in get_type_hints(RunConfig).values() if is_dataclass(kind))]
    return {kind.__name__: kind for kind in kinds if isinstance(kind, type)}


def load_config(path: str | Path) -> RunConfig:
    """Read a config dumped as YAML, or that of a measured point (.json); the result equals the dumped one.

    Raises:
        ConfigError: not there, not YAML, or with a key or value that the schema refuses.
    """
    try:
        if Path(path).suffix == ".json":
            given = json.loads(Path(path).read_text(encoding="utf-8"))
            given = given.get("config") if isinstance(given, dict) else None
        else:
            given = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        if not isinstance(given, dict):
            raise ConfigError(
                f"{path} holds no config; allowed: a config that was dumped as YAML, or the file of a "
                "point, results/runs/ID.json"
            )
        given = retired.in_todays_words(given)
        if asked := retired.still_asked(given):
            raise ConfigError(f"{path}: {asked[0]} asks for what there is no longer")
        loaded = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(RunConfig), OmegaConf.create(given)))
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
    """The first line of an error's text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
