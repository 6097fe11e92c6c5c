"""Gates: after each draft step, is the draft worth continuing? Neither this package nor its gates import torch.

A gate compares one statistic of the draft distribution with a threshold. It never changes the output, only the cost:
the full model verifies whatever was drafted."""

import math
from contextlib import suppress
from numbers import Real

from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.early_exit.gates.base import THRESHOLD_KEYS, Gate, Rule
from selfspec_cli.early_exit.registry import Registry

__all__ = ["GATES", "Gate", "Rule", "check_threshold", "device_features", "features", "number", "require_device"]

GATES = Registry("gate", Gate, "selfspec_cli.early_exit.gates", "selfspec.gates", first="none")
"""Every gate by the name that users write."""


def features() -> tuple[str, ...]:
    """Gates that have a statistic of the logits, which draft logs hold."""
    return tuple(name for name, gate in GATES.items() if gate.statistic is not None)


def device_features() -> tuple[str, ...]:
    """Those of `features` that the CUDA kernel computes, in the order of its columns."""
    return tuple(name for name, gate in GATES.items() if gate.device is not None)


def require_device(rule: Rule) -> None:
    """Raise SettingsError for a rule on a statistic that the CUDA kernel does not compute."""
    supported = device_features()
    if rule.feature is not None and rule.feature not in supported:
        raise SettingsError(
            f"gate {rule.feature!r} has no device expression, so it runs on the CPU only; allowed on "
            f"CUDA: none, {', '.join(supported)}"
        )


def check_threshold(gate: str, value: object, key: str = "threshold") -> float | None:
    """A threshold for `gate`, checked, also on a live engine; None becomes the gate's default. Raises SettingsError for
    an unknown gate, or a value that is no finite number, out of range, or of a gate without a threshold."""
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
    with suppress(OverflowError):  # an integer that is too great for a float
        if isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    raise SettingsError(f"{key} = {value!r} must be a finite number")
