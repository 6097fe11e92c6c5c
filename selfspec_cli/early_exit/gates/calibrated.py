"""The acceptance probability that was fitted to logged drafts: a monotone map of another gate's statistic.

The map is an isotonic fit (Zadrozny and Elkan, 2002; see calibrating.py). Because it is monotone, "the probability is
at least tau" is "the statistic is beyond the place where the map reaches tau": the gate is a rule on that statistic,
and neither a draft loop nor a device needs the map.
"""

import math
from itertools import pairwise
from typing import ClassVar

from selfspec_cli.early_exit.calibration import Calibration
from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.early_exit.gates.base import Direction, Gate, Rule


class CalibratedGate(Gate):
    """A gate that compares another gate's statistic; which one, a `Calibration` says."""

    needs_calibration: ClassVar[bool] = True

    def rule(self, threshold: float | None = None, calibration: Calibration | None = None) -> Rule:
        """As `Gate.rule`. Raises SettingsError without a calibration."""
        if calibration is None:
            raise SettingsError(f"gate {self.name!r} needs a calibration, as fitted from logged drafts")
        tau = self.default if threshold is None else threshold
        assert tau is not None
        direction: Direction = "at_least" if _rising(calibration) else "at_most"
        return Rule(calibration.feature, direction, _where_it_reaches(calibration, tau))

    def statistic_range(
        self, vocab_size: int | None = None, calibration: Calibration | None = None
    ) -> tuple[float, float]:
        """Of the probability, not of the statistic that it is read from."""
        return (0.0, 1.0) if calibration is None else (min(calibration.ps), max(calibration.ps))


def _rising(calibration: Calibration) -> bool:
    """Whether more of the statistic means a greater probability."""
    from selfspec_cli.early_exit.gates import GATES

    return GATES[calibration.feature].direction == "at_least"


def _where_it_reaches(calibration: Calibration, tau: float) -> float:
    """The value of the statistic from which on the map is at least `tau`; infinite where it always or never is."""
    rising = _rising(calibration)
    never = math.inf if rising else -math.inf
    # From the knot of the least probability to that of the greatest.
    knots = list(zip(calibration.xs, calibration.ps, strict=True))[:: 1 if rising else -1]
    if knots[0][1] >= tau:
        return -never  # the map is constant beyond its end knots
    for (x0, p0), (x1, p1) in pairwise(knots):
        if p1 >= tau:
            return x0 + (x1 - x0) * (tau - p0) / (p1 - p0)
    return never


GATE = CalibratedGate(
    name="calibrated",
    key="tau",
    direction="at_least",
    default=0.5,
    low=0.0,
    high=1.0,
    meaning="the calibrated acceptance probability",
    help="Go on drafting while the acceptance fitted from logged drafts (`selfspec roc`) is at least `tau`.",
    colour="#c9518d",
)
