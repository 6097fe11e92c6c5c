"""How a KEY=VALUE word can go on, for a shell: keys, then the choices and presets of a key."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from selfspec_cli.config import choices, options
from selfspec_cli.config.schema import GROUPS
from selfspec_cli.config.words import SETTINGS, other_names
from selfspec_cli.early_exit.knobs import Option


def candidates(word: str) -> list[tuple[str, str]]:
    """Whole words that begin with `word`, each with its help.

    >>> [text for text, _ in candidates("tracker.kind=n")]
    ['tracker.kind=none']
    """
    key, equals, value = word.partition("=")
    if not equals:
        offered = [(f"{name}=", text) for name, text in keys() if name.startswith(word)]
        rare = {row.key: row.help for row in options.rows(rare=True)}
        rare |= {name: f"another name of {key}" for name, key in other_names().items()}
        return offered or [(f"{name}=", text) for name, text in rare.items() if name.startswith(word)]
    before, comma, last = value.rpartition(",")
    given = before.split(",")
    return [(f"{key}={before}{comma}{name}", "") for name in values(key) if name.startswith(last) and name not in given]


def keys() -> Iterator[tuple[str, str]]:
    """Every key that is offered, and its help: groups, files, and the settings that are not rare."""
    yield choices.EXPERIMENT, "the points of a file of experiments/"
    yield choices.TUNED, "what `selfspec tune` found for a model"
    for group in GROUPS:
        yield group, f"a named set of the settings {group}.*"
    yield from ((row.key, row.help) for row in options.rows() if row.key not in GROUPS)


def values(key: str) -> Iterable[str]:
    """What a key can be set to, where that is a choice of words; nothing for numbers, text and unknown keys."""
    if key in GROUPS:
        return choices.choices(key)
    if key == choices.EXPERIMENT:
        return sorted(choices.experiment_files())
    if key == choices.TUNED:
        return choices.tuned_models()
    option = SETTINGS.get(key)
    return _words(option) if option is not None else ()


def _words(option: Option) -> Iterable[str]:
    return option.knob.words() or (("true", "false") if option.type in (bool, bool | None) else ())
