"""JSON of any size of integers: by orjson, and by the standard library where a number does not fit into 64 bits."""

from __future__ import annotations

import json
import re
from typing import Any

import orjson

_LONG = re.compile(rb"\d{19}")


def loads(raw: bytes) -> Any:
    """The value of a JSON document; raises ValueError (or RecursionError, for very deep nesting)."""
    return json.loads(raw) if _LONG.search(raw) else orjson.loads(raw)


def dumps(value: Any) -> bytes:
    """A value as JSON.

    Raises:
        ValueError: it is nested too deeply.
    """
    try:
        return orjson.dumps(value)
    except TypeError:
        try:
            return json.dumps(value, separators=(",", ":")).encode()
        except RecursionError as error:
            raise ValueError(f"it cannot be written as JSON: {error}") from error
