"""What a setting is, written beside the dataclass field that holds it: help, unit, range, choices, keys. Free of torch.

Validation, `--help`, `selfspec options` and the table in the README are loops over these; a schema is any dataclass
whose fields are made by `knob`, or are such dataclasses themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cache
from numbers import Real
from typing import Any, get_args, get_type_hints

Choices = tuple[str, ...] | Callable[[], Iterable[str]]

_METADATA = "knob"


@dataclass(frozen=True)
class Knob:
    """One setting, beside its name, type and default, which are the dataclass field's own.

    help: one line. unit: of a number. low, high: least and greatest value allowed; above: values must be greater.
    limits: the range in words where it depends on something else; other code checks it. choices: the words allowed, or
    a function that says them. unset: what None stands for. spec_keys: its keys in a speculative_config, the first being
    the one that selfspec writes. of_vllm: those keys are vLLM's own, and are handed on to it. methods: the methods that
    use it; empty where all do.
    """

    help: str
    unit: str = ""
    low: float | None = None
    above: float | None = None
    high: float | None = None
    limits: str = ""
    choices: Choices = ()
    unset: str = ""
    spec_keys: tuple[str, ...] = ()
    of_vllm: bool = False
    methods: tuple[str, ...] = ()

    def words(self) -> tuple[str, ...]:
        """The words allowed; empty where any text or number is."""
        return tuple(map(str, self.choices() if callable(self.choices) else self.choices))

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
            math.isfinite(value)
            and (self.low is None or value >= self.low)
            and (self.above is None or value > self.above)
            and (self.high is None or value <= self.high)
        )


def knob(default: Any = MISSING, *, factory: Callable[[], Any] | None = None, **about: Any) -> Any:
    """A dataclass field that says what it is.

    Args:
        factory: makes the default, where that is a dict or a list. about: the fields of `Knob`.
    """
    metadata = {_METADATA: Knob(**about)}
    return field(default_factory=factory, metadata=metadata) if factory else field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Option:
    """A knob where it stands in a schema. key: as a user types it, such as gate.kind. type: the type of its values."""

    key: str
    type: Any
    default: Any
    knob: Knob

    @property
    def is_number(self) -> bool:
        """Whether its values are numbers."""
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
        else:
            factory = column.default_factory
            default = column.default if factory is MISSING else factory()
            yield Option(f"{above}{column.name}", kind, default, column.metadata[_METADATA])


def out_of_range(config: Any) -> Iterator[tuple[Option, Any]]:
    """Every knob of a config whose value its range or its choices do not admit, with that value."""
    for key, option in options(type(config)).items():  # type: ignore[arg-type]
        value = read(config, key)
        if value is None:
            continue
        words = option.knob.words()
        number = isinstance(value, Real) and not isinstance(value, bool)
        if (words and str(value) not in words) or (number and not option.knob.limits and not option.knob.admits(value)):
            yield option, value


def read(config: Any, key: str) -> Any:
    """The value of a dotted key."""
    for part in key.split("."):
        config = getattr(config, part)
    return config


def write(config: Any, key: str, value: Any) -> None:
    """Set the value of a dotted key, in place."""
    *above, name = key.split(".")
    setattr(read(config, ".".join(above)) if above else config, name, value)
