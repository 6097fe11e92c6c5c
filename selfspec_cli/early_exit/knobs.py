"""What a setting is, declared with its dataclass field: help, unit, range, choices, keys. Free of torch.

A schema is any dataclass whose fields are made by `knob`, or are such dataclasses themselves; other fields are no
settings. Validation, `--help`, `selfspec options` and docs/reference.md read it."""

import math
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cache, cached_property
from operator import attrgetter
from typing import Any, get_args, get_type_hints

from selfspec_cli.early_exit.errors import closest

_METADATA = "knob"


@dataclass(frozen=True)
class Knob:
    """One setting; its name, type and default are the dataclass field's.
    help: one line. unit: of a number. low, high: least and greatest value allowed; above: values must be greater.
    because: why, for messages. limits: the range in words where other code checks it. choices: the words allowed, such
    as a registry. unset: what None means. spec_keys: its keys in a speculative_config, the first being the one that
    selfspec writes. of_vllm: those keys are vLLM's own, and are handed on to it. methods: the methods that use it;
    empty where all do. arm: two of its values are two arms, which it tells apart by itself in keys, rows and tuned
    files. rare: shown by `selfspec options --all`."""

    help: str
    unit: str = ""
    low: float | None = None
    above: float | None = None
    high: float | None = None
    because: str = ""
    limits: str = ""
    choices: Collection[str] = ()
    unset: str = ""
    spec_keys: tuple[str, ...] = ()
    of_vllm: bool = False
    methods: tuple[str, ...] = ()
    arm: bool = False
    rare: bool = False

    def words(self) -> tuple[str, ...]:
        """The words allowed; empty where any text or number is."""
        return tuple(map(str, self.choices))

    def wrong_word(self, word: object, noun: str) -> str:
        """The message for a word that is no choice: why a registry cannot have it, or the nearest that is one."""
        broken: Mapping[str, str] = getattr(self.choices, "broken", {})
        return broken.get(str(word)) or closest(word, self.words(), noun)

    def allowed(self) -> str:
        """The range in words; empty where there is none."""
        if self.limits:
            return self.limits
        if self.above is not None:
            return f"more than {self.above:g}" + (f", up to {self.high:g}" if self.high is not None else "")
        if self.low is not None:
            return f"from {self.low:g} to {self.high:g}" if self.high is not None else f"{self.low:g} or more"
        return ""

    def admits(self, value: float) -> bool:
        """Whether a number lies in the range; NaN and infinity lie in none."""
        return (
            (isinstance(value, int) or math.isfinite(value))  # an integer may be too great for a float
            and (self.low is None or value >= self.low)
            and (self.above is None or value > self.above)
            and (self.high is None or value <= self.high)
        )


def knob(default: Any = MISSING, *, factory: Callable[[], Any] | None = None, **about: Any) -> Any:
    """A dataclass field for a setting. factory: makes a mutable default. about: the fields of `Knob`."""
    metadata = {_METADATA: Knob(**about)}
    return field(default_factory=factory, metadata=metadata) if factory else field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Option:
    """A knob in its schema. key: as a user types it, such as gate.kind. type: the type of its values."""

    key: str
    type: Any
    default: Any
    knob: Knob

    @cached_property
    def is_number(self) -> bool:
        return bool({int, float} & {self.type, *get_args(self.type)})


@cache
def options(schema: Hashable) -> dict[str, Option]:
    """Every knob of a dataclass and of the dataclasses in it, by its dotted key, in the order of the fields."""
    assert isinstance(schema, type)
    return {option.key: option for option in _options(schema, "")}


def _options(schema: type, above: str) -> Iterator[Option]:
    hints = get_type_hints(schema)
    for column in fields(schema):
        kind = hints[column.name]
        if is_dataclass(kind):
            assert isinstance(kind, type)
            yield from _options(kind, f"{above}{column.name}.")
        elif _METADATA in column.metadata:  # other fields are no settings
            factory = column.default_factory
            default = column.default if factory is MISSING else factory()
            yield Option(f"{above}{column.name}", kind, default, column.metadata[_METADATA])


def out_of_range(config: Any) -> Iterator[tuple[Option, Any]]:
    """Every option of a config whose value it does not admit, with that value."""
    schema: type = type(config)
    for option in options(schema).values():
        value = read(config, option.key)
        if not admits(option, value):
            yield option, value


def admits(option: Option, value: Any) -> bool:
    """Whether the range and the choices of an option admit a value of its type; a default they always do."""
    if value is None or value == option.default:
        return True
    if words := option.knob.words():
        return str(value) in words
    return not option.is_number or bool(option.knob.limits) or option.knob.admits(value)


def refusal(option: Option, value: Any) -> str:
    """The message for a value that an option does not admit."""
    about = option.knob
    if about.words():
        return about.wrong_word(value, option.key)
    because = f", because {about.because}" if about.because else ""
    return f"{option.key}={value}: out of range; allowed: {about.allowed()}{because}"


def read(config: Any, key: str) -> Any:
    return attrgetter(key)(config)


def write(config: Any, key: str, value: Any) -> None:
    *above, name = key.split(".")
    setattr(read(config, ".".join(above)) if above else config, name, value)
