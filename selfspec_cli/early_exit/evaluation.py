"""Held-out agreement of exit heads with the full model, and the choice of a ridge by it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from selfspec_cli.early_exit.fitting import FitError, FitReport
from selfspec_cli.early_exit.heads import ExitHead, LmHead

RIDGES: tuple[float, ...] = (1e-6, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
"""Relative ridges worth trying: from hardly any to one as large as the mean variance of the inputs."""


class RidgeChoice(NamedTuple):
    """ridge: the best. head, report: as fitted with it. scores: agreement of every ridge tried."""

    ridge: float
    head: ExitHead
    report: FitReport
    scores: Mapping[float, float]


@torch.no_grad()
def agreement(heads: Sequence[ExitHead], batches: Iterable[tuple[Tensor, Tensor]], lm_head: LmHead) -> list[float]:
    """Share of positions at which each head's argmax is the target, in [0, 1], one number a head; one pass.

    batches: (x [n, hidden], target ids int64 [n]); with the full model's argmax as target this is the teacher-forced
    acceptance of greedy drafts. x is brought to each head's device and dtype (a lens takes it as it comes). Raises
    FitError for no data.
    """
    hits, seen = [0] * len(heads), 0
    for x, target in batches:
        seen += len(target)
        for index, head in enumerate(heads):
            weight = next(head.parameters(), None)
            state = x if weight is None else x.to(device=weight.device, dtype=weight.dtype)
            best = head.to_full_ids(head.logits(state, lm_head).argmax(-1))
            hits[index] += int((best == target.to(best.device)).sum())
    if seen == 0:
        raise FitError("no held-out positions to evaluate on")
    return [count / seen for count in hits]


def choose_ridge(
    fit: Callable[[float], tuple[ExitHead, FitReport]],
    batches: Iterable[tuple[Tensor, Tensor]],
    lm_head: LmHead,
    ridges: Sequence[float] = RIDGES,
) -> RidgeChoice:
    """The ridge whose head agrees best on held-out data; ties go to the larger ridge.

    fit: ridge -> (head, report), such as `lambda ridge: fit_lsq(equations, ridge)`. batches: as for `agreement`, read
    once, so all heads are held at the same time: len(ridges) * V * hidden * 4 bytes for lsq. A ridge too small for
    the data is passed over; FitError is raised when none is left.
    """
    fitted: dict[float, tuple[ExitHead, FitReport]] = {}
    refusal: FitError | None = None
    for ridge in ridges:
        try:
            fitted[ridge] = fit(ridge)
        except FitError as error:
            refusal = error
    if not fitted:
        raise refusal or FitError("no ridge to choose from")
    shares = agreement([head for head, _ in fitted.values()], batches, lm_head)
    scores = dict(zip(fitted, shares, strict=True))
    best = max(scores, key=lambda ridge: (scores[ridge], ridge))
    return RidgeChoice(best, *fitted[best], scores)
