"""Words into configs: (experiment, overrides) -> [RunConfig].

Hydra composes each distinct choice of groups once, the schema's types convert each value once, and a point is a copy of
the one with the others set in it: a grid of 10,000 points takes no longer to plan than to look at.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

from hydra import compose, initialize
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from selfspec_cli.config import choices
from selfspec_cli.config import tuned as tuned_files
from selfspec_cli.config.dumped import first_line, load_config
from selfspec_cli.config.keys import Keys
from selfspec_cli.config.options import SETTINGS
from selfspec_cli.config.paths import name_of_model
from selfspec_cli.config.schema import GROUPS, ConfigError, RunConfig, resolved
from selfspec_cli.config.speculative import KEY as SPECULATIVE
from selfspec_cli.config.validation import refuse_names_of_other_gates, validate, validate_command
from selfspec_cli.config.words import Word, is_free_form, parse
from selfspec_cli.early_exit.errors import closest
from selfspec_cli.early_exit.knobs import refusal

_ROOT = "selfspec_run"
_COMPOSED: dict[str, _Composed] = {}


@dataclass
class _Root(RunConfig):
    defaults: list[Any] = field(default_factory=list)


def compose_runs(
    experiment: str | None = None,
    overrides: Sequence[str] = (),
    *,
    sweep: bool = True,
    config: str | Path | None = None,
) -> list[RunConfig]:
    """Every point that the overrides span, in their order, checked, without repetitions; raises ConfigError. Points
    share what they have in common: change a copy. experiment: as `experiment=NAME` among the overrides, which win over
    it and over `tuned=MODEL`. sweep: whether lists and ranges are allowed. config: a dumped config to start from."""
    base = load_config(config) if config else None
    users = parse(overrides)
    _refuse_repeated(users)
    names, users = _split(choices.EXPERIMENT, users)
    tuned, users = _split(choices.TUNED, users)
    names = [experiment] if experiment else names
    grids = [parse(grid) for name in names for grid in choices.experiment_overrides(name)] if names else [[]]
    composed: list[RunConfig] = []
    for grid, name in itertools.product(grids, tuned or [""]):
        best = _tuned_words(name, [*grid, *users], base) if name else []
        some = list(_points([*grid, *best, *users], sweep, base))
        refuse_names_of_other_gates(some, [*grid, *users])
        composed += some
    points = [*map(resolved, composed)]
    for cfg in points:
        validate(cfg)
    # Not what tuning found: it fits together, and what of it is unused the user has chosen otherwise.
    validate_command(composed, {word.key: word.typed for word in [*itertools.chain(*grids), *users]})
    runs: dict[tuple[str, str], RunConfig] = {}
    keys = Keys()
    for cfg in points:  # what is no load test yet may become one, whose settings are in no key before
        runs.setdefault((keys.settings(cfg), "" if cfg.load.kind else repr(cfg.load)), cfg)
    if not sweep and len(runs) > 1:
        raise ConfigError("one experiment at a time here; `selfspec sweep` runs several")
    return list(runs.values())


def _refuse_repeated(words: Sequence[Word]) -> None:
    first: dict[str, Word] = {}
    for word in words:
        if (before := first.setdefault(word.key, word)) is not word:
            twice = f"{word.key} is given twice; give it once, and several values as a list a,b"
            is_other_name = before.typed.partition("=")[0] != word.typed.partition("=")[0]
            reason = f"both are {word.key}; give one of them" if is_other_name else twice
            raise ConfigError(f"{before.typed} and {word.typed}: {reason}")


def _split(key: str, words: list[Word]) -> tuple[list[str], list[Word]]:
    names = [str(value) for word in words if word.key == key for value in word.values]
    return names, [word for word in words if word.key != key]


def _tuned_words(name: str, others: Sequence[Word], base: RunConfig | None) -> list[Word]:
    """What `selfspec tune` found for the model of this command. others: the overrides that say which model it is."""
    matches = []
    for file in tuned_files.find(name):
        words = [*parse(file.overrides), *others]
        model = [word for word in words if word.key in ("model", "seed") or word.key.startswith("model.")]
        matches.append((file, list(_points(model, True, base))))
    return parse(tuned_files.choose(name, matches).overrides)


_Choice = tuple[str | None, dict[str, Any]]
"""One value of one override: the name of a group's choice that a file has, and values by dotted key."""


def _points(words: Sequence[Word], sweep: bool, base: RunConfig | None) -> Iterator[RunConfig]:
    """The points that the overrides span; the later of two of one key wins. base: see `compose_runs`."""
    axes: dict[str, list[_Choice]] = {}
    for word in words:
        if len(word.values) > 1 and not sweep:
            raise ConfigError(f"{word.typed}: one point only here; `selfspec sweep` takes lists and ranges")
        axes.pop(word.key, None)
        axes[word.key] = [_choice(word, value) for value in word.values]
    composed: dict[str, _Composed] = {}
    for chosen in itertools.product(*axes.values()):
        point = dict(zip(axes, chosen, strict=True))
        in_order = sorted(point, key=lambda key: key not in GROUPS)  # a setting wins over its group
        files = {key: file for key in in_order if (file := point[key][0]) is not None}
        if repr(files) not in composed:
            composed[repr(files)] = _composed(base, files)
        yield composed[repr(files)].point({name: value for key in in_order for name, value in point[key][1].items()})


def _is_interpolation(value: Any) -> bool:
    return isinstance(value, str) and "${" in value


def _references(text: str) -> set[str]:
    """The last parts of the keys to which interpolations refer: batch, of ${workload.batch} and of ${.batch}."""
    return {name.rpartition(".")[2] for name in re.findall(r"\$\{\s*\.*([\w.]+)\s*\}", text)}


def _choice(word: Word, value: Any) -> _Choice:
    if (group := word.key) not in GROUPS:
        as_typed = is_free_form(group) or _is_interpolation(value)
        return None, {group: value if as_typed else _converted(word, value)}
    if group == SPECULATIVE and isinstance(value, dict):
        return None, {group: value}
    name = str(value)
    if name in choices.file_choices(group):
        return name, {}
    if group in choices.NAMED_GROUPS:
        return None, {group: choices.of_name(group, name)}
    if group == "model" and (called := name_of_model(name)) is not None:
        return "custom", {"model.path": name, "model.name": called}
    further = ", ./FOLDER, or ORG/NAME of the Hugging Face Hub" if group == "model" else ""
    raise ConfigError(closest(name, choices.choices(group), group, further=further))


def _converted(word: Word, value: Any) -> Any:
    """A value in the type of its setting, or ConfigError; `validate` looks at its range."""
    section, _, name = word.key.rpartition(".")
    node, option = _types_of(section), SETTINGS[word.key]
    try:
        node[name] = value
        found = node[name]
    except OmegaConfBaseException as error:
        if option.knob.words():
            raise ConfigError(refusal(option, value)) from error
        reason = first_line(error)
        if option.is_number:
            kind = "whole number" if int in (option.type, *get_args(option.type)) else "number"
            allowed = f" ({option.knob.allowed()})" if option.knob.allowed() else ""
            forms = f"a {kind}{allowed}, or several as a,b,c or range(start, stop, step)"
            reason = f"{value!r} is no {kind}; allowed: {forms}"
        raise ConfigError(f"{word.typed}: {reason}") from error
    if OmegaConf.is_config(found):
        raise ConfigError(f"{word.typed}: {word.key} takes one value, not a list or a mapping")
    return found


@cache
def _types_of(section: str) -> Any:
    """OmegaConf's node of a group, which converts what is set in it; of the schema itself for the empty name."""
    return OmegaConf.structured(get_type_hints(RunConfig)[section] if section else RunConfig)


def _composed(base: RunConfig | None, files: Mapping[str, str]) -> _Composed:
    """What Hydra makes of choices that files have; made once for the same choices of the same content. base: it gives
    way only in the groups that are chosen anew. files: the choice of each such group."""
    if base is None:
        files = {group: name for group, name in GROUPS.items() if group not in choices.NAMED_GROUPS} | dict(files)
    nodes = {group: choices.settings_of(group, name) for group, name in files.items()}
    content = repr((base, files, nodes))
    if content not in _COMPOSED:
        kept = {} if base is None else vars(base)
        root = _Root(**{name: value for name, value in kept.items() if name not in files})
        root.defaults = ["_self_", *({group: name} for group, name in files.items())]
        ConfigStore.instance().store(name=_ROOT, node=root)
        for group, name in files.items():
            ConfigStore.instance().store(group=group, name=name, node=nodes[group])
        _COMPOSED[content] = _Composed(" ".join(f"{group}={name}" for group, name in files.items()))
    return _COMPOSED[content]


class _Composed:
    """What Hydra makes of the root config, and the configs that it is with values set in it."""

    def __init__(self, chosen: str) -> None:
        """chosen: the choices, for messages."""
        self._chosen = chosen
        try:
            with initialize(config_path=None, job_name="selfspec", version_base="1.3"):
                self._made: DictConfig = compose(config_name=_ROOT)
        except (HydraException, OmegaConfBaseException) as error:
            raise self._refusal(error) from error
        self._referred = _references(OmegaConf.to_yaml(self._made))
        self._known: dict[str, RunConfig] = {}

    def point(self, values: Mapping[str, Any]) -> RunConfig:
        """The config with these values by dotted key; what they leave alone is shared with other points. Raises
        ConfigError for an interpolation that cannot be resolved, or a key that is no mapping's."""
        own = {key for key, value in values.items() if is_free_form(key) or _is_interpolation(value)}
        referred = self._referred | _references(repr([values[key] for key in own]))
        late = {key: value for key, value in values.items() if key in own or key.rpartition(".")[2] in referred}
        if repr(late) not in self._known:
            self._known[repr(late)] = self._resolved(late)
        found = self._known[repr(late)]
        below: dict[str, dict[str, Any]] = {"": {}}
        for key in values.keys() - own:
            section, _, name = key.rpartition(".")
            below.setdefault(section, {})[name] = values[key]
        whole = below.pop("")
        parts = {name: replace(whole.get(name, getattr(found, name)), **changed) for name, changed in below.items()}
        return replace(found, **(whole | parts))

    def _resolved(self, values: Mapping[str, Any]) -> RunConfig:
        made = copy.deepcopy(self._made)
        try:
            for key, value in values.items():
                OmegaConf.update(made, key, value, merge=key != SPECULATIVE, force_add=True)
            found = OmegaConf.to_object(made)
        except OmegaConfBaseException as error:
            raise self._refusal(error) from error
        return RunConfig(**{column.name: getattr(found, column.name) for column in fields(RunConfig)})

    def _refusal(self, error: Exception) -> ConfigError:
        lines = [line.strip() for line in str(error).splitlines()]
        keys = [line.partition(" ")[2] for line in lines if line.startswith("full_key:")]
        where = ("full_key:", "object_type=", "reference_type=")
        said = [line for line in lines if line and not line.startswith(where)]
        return ConfigError(f"{keys[0] if keys else self._chosen}: {' '.join(said)}")
