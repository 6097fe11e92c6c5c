"""Words into configs: (experiment, overrides) -> [RunConfig]. The only file that imports Hydra and OmegaConf.

Overrides follow Hydra's own grammar because Hydra's own parser reads them and Hydra composes every point. Choices
come from the user's ./conf first, then from the packaged conf/; experiments likewise from ./experiments.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, IntervalSweep, Override, QuotedString, RangeSweep
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from selfspec_cli.config import paths, tuned_files
from selfspec_cli.config.keys import run_key
from selfspec_cli.config.schema import GROUPS, ConfigError, RunConfig, resolved
from selfspec_cli.config.validation import validate, validate_command
from selfspec_cli.early_exit.errors import closest

EXPERIMENT = "experiment"
TUNED = "tuned"  # what `selfspec tune` found, by the model's name
_ROOT = "selfspec_run"


@dataclass
class _Root(RunConfig):
    """The schema plus Hydra's list of the groups and the choice that each begins with."""

    defaults: list[Any] = field(default_factory=list)


def compose_runs(
    experiment: str | None = None,
    overrides: Sequence[str] = (),
    *,
    sweep: bool = True,
    config: str | Path | None = None,
) -> list[RunConfig]:
    """Every point that the overrides span, in their order, checked, without repetitions.

    Args:
        experiment: name of a file in experiments/; `experiment=NAME` among the overrides does the same.
            `tuned=MODEL` likewise puts what `selfspec tune` found in front of the user's own overrides.
        overrides: Hydra overrides; they win over those of the experiment.
        sweep: whether comma lists and ranges are allowed.
        config: a dumped config to start from instead of the schema's defaults.

    Raises:
        ConfigError: unknown key, choice or experiment (naming the nearest), a value out of range, or one that no
            point uses.
    """
    base = load_config(config) if config else None
    parsed = _parse(overrides)
    names, users = _split(EXPERIMENT, parsed)
    tuned, users = _split(TUNED, users)
    points: list[tuple[str, ...]] = []
    names = [experiment] if experiment else names
    grids = [_parse(grid) for name in names for grid in experiment_overrides(name)] if names else [[]]
    for grid, name in itertools.product(grids, tuned or [""]):
        best = _tuned_overrides(name, [*grid, *users], base) if name else []
        points += _expand([*grid, *best, *users], sweep)
    composed = []
    for cfg in _compose_points(points, base):
        validate(resolved(cfg))
        composed.append(cfg)
    # Not what tuning found: it fits together, and what of it is unused the user has chosen otherwise.
    given = {override.key_or_group: str(override.input_line) for override in [*itertools.chain(*grids), *users]}
    validate_command(composed, given)
    runs: dict[str, RunConfig] = {}
    for cfg in map(resolved, composed):
        runs.setdefault(run_key(cfg), cfg)
    if not sweep and len(runs) > 1:
        raise ConfigError("one experiment at a time here; `selfspec sweep` runs several")
    return list(runs.values())


def load_config(path: str | Path) -> RunConfig:
    """Read a config dumped as YAML; the result equals the dumped one.

    Raises:
        ConfigError: not there, not YAML, or with a key or value that the schema refuses.
    """
    try:
        loaded = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(RunConfig), OmegaConf.load(path)))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except Exception as error:  # YAML's errors and OmegaConf's have no common base
        raise ConfigError(f"{path}: {_first_line(error)}") from error
    assert isinstance(loaded, RunConfig)
    return loaded


def experiment_files() -> dict[str, Path]:
    """Every experiment by name; the user's ./experiments win over the packaged ones."""
    folders = (paths.experiments_dir(), Path.cwd() / "experiments")
    return {file.stem: file for folder in folders for file in sorted(folder.glob("*.yaml"))}


def experiment_overrides(name: str) -> list[list[str]]:
    """The overrides of one experiment file, once for each of its grids.

    Raises:
        ConfigError: no such experiment, or a file of another shape.
    """
    files = experiment_files()
    if name not in files:
        raise ConfigError(closest(name, sorted(files), EXPERIMENT))
    return _overrides_in(files[name])


def _tuned_overrides(name: str, others: list[Override], base: RunConfig | None) -> list[Override]:
    """What `selfspec tune` found for the model of this command. others: the overrides that say which model it is.

    Raises:
        ConfigError: no model of that name was tuned, or another one was.
    """
    matches = []
    for file in tuned_files.find(name, _conf_dirs()):
        words = [*_parse(file.overrides), *others]
        model = [word for word in words if re.fullmatch(r"model(\..*)?|seed", word.key_or_group)]
        matches.append((file, list(_compose_points(_expand(model, sweep=True), base))))
    return _parse(tuned_files.choose(name, matches).overrides)


def _overrides_in(file: Path) -> list[list[str]]:
    try:
        content = OmegaConf.to_container(OmegaConf.load(file))
    except Exception as error:
        raise ConfigError(f"{file}: {_first_line(error)}") from error
    if not isinstance(content, dict) or not isinstance(content.get("overrides"), list):
        raise ConfigError(f"{file}: it must be a mapping with a list `overrides`")
    for key in content:
        if key not in ("title", "overrides", "grids"):
            raise ConfigError(f"{file}: {closest(key, ('title', 'overrides', 'grids'), 'key')}")
    return [[str(override) for override in [*content["overrides"], *grid]] for grid in content.get("grids") or [[]]]


def choices(group: str) -> list[str]:
    """The names that a group can be set to, packaged and the user's own."""
    return sorted({file.stem for folder in _conf_dirs() for file in (folder / group).glob("*.yaml")})


def _conf_dirs() -> list[Path]:
    """Folders of choices; the first that has a name wins."""
    user = Path.cwd() / "conf"
    packaged = paths.conf_dir()
    return [user, packaged] if user.is_dir() and user.resolve() != packaged.resolve() else [packaged]


def _parse(overrides: Iterable[str]) -> list[Override]:
    parser = OverridesParser.create()
    parsed = []
    for text in overrides:
        try:
            parsed.append(parser.parse_override(text))
        except HydraException as error:
            raise ConfigError(f"cannot read the override {text!r}: write key=value, for example tau_v=4,5,6") from error
    for override in parsed:
        if override.is_delete() or override.package is not None or override.is_hydra_override():
            raise ConfigError(f"{override.input_line}: only key=value overrides can be used here")
        _check_sweep(override)
        _check_key(override)
    return parsed


def _check_sweep(override: Override) -> None:
    """Refuse a sweep that is no list of values, and one without any."""
    sweep = override.value()
    if isinstance(sweep, (Glob, IntervalSweep)):
        raise ConfigError(
            f"{override.input_line}: an interval or a pattern has no list of values; write a,b,c or "
            "range(start, stop, step)"
        )
    # Written so that NaN is refused too.
    if isinstance(sweep, RangeSweep) and not 0 < ((sweep.stop or 0) - (sweep.start or 0)) * sweep.step < math.inf:
        raise ConfigError(
            f"{override.input_line}: a range without a value, or without an end; it goes from start by step and ends "
            "before stop, such as range(4,13,4)"
        )


def _check_key(override: Override) -> None:
    """Refuse a key that the schema has not, and a word that an enum has not, naming the nearest."""
    key = override.key_or_group
    if key in (EXPERIMENT, TUNED):
        return
    kind = _kind_of(key)
    if isinstance(kind, type) and issubclass(kind, Enum):
        for value in _values(override):
            if str(value) not in kind.__members__:
                raise ConfigError(closest(str(value), kind.__members__, key))


def _kind_of(key: str) -> Any:
    """The type of the schema's field `key`; Any below a free-form dict."""
    kind: Any = RunConfig
    parts = key.split(".")
    for depth, part in enumerate(parts):
        if getattr(kind, "__origin__", None) is dict:
            return Any
        if not is_dataclass(kind):
            raise ConfigError(f"{key}: {'.'.join(parts[:depth])} has no keys below it")
        hints = get_type_hints(kind)
        if part not in hints:
            allowed = [".".join([*parts[:depth], name]) for name in hints]
            top = [EXPERIMENT, TUNED] if depth == 0 else []
            raise ConfigError(closest(key, allowed + top, "key", meant=_home_of(parts[-1])))
        kind = hints[part]
    return kind


def _home_of(name: str) -> str | None:
    """The key that `name` has in the one group that knows it: batch -> workload.batch."""
    groups = {group: kind for group, kind in get_type_hints(RunConfig).items() if is_dataclass(kind)}
    homes = [f"{group}.{name}" for group, kind in groups.items() if name in get_type_hints(kind)]
    return homes[0] if len(homes) == 1 else None


def _split(key: str, overrides: list[Override]) -> tuple[list[str], list[Override]]:
    """The values of an override that names a file, and the other overrides."""
    names: list[str] = []
    rest = []
    for override in overrides:
        if override.key_or_group == key:
            names = [str(value) for value in _values(override)]
        else:
            rest.append(override)
    return names, rest


def _values(override: Override) -> Iterator[Any]:
    return override.sweep_iterator() if override.is_sweep_override() else iter([override.value()])


def _expand(overrides: list[Override], sweep: bool) -> list[tuple[str, ...]]:
    """The points that the overrides span; of two overrides of one key the later wins."""
    axes: dict[str, list[tuple[str, ...]]] = {}
    for override in overrides:
        if override.is_sweep_override() and not sweep:
            raise ConfigError(f"{override.input_line}: one point only here; `selfspec sweep` takes lists and ranges")
        key = override.key_or_group
        axes.pop(key, None)
        axes[key] = _axis(override)
    return [tuple(itertools.chain(*point)) for point in itertools.product(*axes.values())]


def _axis(override: Override) -> list[tuple[str, ...]]:
    """What each point of one override hands to Hydra."""
    key = override.key_or_group
    if key in GROUPS:
        return [_choice(key, value) for value in _values(override)]
    kind = _kind_of(key)
    if kind is Any or getattr(kind, "__origin__", None) is dict:
        key = "++" + key  # free-form: a key that is not there yet is no mistake
    if override.is_range_sweep():
        return [(f"{key}={value:.12g}",) for value in _values(override)]  # 0.3, not 0.30000000000000004
    if override.is_sweep_override():
        return [(f"{key}={text}",) for text in override.sweep_string_iterator()]
    return [(f"{key}={override.get_value_element_as_str()}",)]


def _choice(group: str, value: Any) -> tuple[str, ...]:
    word = value.text if isinstance(value, QuotedString) else str(value)
    known = choices(group)
    if word in known:
        return (f"{group}={word}",)
    if group == "model" and paths.looks_like_model_path(word):
        name = Path(word).name or word
        return ("model=custom", f"model.path={_quote(word)}", f"model.name={_quote(name)}")
    raise ConfigError(closest(word, known, group))


def _quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def _compose_points(points: list[tuple[str, ...]], base: RunConfig | None) -> Iterator[RunConfig]:
    primary, *others = _conf_dirs()
    search = [f"hydra.searchpath=[{','.join(_quote('file://' + str(folder)) for folder in others)}]"] if others else []
    with initialize_config_dir(str(primary), job_name="selfspec", version_base="1.3"):
        for point in points:
            _register(base, {override.split("=")[0] for override in point})
            try:
                composed = compose(config_name=_ROOT, overrides=[*search, *point])
                plain = OmegaConf.to_container(composed, resolve=True)
                cfg = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(RunConfig), plain))
            except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
                raise ConfigError(_explain(error, point)) from error
            assert isinstance(cfg, RunConfig)
            yield cfg


def _register(base: RunConfig | None, overridden: set[str]) -> None:
    """Store the root config. A loaded config gives way only in the groups that are chosen anew."""
    values = {} if base is None else {column.name: getattr(base, column.name) for column in fields(RunConfig)}
    groups = GROUPS if base is None else {group: GROUPS[group] for group in GROUPS if group in overridden}
    for group in groups:
        values.pop(group, None)
    root = _Root(**values, defaults=["_self_", *({group: choice} for group, choice in groups.items())])
    ConfigStore.instance().store(name=_ROOT, node=root)


def _explain(error: Exception, point: tuple[str, ...]) -> str:
    """What Hydra found wrong, in a line or two, with the nearest spelling where a YAML file has an unknown key."""
    text = f"{error}\n{error.__cause__ or ''}"
    full_key = re.search(r"full_key: ([\w.]+)", text)
    unknown = re.search(r"Key '(\w+)' (?:is )?not in '(\w+)'", text)
    if unknown and unknown[2] in _schemas():
        place = _first_line(error).partition(":")[0]  # In 'gate/mine'
        return f"{place}: {closest(unknown[1], [column.name for column in fields(_schemas()[unknown[2]])], 'key')}"
    culprits = [override for override in point if full_key and override.split("=")[0].lstrip("+") == full_key[1]]
    if culprits:
        return f"{culprits[0]}: {_first_line(error.__cause__ or error)}"
    lines = [line.strip() for line in text.splitlines()]
    noise = ("full_key:", "object_type=", "reference_type=", "To append to your config")
    return " ".join(dict.fromkeys(line for line in lines if line and not line.startswith(noise)))


def _schemas() -> dict[str, type]:
    kinds = [RunConfig, *(kind for kind in get_type_hints(RunConfig).values() if is_dataclass(kind))]
    return {kind.__name__: kind for kind in kinds if isinstance(kind, type)}


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
