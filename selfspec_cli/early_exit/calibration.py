"""The calibrated gate's map, from a gate statistic to acceptance probability: what it is. calibrating.py fits one.

Free of torch until a map is applied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
