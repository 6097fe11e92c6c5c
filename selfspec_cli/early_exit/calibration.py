"""Fits the calibrated gate's map, from a gate statistic to acceptance probability, to logged drafts."""

from __future__ import annotations

import torch
from torch import Tensor

from selfspec_cli.early_exit.errors import SettingsError, closest
from selfspec_cli.early_exit.gate_rules import FEATURES, GATE_RULES, Calibration


def fit_calibration(feature: str, values: Tensor, accepted: Tensor, max_knots: int = 32) -> Calibration:
    """A monotone map by isotonic regression over equally filled bins.

    feature: which statistic (`gate_rules.FEATURES`). values: [n] statistics of drafted tokens. accepted: [n] bool or
    0/1, whether the verifier took the token. NaN statistics are left out. At most `max_knots` bins, each a knot at
    its mean value; pooling adjacent violators (Ayer et al. 1955) makes the bins' acceptance monotone in the gate's
    direction. Raises SettingsError for an unknown feature, unequal lengths, or nothing to fit to.
    """
    if feature not in FEATURES:
        raise SettingsError(closest(feature, FEATURES, "calibration feature"))
    if values.shape != accepted.shape or values.dim() != 1:
        raise SettingsError(f"values {list(values.shape)} and accepted {list(accepted.shape)} must be equal and 1-D")
    keep = torch.isfinite(values)
    xs, order = values[keep].double().cpu().sort()
    hits = accepted[keep].double().cpu()[order]
    if len(xs) == 0:
        raise SettingsError(f"no finite {feature!r} statistic was logged; nothing to calibrate on")
    bins = [
        (float(x.mean()), float(y.mean()), len(x))
        for x, y in zip(xs.tensor_split(max_knots), hits.tensor_split(max_knots), strict=True)
        if len(x)
    ]
    knots = _merge_equal(bins)
    rising = GATE_RULES[feature].direction == "at_least"
    sign = 1 if rising else -1
    rates = _pool_adjacent_violators([sign * rate for _, rate, _ in knots], [count for _, _, count in knots])
    ps = tuple(min(max(sign * rate, 0.0), 1.0) for rate in rates)
    return Calibration(feature, tuple(x for x, _, _ in knots), ps)


def _merge_equal(bins: list[tuple[float, float, int]]) -> list[tuple[float, float, int]]:
    """Joins bins of equal mean value, which repeated statistics produce: knots must ascend strictly."""
    merged: list[tuple[float, float, int]] = []
    for x, rate, count in bins:
        if merged and x <= merged[-1][0]:
            x0, rate0, count0 = merged.pop()
            total = count0 + count
            x, rate, count = x0, (rate0 * count0 + rate * count) / total, total
        merged.append((x, rate, count))
    return merged


def _pool_adjacent_violators(values: list[float], weights: list[int]) -> list[float]:
    """The non-decreasing sequence nearest to `values` in weighted squares."""
    pools: list[tuple[float, int, int]] = []  # mean, weight, how many values
    for value, weight in zip(values, weights, strict=True):
        mean, total, count = value, weight, 1
        while pools and pools[-1][0] >= mean:
            mean0, total0, count0 = pools.pop()
            mean = (mean0 * total0 + mean * total) / (total0 + total)
            total, count = total0 + total, count0 + count
        pools.append((mean, total, count))
    return [mean for mean, _, count in pools for _ in range(count)]
