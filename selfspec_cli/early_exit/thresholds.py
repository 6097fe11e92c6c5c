"""Thresholds, checked: what a gate accepts. Free of torch."""

from __future__ import annotations

import math
from numbers import Real

from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.early_exit.gates import GATES
from selfspec_cli.early_exit.gates.base import THRESHOLD_KEYS


def check_threshold(gate: str, value: object, key: str = "threshold") -> float | None:
    """A threshold for `gate`, checked; None becomes the gate's default. Also for changes on a live engine.

    Raises SettingsError for an unknown gate, a value that is no finite number, out of the gate's range, or given
    to a gate that has no threshold.
    """
    rule = GATES[gate if isinstance(gate, str) else str(gate)]
    if value is None:
        return rule.default
    if rule.key is None:
        own = key if key in THRESHOLD_KEYS else "threshold"  # an entry of a table, or a request, uses the latter
        users = [name for name, other in GATES.items() if own in (other.key, "threshold") and other.key]
        raise SettingsError(
            f"{key} = {value!r} is given but gate {gate!r} has no threshold; gates that use {own}: {', '.join(users)}"
        )
    threshold = number(value, key)
    if not rule.low <= threshold <= rule.high:
        allowed = "at least 0" if math.isinf(rule.high) else f"from {rule.low:g} to {rule.high:g}"
        raise SettingsError(f"{key} = {value!r} is out of range for gate {gate!r}; allowed: {allowed}")
    return threshold


def number(value: object, key: str) -> float:
    """A finite number; raises SettingsError for anything else, `key` being its name."""
    if not _is_finite(value):
        raise SettingsError(f"{key} = {value!r} must be a finite number")
    return float(value)  # type: ignore[arg-type]


def _is_finite(value: object) -> bool:
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer that is too great for a float
        return False
