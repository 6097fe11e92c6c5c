"""The calibrated gate's map, from a gate statistic to acceptance probability: what it is, how it is read and fitted.

Free of torch and scikit-learn until a map is applied or fitted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from selfspec_cli.early_exit.errors import SettingsError, closest
from selfspec_cli.early_exit.gates import GATES, features

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Calibration:
    """A monotone piecewise-linear map from a gate statistic to acceptance probability.

    feature: name of the statistic. xs: knots, strictly ascending. ps: probability at each knot, monotone in the
    feature's own direction (rising for "at_least" features, falling for "at_most"). Constant beyond the end knots.
    """

    feature: str
    xs: tuple[float, ...]
    ps: tuple[float, ...]

    @property
    def rising(self) -> bool:
        """Whether more of the statistic means a greater probability."""
        return GATES[self.feature].direction == "at_least"

    def probability(self, values: Tensor) -> Tensor:
        """The map at `values`, float32 of any shape -> the same shape, in [0, 1]. NaN stays NaN."""
        import torch

        if len(self.xs) == 1:
            return values * 0 + self.ps[0]  # keeps NaN
        # float64, in which the knots were given: two of them may be one number in float32, and the slope 0 / 0.
        xs, ps = torch.tensor([self.xs, self.ps], dtype=torch.float64, device=values.device)
        inside = values.double().clamp(xs[0], xs[-1])
        right = torch.searchsorted(xs, inside.contiguous()).clamp(1, len(xs) - 1)
        x0, x1, p0, p1 = xs[right - 1], xs[right], ps[right - 1], ps[right]
        return (p0 + (p1 - p0) * (inside - x0) / (x1 - x0)).to(values.dtype)

    def to_dict(self) -> dict[str, Any]:
        """JSON form; `thresholds.calibration_from_dict` reads it back and checks it."""
        return {"feature": self.feature, "xs": list(self.xs), "ps": list(self.ps)}


def fit_calibration(feature: str, values: Tensor, accepted: Tensor, max_knots: int = 32) -> Calibration:
    """A monotone map by isotonic regression (scikit-learn's) over equally filled bins.

    feature: which statistic (one of `gates.features`). values: [n] statistics of drafted tokens. accepted: [n] bool or
    0/1, whether the verifier took the token. NaN statistics are left out. At most `max_knots` bins, each a knot at its
    mean value; knots that change nothing about the map are dropped. Raises SettingsError for an unknown feature,
    unequal lengths, or nothing to fit to.
    """
    if feature not in features():
        raise SettingsError(closest(feature, features(), "calibration feature"))
    if values.shape != accepted.shape or values.dim() != 1:
        raise SettingsError(f"values {list(values.shape)} and accepted {list(accepted.shape)} must be equal and 1-D")
    keep = values.isfinite()
    xs, order = values[keep].double().cpu().sort()
    hits = accepted[keep].double().cpu()[order]
    if len(xs) == 0:
        raise SettingsError(f"no finite {feature!r} statistic was logged; nothing to calibrate on")
    bins = [
        (float(x.mean()), float(y.mean()), len(x))
        for x, y in zip(xs.tensor_split(max_knots), hits.tensor_split(max_knots), strict=True)
        if len(x)
    ]
    return _isotonic(feature, *map(list, zip(*bins, strict=True)))


def _isotonic(feature: str, xs: list[float], rates: list[float], counts: list[float]) -> Calibration:
    from sklearn.isotonic import IsotonicRegression

    rising = GATES[feature].direction == "at_least"
    fitted = IsotonicRegression(y_min=0.0, y_max=1.0, increasing=rising).fit(xs, rates, sample_weight=counts)
    return Calibration(feature, tuple(fitted.X_thresholds_.tolist()), tuple(fitted.y_thresholds_.tolist()))
