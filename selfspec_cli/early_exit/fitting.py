"""Exit heads in closed form (equations.py), their held-out agreement with the full model, and the ridge by it.

A head "lsq" is fitted to one-hot tokens, which are added by index. A "translator" is fitted to z - x, so that the ridge
shrinks it toward the lens.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from selfspec_cli.early_exit.equations import FitError, FitReport, NormalEquations
from selfspec_cli.early_exit.head_module import ExitHead, LmHead
from selfspec_cli.early_exit.head_spec import HeadSpec
from selfspec_cli.early_exit.heads import HEADS

RIDGES: tuple[float, ...] = (1e-6, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0)
"""Relative ridges worth trying, in units of the inputs' mean variance: from hardly any to one that makes a translator
the lens, which is the better head on a model that was trained for early exit."""


class RidgeChoice(NamedTuple):
    """ridge: the best. head, report: as fitted with it. scores: agreement of every ridge tried."""

    ridge: float
    head: ExitHead
    report: FitReport
    scores: Mapping[float, float]


def translator_target(x: Tensor, z: Tensor) -> Tensor:
    """What a translator is fitted to: z - x in fp64 (bf16 states would lose the difference), [n, hidden]."""
    return z.to(device=x.device, dtype=torch.float64) - x.double()


def fit_head(spec: HeadSpec, equations: NormalEquations, ridge: float = 0.0) -> tuple[ExitHead, FitReport]:
    """The head of `spec` in fp32, in closed form, from equations over its target.

    ridge: relative. Raises FitError as `NormalEquations.solve`, HeadError for equations over targets of another width.
    """
    tensors, report = HEADS[spec.kind].fit(equations, ridge, spec.rank)
    return ExitHead(spec.kind, {name: None if part is None else part.float() for name, part in tensors.items()}), report


def draft_ids(head: ExitHead, x: Tensor, lm_head: LmHead) -> Tensor:
    """The tokens a head would draft greedily, x [n, hidden] -> full ids int64 [n].

    x is brought to the head's device and dtype; a lens takes it as it comes.
    """
    weight = next(head.parameters(), None)
    state = x if weight is None else x.to(device=weight.device, dtype=weight.dtype)
    return head.to_full_ids(head.logits(state, lm_head).argmax(-1))


@torch.no_grad()
def agreement(heads: Sequence[ExitHead], batches: Iterable[tuple[Tensor, Tensor]], lm_head: LmHead) -> list[float]:
    """Share of positions at which each head's argmax is the target, in [0, 1], one number a head; one pass.

    batches: (x [n, hidden], target ids int64 [n]); with the full model's argmax as target this is the teacher-forced
    acceptance of greedy drafts. Raises FitError for no data.
    """
    hits, seen = [0] * len(heads), 0
    for x, target in batches:
        seen += len(target)
        for index, head in enumerate(heads):
            best = draft_ids(head, x, lm_head)
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

    fit: ridge -> (head, report), such as `lambda ridge: fit_head(spec, equations, ridge)`. batches: as for `agreement`.
    Two heads are held at a time, the best so far and the one tried. A ridge too small for the data is passed over;
    FitError is raised when none is left.
    """
    held_out = list(batches)
    scores: dict[float, float] = {}
    best: tuple[float, ExitHead, FitReport] | None = None
    refusal: FitError | None = None
    for ridge in ridges:
        try:
            head, report = fit(ridge)
        except FitError as error:
            refusal = error
            continue
        scores[ridge] = agreement([head], held_out, lm_head)[0]
        if best is None or (scores[ridge], ridge) > (scores[best[0]], best[0]):
            best = (ridge, head, report)
    if best is None:
        raise refusal or FitError("no ridge to choose from")
    return RidgeChoice(*best, scores)
