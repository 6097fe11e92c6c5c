"""Thresholds and calibrations, checked: what a gate accepts. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from numbers import Real
from typing import Any

from selfspec_cli.early_exit.calibration import Calibration
from selfspec_cli.early_exit.errors import SettingsError, closest
from selfspec_cli.early_exit.gates import GATES, Gate, features
from selfspec_cli.early_exit.gates.base import THRESHOLD_KEYS


def check_threshold(gate: str, value: object, key: str = "threshold") -> float | None:
    """A threshold for `gate`, checked; None becomes the gate's default. Also for changes on a live engine.

    Raises SettingsError for an unknown gate, a value that is no finite number, out of the gate's range, or given
    to a gate that has no threshold.
    """
    rule = _gate(gate)
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


def calibration_from_dict(data: Mapping[str, Any]) -> Calibration:
    """A `Calibration` from its JSON form {"feature", "xs", "ps"}, checked.

    Raises SettingsError for an unknown feature, knots that do not ascend, probabilities outside [0, 1] or not monotone
    in the feature's direction.
    """
    for key in data:
        if key not in ("feature", "xs", "ps"):
            raise SettingsError(closest(key, ("feature", "xs", "ps"), "calibration key"))
    feature = _feature(data.get("feature"))
    xs, ps = (_floats(data.get(key), f"calibration {key}") for key in ("xs", "ps"))
    if len(xs) != len(ps) or not xs:
        raise SettingsError(f"calibration needs as many xs as ps, at least one; given {len(xs)} and {len(ps)}")
    if any(right <= left for left, right in pairwise(xs)):
        raise SettingsError(f"calibration xs must ascend strictly: {xs}")
    if any(not 0 <= p <= 1 for p in ps):
        raise SettingsError(f"calibration ps must lie between 0 and 1: {ps}")
    rising = GATES[feature].direction == "at_least"
    if list(ps) != sorted(ps, reverse=not rising):
        raise SettingsError(f"calibration ps over {feature!r} must be {'rising' if rising else 'falling'}: {ps}")
    return Calibration(feature, xs, ps)


def number(value: object, key: str) -> float:
    """A finite number; raises SettingsError for anything else, `key` being its name."""
    if not _is_finite(value):
        raise SettingsError(f"{key} = {value!r} must be a finite number")
    return float(value)  # type: ignore[arg-type]


def _gate(name: object) -> Gate:
    return GATES[name if isinstance(name, str) else str(name)]


def _feature(name: object) -> str:
    if not isinstance(name, str) or name not in features():
        raise SettingsError(closest(name, features(), "calibration feature"))
    return name


def _floats(value: object, key: str) -> tuple[float, ...]:
    if not isinstance(value, (list, tuple)) or not all(map(_is_finite, value)):
        raise SettingsError(f"{key} = {value!r} must be a list of finite numbers")
    return tuple(float(item) for item in value)


def _is_finite(value: object) -> bool:
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer that is too great for a float
        return False
