"""JSON of any size of integers: by orjson, and by the standard library where a number does not fit into 64 bits."""

from __future__ import annotations

import json
import re
from typing import Any

import orjson

_LONG = re.compile(rb"\d{19}")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def loads(raw: bytes) -> Any:
    """The value of a JSON document.

    Raises:
        ValueError: it is none, is nested too deeply, or holds what is no Unicode text or no number.
    """
    if not _LONG.search(raw):
        return orjson.loads(raw)
    try:
        value = json.loads(raw, parse_constant=_refuse)
        if _SURROGATE.search(raw):  # half of a pair can be neither hashed, nor logged, nor sent
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return value


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no number")


def dumps(value: Any) -> bytes:
    """A value as JSON.

    Raises:
        ValueError: it is nested too deeply.
    """
    try:
        return orjson.dumps(value)
    except TypeError:
        try:
            return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
        except RecursionError as error:
            raise ValueError(f"it cannot be written as JSON: {error}") from error
