"""Plain values as an instance of a schema: every key known, every value of its type and in its range."""

from __future__ import annotations

import types
from contextlib import suppress
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_origin, get_type_hints

from selfspec_cli.config.schema import ConfigError
from selfspec_cli.early_exit import knobs
from selfspec_cli.early_exit.errors import closest

_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", dict: "a mapping"}


def checked(schema: Any, content: Any, place: str) -> Any:
    """An instance of a dataclass of knobs. place: what its keys begin with in messages, such as `limits.`.

    Raises:
        ConfigError: a key that is not known, or a value of another type or out of its range.
    """
    if not isinstance(content, dict):
        raise ConfigError(f"{place.rstrip('.') or 'gateway'}: a mapping of settings is needed, not {content!r}")
    hints, known = get_type_hints(schema), [column.name for column in fields(schema)]
    for key in content:
        if key not in known:
            raise ConfigError(closest(f"{place}{key}", [f"{place}{one}" for one in known] or ["none"], "key"))
    made = schema(**{key: _value(hints[key], value, f"{place}{key}") for key, value in content.items()})
    for name, option in knobs.options(schema).items():
        if "." in name:  # checked with the mapping that it is in
            continue
        value, about = getattr(made, name), option.knob
        if option.is_number and not knobs.admits(option, value):
            raise ConfigError(f"{place}{name}={value}: allowed: {about.allowed()}")
        for word in value if isinstance(value, list) else [value]:
            if about.choices and word not in about.choices:
                raise ConfigError(about.wrong_word(word, f"{place}{name}"))
    return made


def _value(kind: Any, value: Any, place: str) -> Any:
    if is_dataclass(kind):
        return checked(kind, value, f"{place}.")
    if get_origin(kind) is list:
        if not isinstance(value, list):
            raise ConfigError(f"{place}={value!r}: a list is needed")
        (inner,) = get_args(kind)
        return [_value(inner, one, f"{place}.{index}") for index, one in enumerate(value)]
    if get_origin(kind) is types.UnionType:
        if value is None:
            return None
        kind = next(one for one in get_args(kind) if one is not type(None))
    wanted = dict if get_origin(kind) is dict else kind
    if wanted is float and not isinstance(value, bool):
        with suppress(TypeError, ValueError, OverflowError):
            return float(value)  # 3, and 1e-3, which YAML takes for text
    if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
        raise ConfigError(f"{place}={value!r}: {_WORDS.get(wanted, wanted.__name__)} is needed")
    return value
