"""Every setting in words: `selfspec options`, `--help`, docs/reference.md; and how a KEY=VALUE word can go on."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, get_args

from selfspec_cli.config import tuned
from selfspec_cli.config.choices import EXPERIMENT, TUNED, experiment_files
from selfspec_cli.config.choices import choices as choices_of
from selfspec_cli.config.schema import GROUPS, RunConfig
from selfspec_cli.early_exit import knobs, settings
from selfspec_cli.early_exit.contexts import CONTEXTS, own_keys
from selfspec_cli.early_exit.contexts import SETTING as CONTEXT
from selfspec_cli.early_exit.draft_weights import DRAFT_WEIGHTS
from selfspec_cli.early_exit.errors import nearest
from selfspec_cli.early_exit.gates import GATES
from selfspec_cli.early_exit.gates.base import THRESHOLD_KEYS
from selfspec_cli.early_exit.heads import HEADS

SETTINGS = knobs.options(RunConfig)  # every setting by its dotted key

OTHER_NAMES = (
    dict.fromkeys(THRESHOLD_KEYS[1:], THRESHOLD_KEYS[0])
    | {"workload.path": "workload.prompts"}
    | dict.fromkeys(own_keys(), CONTEXT)
)
"""Other names of settings, each with the setting that it means."""

RARE = frozenset(option.key for option in SETTINGS.values() if option.knob.rare)
"""Settings that no user needs, shown by `selfspec options --all`, or for a word that they hold."""

_TYPES = {int: "integer", float: "number", bool: "true or false", str: "text", Any: "text"}


@dataclass(frozen=True)
class Row:
    """One setting in words. spec_key: its key in a speculative_config, empty where it has none."""

    key: str
    type: str
    unit: str
    allowed: str
    default: str
    help: str
    spec_key: str


@dataclass(frozen=True)
class Choice:
    """One name of a registry. default: threshold of a gate; empty for others."""

    key: str
    name: str
    default: str
    help: str


def rows(word: str = "", *, rare: bool = False) -> list[Row]:
    """The settings whose key or help holds `word`; without a word all that are not rare. rare: the rare ones too."""
    made = [_row(option) for option in SETTINGS.values() if word or rare or option.key not in RARE]
    return [row for row in made if word.lower() in f"{row.key} {row.spec_key} {row.help}".lower()]


def choices(word: str = "") -> list[Choice]:
    """Every gate, head kind and kind of draft weights of which `word` is part of the key, the name or the help."""
    gates = [(gate, f"{gate.key}={gate.default:g}" if gate.key else "") for gate in GATES.values()]
    made = [Choice("gate", gate.name, threshold, gate.help) for gate, threshold in gates]
    made += [Choice("head", kind.name, "", kind.help) for kind in HEADS.values()]
    made += [Choice("draft_weights", kind.name, "", kind.help) for kind in DRAFT_WEIGHTS.values()]
    made += [Choice("draft_context", kind.name, "", f"{kind.form()}: {kind.help}") for kind in CONTEXTS.values()]
    return [one for one in made if word.lower() in f"{one.key} {one.name} {one.help}".lower()]


def unknown(word: str) -> str:
    near = nearest(word, [row.key for row in rows(rare=True)] + [one.name for one in choices()])
    meant = f"did you mean {near!r}? " if near else ""
    return f"no setting or choice has {word!r} in its name or description; {meant}selfspec options lists them all"


def draft_rows() -> list[Row]:
    """The settings of drafting that are not rare, for the commands' `--help`."""
    return [_row(option) for option in settings.OPTIONS.values() if option.key not in RARE]


def _row(option: knobs.Option) -> Row:
    about = option.knob
    kinds = [kind for kind in (get_args(option.type) or (option.type,)) if kind is not type(None)]
    words = about.words()
    kind = "word" if words else _TYPES.get(option.type if option.type is Any else kinds[0], "text")
    kind = "mapping" if getattr(option.type, "__origin__", None) is dict else kind
    default = f"{option.default:g}" if isinstance(option.default, float) else str(option.default)
    if option.default is None:
        default = about.unset or "none"
    elif isinstance(option.default, bool):
        default = default.lower()
    spec_key = about.spec_keys[0] if about.spec_keys else ""
    return Row(option.key, kind, about.unit, ", ".join(words) or about.allowed(), default, about.help, spec_key)


# ---- how a word can go on, for a shell ------------------------------------------------------------------------------


def candidates(word: str) -> list[tuple[str, str]]:
    """Whole words that begin with `word`, each with its help.

    >>> [text for text, _ in candidates("tracker.kind=n")]
    ['tracker.kind=none']
    """
    key, equals, value = word.partition("=")
    if not equals:
        offered = [(f"{name}=", text) for name, text in _keys() if name.startswith(word)]
        rare = {row.key: row.help for row in rows(rare=True)}
        rare |= {name: f"another name of {key}" for name, key in OTHER_NAMES.items()}
        return offered or [(f"{name}=", text) for name, text in rare.items() if name.startswith(word)]
    before, comma, last = value.rpartition(",")
    names = [name for name in _values(key) if name.startswith(last) and name not in before.split(",")]
    return [(f"{key}={before}{comma}{name}", "") for name in names]


def _keys() -> Iterator[tuple[str, str]]:
    """Every key that is offered, and its help: groups, files, and the settings that are not rare."""
    yield EXPERIMENT, "the points of a file of experiments/"
    yield TUNED, "what `selfspec tune` found for a model"
    for group in GROUPS:
        yield group, f"a named set of the settings {group}.*"
    yield from ((row.key, row.help) for row in rows() if row.key not in GROUPS)


def _values(key: str) -> Iterable[str]:
    """What a key can be set to, where that is a choice of words; nothing for numbers, text and unknown keys."""
    if key in GROUPS:
        return choices_of(key)
    if key == EXPERIMENT:
        return sorted(experiment_files())
    if key == TUNED:
        return tuned.models()
    option = SETTINGS.get(key)
    if option is None:
        return ()
    return option.knob.words() or (("true", "false") if option.type in (bool, bool | None) else ())
