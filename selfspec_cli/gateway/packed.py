"""JSON by pydantic's own reader and writer: integers of any size, and only what another reader takes too."""

from typing import Any

from pydantic_core import from_json, to_json


def loads(raw: bytes) -> Any:
    """The value of a JSON document.

    Raises:
        ValueError: it is none, is nested too deeply, or holds what is no Unicode text or no number.
    """
    return from_json(raw, allow_inf_nan=False)


def dumps(value: Any) -> bytes:
    """A value as JSON.

    Raises:
        ValueError: it is nested too deeply.
    """
    return to_json(value, inf_nan_mode="null")
