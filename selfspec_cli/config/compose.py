"""Words into configs: (experiment, overrides) -> [RunConfig].

Hydra composes each distinct choice of files once, the schema's types convert each value once, and a point is a copy of
the one with the others set in it: a grid of 10,000 points takes no longer to plan than to look at.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from selfspec_cli.config.choices import (
    EXPERIMENT,
    REGISTRY_GROUPS,
    TUNED,
    choices,
    choose_tuned,
    experiment_overrides,
    file_choices,
    find_tuned,
    named_model,
    of_registry,
)
from selfspec_cli.config.files import Files, first_line, load_config, open_files
from selfspec_cli.config.keys import Keys
from selfspec_cli.config.schema import GROUPS, ConfigError, RunConfig, resolved
from selfspec_cli.config.speculative import KEY as SPECULATIVE
from selfspec_cli.config.validation import refuse_names_of_other_gates, validate, validate_command
from selfspec_cli.config.words import Word, is_free_form, option_of, parse
from selfspec_cli.early_exit.errors import closest
from selfspec_cli.early_exit.knobs import admits, refusal


@dataclass(frozen=True)
class _Choice:
    """One value of one override: what Hydra is to compose (`files`), and what is set in the result (`values`)."""

    key: str
    files: tuple[str, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)


def compose_runs(
    experiment: str | None = None,
    overrides: Sequence[str] = (),
    *,
    sweep: bool = True,
    config: str | Path | None = None,
) -> list[RunConfig]:
    """Every point that the overrides span, in their order, checked, without repetitions. Points share what they have
    in common: change a copy.

    Args:
        experiment: name of a file in experiments/; `experiment=NAME` among the overrides does the same.
            `tuned=MODEL` likewise puts what `selfspec tune` found in front of the user's own overrides.
        overrides: Hydra overrides; they win over those of the experiment.
        sweep: whether comma lists and ranges are allowed.
        config: a dumped config to start from instead of the schema's defaults.

    Raises:
        ConfigError: unknown key, choice or experiment (naming the nearest), a key given twice, a value out of range, or
            one that no point uses.
    """
    base = load_config(config) if config else None
    users = parse(overrides)
    _refuse_repeated(users)
    names, users = _split(EXPERIMENT, users)
    tuned, users = _split(TUNED, users)
    names = [experiment] if experiment else names
    grids = [parse(grid) for name in names for grid in experiment_overrides(name)] if names else [[]]
    composed: list[RunConfig] = []
    with open_files(base) as files:
        for grid, name in itertools.product(grids, tuned or [""]):
            best = _tuned_words(name, [*grid, *users], files) if name else []
            some = list(_points([*grid, *best, *users], sweep, files))
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
        before = first.setdefault(word.key, word)
        if before is word:
            continue
        typed = f"{before.typed} and {word.typed}"
        if before.typed.partition("=")[0] != word.typed.partition("=")[0]:
            raise ConfigError(f"{typed}: both are {word.key}; give one of them")
        raise ConfigError(f"{typed}: {word.key} is given twice; give it once, and several values as a list a,b")


def _split(key: str, words: list[Word]) -> tuple[list[str], list[Word]]:
    """The values of an override that names a file, and the other overrides."""
    names = [str(value) for word in words if word.key == key for value in word.values]
    return names, [word for word in words if word.key != key]


def _tuned_words(name: str, others: Sequence[Word], files: Files) -> list[Word]:
    """What `selfspec tune` found for the model of this command. others: the overrides that say which model it is.

    Raises:
        ConfigError: no model of that name was tuned, or another one was.
    """
    matches = []
    for file in find_tuned(name):
        words = [*parse(file.overrides), *others]
        model = [word for word in words if word.key in ("model", "seed") or word.key.startswith("model.")]
        matches.append((file, list(_points(model, True, files))))
    return parse(choose_tuned(name, matches).overrides)


def _points(words: Sequence[Word], sweep: bool, files: Files) -> Iterator[RunConfig]:
    """The points that the overrides span; of two overrides of one key the later wins."""
    axes: dict[str, list[_Choice]] = {}
    for word in words:
        if word.is_sweep and not sweep:
            raise ConfigError(f"{word.typed}: one point only here; `selfspec sweep` takes lists and ranges")
        axes.pop(word.key, None)
        axes[word.key] = _axis(word)
    for point in itertools.product(*axes.values()):
        made = files.compose(tuple(itertools.chain.from_iterable(choice.files for choice in point)))
        referred = {choice.key: choice.values[choice.key] for choice in point if choice.key in made.refers_to}
        cfg = made.config(referred)
        groups = [choice.values for choice in point if choice.key in GROUPS]
        settings = [choice.values for choice in point if choice.key not in GROUPS]
        yield _with(cfg, [*groups, *settings])


def _axis(word: Word) -> list[_Choice]:
    """What each value of an override asks for."""
    if word.key in GROUPS:
        return [_group_choice(word.key, value) for value in word.values]
    if word.key.startswith(f"{SPECULATIVE}."):  # below the mapping that was typed, or that of the choice
        return [_Choice(word.key, values={word.key: value}) for value in word.values]
    found = []
    for value, text in zip(word.values, word.texts, strict=True):
        if is_free_form(word.key):  # a key that is not there yet is no mistake, and a dict joins the one that is
            found.append(_Choice(word.key, files=(f"++{word.key}={text}",)))
        elif isinstance(value, str) and "${" in value:
            found.append(_Choice(word.key, files=(f"{word.key}={text}",)))
        else:
            found.append(_Choice(word.key, values={word.key: _converted(word, value)}))
    return found


def _group_choice(group: str, value: Any) -> _Choice:
    if group == SPECULATIVE and isinstance(value, dict):
        return _Choice(group, values={group: value})
    word = str(value)
    if word in file_choices(group):
        return _Choice(group, files=(f"+{group}={word}" if group in REGISTRY_GROUPS else f"{group}={word}",))
    if group in REGISTRY_GROUPS:
        return _Choice(group, values={group: of_registry(group, word)})
    if group == "model" and (model := named_model(word)) is not None:
        return _Choice(group, files=("model=custom",), values={"model.path": model.path, "model.name": model.name})
    further = ", ./FOLDER, or ORG/NAME of the Hugging Face Hub" if group == "model" else ""
    raise ConfigError(closest(word, choices(group), group, further=further))


def _converted(word: Word, value: Any) -> Any:
    """A value in the type of its setting, in range.

    Raises:
        ConfigError: it is of another type, or out of range.
    """
    section, _, name = word.key.rpartition(".")
    node = _types_of(section)
    try:
        node[name] = value
        found = node[name]
    except OmegaConfBaseException as error:
        raise ConfigError(f"{word.typed}: {_no_number(word, value) or first_line(error)}") from error
    if OmegaConf.is_config(found):
        raise ConfigError(f"{word.typed}: {word.key} takes one value, not a list or a mapping")
    option = option_of(word.key)
    assert option is not None  # a group has choices, and a free-form dict was left to Hydra
    if not admits(option, found):
        raise ConfigError(refusal(option, found))
    return found


def _no_number(word: Word, value: Any) -> str:
    """Why a value is none for a setting of numbers, and what is one; empty for a setting of another type."""
    option = option_of(word.key)
    if option is None or not option.is_number:
        return ""
    kind = "whole number" if int in (option.type, *get_args(option.type)) else "number"
    allowed = f" ({option.knob.allowed()})" if option.knob.allowed() else ""
    return f"{value!r} is no {kind}; allowed: a {kind}{allowed}, or several as a,b,c or range(start, stop, step)"


@cache
def _types_of(section: str) -> Any:
    """OmegaConf's node of a group, which converts what is set in it; of the schema itself for the empty name."""
    return OmegaConf.structured(get_type_hints(RunConfig)[section] if section else RunConfig)


def _with(cfg: RunConfig, changes: Sequence[Mapping[str, Any]]) -> RunConfig:
    """A copy with other values by dotted key; groups that do not change are shared."""
    made = copy.copy(cfg)
    copied: set[str] = set()
    for values in changes:
        for key, value in values.items():
            if key.startswith(f"{SPECULATIVE}."):
                made.speculative = _put(made.speculative, key.split(".")[1:], value)
                continue
            section, _, name = key.rpartition(".")
            if section and section not in copied:
                setattr(made, section, copy.copy(getattr(made, section)))
                copied.add(section)
            setattr(getattr(made, section) if section else made, name, value)
            copied.discard(key)
    return made


def _put(mapping: Mapping[str, Any], place: Sequence[str], value: Any) -> dict[str, Any]:
    """A copy of nested mappings with another value at a place."""
    inner = mapping.get(place[0])
    return {
        **mapping,
        place[0]: _put(inner if isinstance(inner, Mapping) else {}, place[1:], value) if place[1:] else value,
    }
