"""The gates as data: what each compares, in which direction, over which range. Free of torch.

`gates.py` adds the statistic functions; `settings.py` checks what users write against these rules.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

ADAEDL_GAMMA = 0.2
"""Weight of the entropy in AdaEDL's bound 1 - sqrt(gamma * H); the paper's setting (arXiv:2410.18351)."""

LARGEST_VOCABULARY = 2**20
"""Stands in for a vocabulary size that is not known; no released model has more tokens."""

Direction = Literal["at_least", "at_most"]


@dataclass(frozen=True)
class GateRule:
    """How one gate decides, apart from how its statistic is computed.

    name: what users write. key: the speculative_config key of its threshold (None: it has no threshold).
    direction: the gate is open while the statistic is at least, or at most, the threshold.
    default: threshold when none is given. low, high: thresholds allowed (inclusive). meaning: for messages.
    """

    name: str
    key: str | None
    direction: Direction
    default: float | None
    low: float
    high: float
    meaning: str


@dataclass(frozen=True)
class Calibration:
    """A monotone piecewise-linear map from a gate statistic to acceptance probability.

    feature: name of the statistic. xs: knots, strictly ascending. ps: probability at each knot, monotone in the
    feature's own direction (rising for "at_least" features, falling for "at_most"). Constant beyond the end knots.
    """

    feature: str
    xs: tuple[float, ...]
    ps: tuple[float, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON form; `settings.calibration_from_dict` reads it back and checks it."""
        return {"feature": self.feature, "xs": list(self.xs), "ps": list(self.ps)}


_RULES = (
    GateRule("none", None, "at_least", None, 0.0, 0.0, "a constant"),
    GateRule("maxp", "tau", "at_least", 0.35, 0.0, 1.0, "the largest draft probability"),
    GateRule("varH", "tau_v", "at_most", 5.0, 0.0, math.inf, "the varentropy in squared nats"),
    GateRule("entropy", "threshold", "at_most", 2.0, 0.0, math.inf, "the entropy in nats"),
    GateRule("margin", "tau", "at_least", 0.3, 0.0, 1.0, "the gap between the two largest probabilities"),
    GateRule("adaedl", "tau", "at_least", 0.4, 0.0, 1.0, "AdaEDL's lower bound on acceptance"),
    GateRule("survival", "tau", "at_least", 0.3, 0.0, 1.0, "the product of the largest probabilities so far"),
    GateRule("calibrated", "tau", "at_least", 0.5, 0.0, 1.0, "the calibrated acceptance probability"),
)

GATE_RULES: dict[str, GateRule] = {rule.name: rule for rule in _RULES}
"""Every gate by name, in the order in which messages list them."""

FEATURES: tuple[str, ...] = ("maxp", "varH", "entropy", "margin", "adaedl", "survival")
"""The statistics that are computed from logits alone (and survival): what is logged, and what may be calibrated."""


def statistic_range(
    name: str, vocab_size: int | None = None, calibration: Calibration | None = None
) -> tuple[float, float]:
    """Least and greatest value that gate `name`'s statistic can take over a vocabulary of `vocab_size` tokens.

    The greatest varentropy over V outcomes is below log(V - 1)^2 / 4 + 1 (Reeb and Wolf, arXiv:1304.0036).
    """
    log_v = math.log(max(vocab_size or LARGEST_VOCABULARY, 2))
    if name == "varH":
        return 0.0, log_v**2 / 4 + 1
    if name == "entropy":
        return 0.0, log_v
    if name == "adaedl":
        return 1 - math.sqrt(ADAEDL_GAMMA * log_v), 1.0
    if name == "calibrated" and calibration is not None:
        return min(calibration.ps), max(calibration.ps)
    return 0.0, 1.0


@dataclass(frozen=True)
class FeatureRule:
    """A gate as a comparison of one logged statistic: open while `feature` is at_least, or at_most, `threshold`.

    feature None: always open.
    """

    feature: str | None
    direction: Direction
    threshold: float


def on_feature(kind: str, threshold: float | None, calibration: Calibration | None = None) -> FeatureRule:
    """Gate `kind` as a rule on a statistic of `FEATURES`; threshold None is the gate's default.

    The calibrated gate's map is monotone, so "probability at least tau" is "statistic beyond the place where the map
    reaches tau": that place is found here, and a device needs no map.
    """
    rule = GATE_RULES[kind]
    limit = rule.default if threshold is None else threshold
    if limit is None:
        return FeatureRule(None, "at_least", 0.0)
    if kind != "calibrated":
        return FeatureRule(kind, rule.direction, limit)
    assert calibration is not None
    direction = GATE_RULES[calibration.feature].direction
    rising = direction == "at_least"
    never = math.inf if rising else -math.inf
    # From the knot of the least probability to that of the greatest.
    knots = list(zip(calibration.xs, calibration.ps, strict=True))[:: 1 if rising else -1]
    if knots[0][1] >= limit:
        return FeatureRule(calibration.feature, direction, -never)  # the map is constant beyond its end knots
    for (x0, p0), (x1, p1) in pairwise(knots):
        if p1 >= limit:
            return FeatureRule(calibration.feature, direction, x0 + (x1 - x0) * (limit - p0) / (p1 - p0))
    return FeatureRule(calibration.feature, direction, never)
