"""Gates: after each draft step, is the draft worth continuing? Pure functions of the draft logits.

A gate compares one statistic per request with a threshold. It never changes the output, only the cost: the full
model verifies whatever was drafted. Statistics are computed in float32 from logits [N, V] of any float type; p is
softmax(logits). Logits of -inf (tokens that cannot be drafted) count as p = 0. A row with NaN or +inf, or with no
finite logit, has a NaN statistic, and NaN closes every gate that has a threshold.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import lru_cache

import torch
from torch import Tensor

from selfspec_cli.early_exit.errors import SettingsError, closest
from selfspec_cli.early_exit.gate_rules import ADAEDL_GAMMA, FEATURES, GATE_RULES, Calibration, GateRule

# Stands in for log 0 wherever p multiplies it: 0 * -1e4 is 0, where 0 * -inf would be NaN.
_LOG_ZERO = -1e4


def max_prob(logits: Tensor) -> Tensor:
    """max_i p_i, [N, V] -> [N], in [1/V, 1]. The confidence of early exits (Kangaroo, arXiv:2404.18911)."""
    return _probs(logits).amax(-1)


def entropy(logits: Tensor) -> Tensor:
    """H = -sum_i p_i log p_i in nats, [N, V] -> [N], in [0, log V] (Shannon, 1948)."""
    log_p = _log_probs(logits)
    return _entropy(log_p.exp(), log_p)


def varentropy(logits: Tensor) -> Tensor:
    """Variance of -log p under p: sum_i p_i (log p_i + H)^2 in squared nats, [N, V] -> [N].

    In [0, log(V - 1)^2 / 4 + 1]; 0 for a one-hot and for a uniform distribution alike, which is why it says little
    about confidence alone (Kontoyiannis and Verdu, "Optimal lossless data compression", 2014, name the quantity).
    """
    log_p = _log_probs(logits)
    return _varentropy(log_p.exp(), log_p)


def top2_margin(logits: Tensor) -> Tensor:
    """p_(1) - p_(2), the gap between the two largest probabilities, [N, V] -> [N], in [0, 1].

    The "breaking ties" margin of Scheffer et al. 2001; CALM (arXiv:2207.07061) uses it to exit early.
    """
    return _margin(_probs(logits))


def adaedl_bound(logits: Tensor, gamma: float = ADAEDL_GAMMA) -> Tensor:
    """1 - sqrt(gamma * H), a lower bound on the draft token's acceptance, [N, V] -> [N].

    In [1 - sqrt(gamma log V), 1], so it may be negative. gamma weighs the entropy; AdaEDL (arXiv:2410.18351) uses 0.2.
    """
    return _adaedl(entropy(logits), gamma)


def survival(logits: Tensor, previous: Tensor | None) -> Tensor:
    """previous * max_prob(logits), [N, V] and [N] -> [N], in [0, 1]: confidence that the whole draft stands.

    previous: the value at the step before, None at the first. EAGLE-2 (arXiv:2406.16858) ranks branches by it.
    """
    confidence = max_prob(logits)
    return confidence if previous is None else previous * confidence


def calibrated(feature: Tensor, calibration: Calibration) -> Tensor:
    """Acceptance probability read off a monotone piecewise-linear map, [N] -> [N], in [0, 1].

    feature: the statistic named by `calibration.feature`. Constant beyond the end knots; NaN stays NaN. The map is
    an isotonic fit of logged acceptances (Zadrozny and Elkan, 2002; see calibration.py).
    """
    xs, ps = _knots(calibration, feature.device)
    if len(calibration.xs) == 1:
        return feature * 0 + ps[0]  # keeps NaN
    values = feature.clamp(xs[0], xs[-1])
    right = torch.searchsorted(xs, values).clamp(1, len(calibration.xs) - 1)
    x0, x1, p0, p1 = xs[right - 1], xs[right], ps[right - 1], ps[right]
    return p0 + (p1 - p0) * (values - x0) / (x1 - x0)


@dataclass(frozen=True)
class Gate(GateRule):
    """A gate's rule together with its statistic: function(logits [N, V]) -> [N].

    function is None for "none" (no statistic), "survival" (needs the step before) and "calibrated" (needs its map);
    `statistic` handles all alike.
    """

    function: Callable[[Tensor], Tensor] | None = None


_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "maxp": max_prob,
    "varH": varentropy,
    "entropy": entropy,
    "margin": top2_margin,
    "adaedl": adaedl_bound,
}

GATES: dict[str, Gate] = {
    name: Gate(**{f.name: getattr(rule, f.name) for f in fields(rule)}, function=_FUNCTIONS.get(name))
    for name, rule in GATE_RULES.items()
}
"""Every gate by the name that users write."""


def gate(name: str) -> Gate:
    """The gate called `name`. Raises SettingsError with the known names."""
    if name not in GATES:
        raise SettingsError(closest(name, GATES, "gate"))
    return GATES[name]


def statistic(
    name: str, logits: Tensor, survival: Tensor | None = None, calibration: Calibration | None = None
) -> Tensor:
    """Statistic of gate `name` for draft logits [N, V] -> float32 [N].

    survival: for gate "survival" (and a calibration over it), the statistic of the step before, [N]; None at the
    first step. For gate "survival" the result is the next step's `survival`. Gate "none" gives ones and reads nothing.
    """
    if name == "none":
        return torch.ones(logits.shape[0], dtype=torch.float32, device=logits.device)
    if name == "survival":
        return _survival(logits, survival)
    if name == "calibrated":
        if calibration is None:
            raise SettingsError("gate 'calibrated' needs a calibration, as fitted from logged drafts")
        return calibrated(statistic(calibration.feature, logits, survival), calibration)
    function = gate(name).function
    assert function is not None
    return function(logits)


def all_statistics(logits: Tensor, survival: Tensor | None = None) -> Tensor:
    """Every statistic in `FEATURES`' order from one log_softmax, [N, V] -> float32 [N, 6]: for logs and for tests."""
    log_p = _log_probs(logits)
    p = log_p.exp()
    confidence = p.amax(-1)
    h = _entropy(p, log_p)
    columns = {
        "maxp": confidence,
        "varH": _varentropy(p, log_p),
        "entropy": h,
        "margin": _margin(p),
        "adaedl": _adaedl(h, ADAEDL_GAMMA),
        "survival": confidence if survival is None else survival * confidence,
    }
    return torch.stack([columns[name] for name in FEATURES], dim=-1)


def is_open(name: str, statistic: Tensor, threshold: float | Tensor | None) -> Tensor:
    """Which requests keep drafting: statistic [N] -> bool [N].

    threshold: a number, or a tensor ([] or [N]) that changes without recapture; None is the gate's default. A NaN
    statistic closes the gate, because every comparison with NaN is false; gate "none" is always open.
    """
    rule = gate(name)
    if rule.key is None:
        return torch.ones_like(statistic, dtype=torch.bool)
    limit = rule.default if threshold is None else threshold
    assert limit is not None
    return statistic >= limit if rule.direction == "at_least" else statistic <= limit


_survival = survival  # `statistic` has an argument of the same name


def _probs(logits: Tensor) -> Tensor:
    """Softmax in float32, [N, V] -> [N, V]; a row with NaN, +inf or nothing finite is NaN throughout.

    One fused kernel. A gate runs after every draft step on logits [1, V], where what counts is how many operations are
    started: log-sum-exp is six of them.
    """
    return torch.softmax(logits, dim=-1, dtype=torch.float32)


def _log_probs(logits: Tensor) -> Tensor:
    """log softmax in float32 with -inf replaced by a number that p = 0 cancels; [N, V] -> [N, V]."""
    return torch.log_softmax(logits, dim=-1, dtype=torch.float32).clamp_min_(_LOG_ZERO)


def _entropy(p: Tensor, log_p: Tensor) -> Tensor:
    return -torch.linalg.vecdot(p, log_p)


def _varentropy(p: Tensor, log_p: Tensor) -> Tensor:
    mean = torch.linalg.vecdot(p, log_p)
    centred = log_p - mean.unsqueeze(-1)  # E[x^2] - E[x]^2 would cancel in float32
    return torch.linalg.vecdot(p, centred.square_())


def _margin(p: Tensor) -> Tensor:
    if p.shape[-1] == 1:
        return p[..., 0]
    top = p.topk(2, dim=-1).values  # [N, 2]
    return top[..., 0] - top[..., 1]


def _adaedl(h: Tensor, gamma: float) -> Tensor:
    return 1 - torch.sqrt(gamma * h.clamp_min(0))  # rounding may leave H a hair below 0


@lru_cache(maxsize=16)
def _knots(calibration: Calibration, device: torch.device) -> tuple[Tensor, Tensor]:
    return (
        torch.tensor(calibration.xs, dtype=torch.float32, device=device),
        torch.tensor(calibration.ps, dtype=torch.float32, device=device),
    )
