"""How the calibrated gate's map is fitted to logged drafts. Free of scikit-learn until one is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from selfspec_cli.early_exit.calibration import Calibration
from selfspec_cli.early_exit.errors import SettingsError, closest
from selfspec_cli.early_exit.gates import GATES, features

if TYPE_CHECKING:
    from torch import Tensor


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
