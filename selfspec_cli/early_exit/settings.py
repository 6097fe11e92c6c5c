"""What a user may ask of early-exit drafting, read from vLLM's speculative_config and checked. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from numbers import Integral, Real
from typing import Any

from selfspec_cli.early_exit.calibration import Calibration
from selfspec_cli.early_exit.errors import SettingsError, closest
from selfspec_cli.early_exit.gates import GATES, Gate, features

METHODS = ("layer_skip", "skip")
"""layer_skip drafts and verifies; skip decodes with the first E layers and the head alone (lossy)."""

DRAFT_WEIGHTS = ("shared", "fp8")
"""shared: the draft runs on the target's own weights. fp8: on 8-bit (e4m3) copies of them, made at load; verification
keeps the target's own, so that the output does not change."""

THRESHOLD_KEYS = ("tau", "tau_v", "threshold")

USER_KEYS = (
    "method",
    "layer_skip",
    "num_speculative_tokens",
    "lsq_head_path",
    "head_path",
    "draft_weights",
    "gate",
    *THRESHOLD_KEYS,
    "calibration",
)
"""The keys of a speculative_config that this package reads; all others belong to vLLM."""


@dataclass(frozen=True)
class DraftSettings:
    """How drafts are made. Plain values only, so that it travels as JSON in vLLM's additional_config.

    layer: exit layer E; a draft step runs layers 0..E-1. num_speculative_tokens: draft length k.
    head_path: a head artifact; None is the lens (the model's own lm_head).
    gate, threshold: which gate ends a draft early, and when; threshold is None for gate "none" only
    (`from_user` fills in the gate's default). calibration: the map of gate "calibrated".
    verify: False is method "skip". draft_weights: one of DRAFT_WEIGHTS. Fields are checked by `from_user` and
    `from_dict`, not by the constructor.
    """

    layer: int
    num_speculative_tokens: int = 5
    head_path: str | None = None
    gate: str = "none"
    threshold: float | None = None
    verify: bool = True
    calibration: Calibration | None = None
    draft_weights: str = "shared"

    @classmethod
    def from_user(cls, spec: Mapping[str, Any], num_layers: int, *, passthrough: Collection[str] = ()) -> DraftSettings:
        """Settings from a speculative_config as users write it, for a model of `num_layers` layers.

        A key whose value is None counts as not given. Keys in `passthrough` (vLLM's own) are left alone.
        Raises SettingsError for an unknown key, a wrong type, or a value out of range.
        """
        for key in spec:
            if key not in USER_KEYS and key not in passthrough:
                raise SettingsError(closest(key, USER_KEYS, "speculative_config key"))
        given = {key: value for key, value in spec.items() if value is not None and key in USER_KEYS}
        method = _one_of(given.get("method", "layer_skip"), METHODS, "method")
        gate = _one_of(given.get("gate", "none"), GATES, "gate")
        if method == "skip" and gate != "none":
            raise SettingsError(f"gate {gate!r} is not used by method 'skip', which drafts nothing; allowed: none")
        weights = _one_of(given.get("draft_weights", "shared"), DRAFT_WEIGHTS, "draft_weights")
        if method == "skip" and weights != "shared":
            raise SettingsError(f"draft_weights {weights!r} is not used by method 'skip', which drafts nothing; "
                                "allowed: shared")  # fmt: skip
        return cls(
            layer=_exit_layer(given.get("layer_skip"), num_layers),
            num_speculative_tokens=_positive_int(given.get("num_speculative_tokens", 5), "num_speculative_tokens"),
            head_path=_head_path(given),
            gate=gate,
            threshold=_threshold(given, GATES[gate]),
            verify=method == "layer_skip",
            calibration=_calibration(given.get("calibration"), gate),
            draft_weights=weights,
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON form; `from_dict` gives back an equal object."""
        return {**asdict(self), "calibration": self.calibration and self.calibration.to_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> DraftSettings:
        """The inverse of `to_dict`. Raises SettingsError for unknown or missing fields and for wrong values."""
        names = [field.name for field in fields(cls)]
        for key in data:
            if key not in names:
                raise SettingsError(closest(key, names, "draft setting"))
        if "layer" not in data:
            raise SettingsError("draft setting 'layer' is missing")
        gate = _one_of(data.get("gate", "none"), GATES, "gate")
        path = data.get("head_path")
        return cls(
            layer=_positive_int(data["layer"], "layer"),
            num_speculative_tokens=_positive_int(data.get("num_speculative_tokens", 5), "num_speculative_tokens"),
            head_path=None if path is None else _string(path, "head_path"),
            gate=gate,
            threshold=check_threshold(gate, data.get("threshold")),
            verify=_boolean(data.get("verify", True), "verify"),
            calibration=_calibration(data.get("calibration"), gate),
            draft_weights=_one_of(data.get("draft_weights", "shared"), DRAFT_WEIGHTS, "draft_weights"),
        )


def check_threshold(gate: str, value: object, key: str = "threshold") -> float | None:
    """A threshold for `gate`, checked; None becomes the gate's default. Also for changes on a live engine.

    Raises SettingsError for an unknown gate, a value that is no finite number, out of the gate's range, or given
    to a gate that has no threshold.
    """
    rule = GATES[_one_of(gate, GATES, "gate")]
    if value is None:
        return rule.default
    if rule.key is None:
        users = [name for name, other in GATES.items() if key in (other.key, "threshold") and other.key]
        raise SettingsError(f"{key} = {value!r} is given but gate {gate!r} has no threshold; gates that use {key}: "
                            f"{', '.join(users)}")  # fmt: skip
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise SettingsError(f"{key} = {value!r} must be a finite number")
    threshold = float(value)
    if not rule.low <= threshold <= rule.high:
        allowed = "at least 0" if math.isinf(rule.high) else f"from {rule.low:g} to {rule.high:g}"
        raise SettingsError(f"{key} = {value!r} is out of range for gate {gate!r}; allowed: {allowed}")
    return threshold


def warnings_for(settings: DraftSettings, vocab_size: int | None = None) -> list[str]:
    """Names a threshold that can never close, or (but for rounding) never open, its gate; else empty.

    vocab_size: size of the draft vocabulary, which bounds entropy and varentropy; unknown is taken as very large.
    """
    rule, threshold = GATES[settings.gate], settings.threshold
    if rule.key is None or threshold is None:
        return []
    least, greatest = rule.statistic_range(vocab_size, settings.calibration)
    at_least = rule.direction == "at_least"
    never_closes = threshold <= least if at_least else threshold >= greatest
    never_opens = threshold > greatest if at_least else threshold < least
    at_the_edge = threshold == (greatest if at_least else least)
    start = f"gate {rule.name!r} with {rule.key} = {threshold:g}"
    end = f"{rule.meaning} lies between {least:.3g} and {greatest:.3g}"
    if never_closes:
        return [f"{start} never closes ({end}): it is the same as gate 'none'"]
    if never_opens:
        return [f"{start} never opens ({end}): every draft ends after its first step"]
    if at_the_edge:
        return [f"{start} never opens but for ties by rounding ({end}): drafts end after their first step"]
    return []


def calibration_from_dict(data: Mapping[str, Any]) -> Calibration:
    """A `Calibration` from its JSON form {"feature", "xs", "ps"}, checked.

    Raises SettingsError for an unknown feature, knots that do not ascend, probabilities outside [0, 1] or not monotone
    in the feature's direction.
    """
    for key in data:
        if key not in ("feature", "xs", "ps"):
            raise SettingsError(closest(key, ("feature", "xs", "ps"), "calibration key"))
    feature = _one_of(data.get("feature"), features(), "calibration feature")
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


def _one_of(value: object, allowed: Collection[str], noun: str) -> str:
    if not isinstance(value, str) or value not in allowed:
        raise SettingsError(closest(value, allowed, noun))
    return value


def _positive_int(value: object, key: str) -> int:
    # bool is an int to Python, but never a number of layers or tokens.
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise SettingsError(f"{key} = {value!r} must be an integer, not {type(value).__name__}")
    if int(value) < 1:
        raise SettingsError(f"{key} = {value!r} is out of range; allowed: 1 or more")
    return int(value)


def _exit_layer(value: object, num_layers: int) -> int:
    if num_layers < 2:
        raise SettingsError(f"a model of {num_layers} layer(s) has no exit layer; at least 2 layers are needed")
    if value is None:
        return num_layers // 2
    inside = f"allowed: 1 to {num_layers - 1} (the model has {num_layers} layers)"
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise SettingsError(f"layer_skip = {value!r} must be an integer, not {type(value).__name__}; {inside}")
    if not 1 <= int(value) < num_layers:
        raise SettingsError(f"layer_skip = {value!r} is out of range; {inside}")
    return int(value)


def _string(value: object, key: str) -> str:
    if not isinstance(value, str) or not value:
        raise SettingsError(f"{key} = {value!r} must be a path")
    return value


def _boolean(value: object, key: str) -> bool:
    if not isinstance(value, bool):
        raise SettingsError(f"{key} = {value!r} must be true or false")
    return value


def _floats(value: object, key: str) -> tuple[float, ...]:
    good = isinstance(value, (list, tuple)) and all(
        isinstance(item, Real) and not isinstance(item, bool) and math.isfinite(item) for item in value
    )
    if not good:
        raise SettingsError(f"{key} = {value!r} must be a list of finite numbers")
    return tuple(float(item) for item in value)  # type: ignore[attr-defined]


def _head_path(given: Mapping[str, Any]) -> str | None:
    names = [key for key in ("lsq_head_path", "head_path") if key in given]
    if len(names) == 2 and given[names[0]] != given[names[1]]:
        raise SettingsError(f"lsq_head_path = {given[names[0]]!r} and head_path = {given[names[1]]!r} mean the same "
                            "setting; give one")  # fmt: skip
    return _string(given[names[0]], names[0]) if names else None


def _threshold(given: Mapping[str, Any], rule: Gate) -> float | None:
    keys = [key for key in THRESHOLD_KEYS if key in given]
    if len(keys) > 1:
        raise SettingsError(f"{' and '.join(keys)} are thresholds of one gate; give one of them")
    if not keys:
        return rule.default
    key = keys[0]
    if rule.key is not None and key not in (rule.key, "threshold"):
        users = [name for name, other in GATES.items() if other.key == key]
        allowed = " or ".join(dict.fromkeys((rule.key, "threshold")))
        raise SettingsError(f"{key} = {given[key]!r} is not used by gate {rule.name!r}, which takes {allowed}; "
                            f"gates that use {key}: {', '.join(users)}")  # fmt: skip
    return check_threshold(rule.name, given[key], key)


def _calibration(value: object, gate: str) -> Calibration | None:
    if gate != "calibrated":
        if value is not None:
            raise SettingsError(f"calibration is given but gate {gate!r} does not use it; gates that do: calibrated")
        return None
    if not isinstance(value, Mapping):
        raise SettingsError("gate 'calibrated' needs calibration: {feature, xs, ps}, as fitted from logged drafts")
    return calibration_from_dict(value)
