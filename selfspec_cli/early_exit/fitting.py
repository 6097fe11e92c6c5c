"""Exit heads in closed form (equations.py), their held-out agreement with the full model, and the ridge by it.

A head "lsq" is fitted to one-hot tokens, which are added by index. A "translator" is fitted to z - x, so that the ridge
shrinks it toward the lens.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from selfspec_cli.early_exit.equations import FitError, FitReport, NormalEquations
from selfspec_cli.early_exit.head_module import ExitHead, LmHead
from selfspec_cli.early_exit.head_spec import HeadSpec
from selfspec_cli.early_exit.heads import HEADS

RIDGES: tuple[float, ...] = (1e-6, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0)
"""Relative ridges worth trying, in units of the inputs' mean variance: from hardly any to one that makes a translator
the lens, which is the better head on a model that was trained for early exit."""


def translator_target(x: Tensor, z: Tensor) -> Tensor:
    """The target of a translator: z - x in fp64 (bf16 states would lose the difference), [n, hidden]."""
    return z.to(device=x.device, dtype=torch.float64) - x.double()


def fit_head(spec: HeadSpec, equations: NormalEquations, ridge: float = 0.0) -> tuple[ExitHead, FitReport]:
    """The head of `spec` in fp32 from equations over its target. ridge: relative.

    Raises FitError as `NormalEquations.solve`, HeadError for equations over targets of another width.
    """
    tensors, report = HEADS[spec.kind].fit(equations, ridge, spec.rank)
    return ExitHead(spec.kind, {name: None if part is None else part.float() for name, part in tensors.items()}), report


@torch.no_grad()
def agreement(head: ExitHead, batches: Iterable[tuple[Tensor, Tensor]], lm_head: LmHead) -> float:
    """Share of positions at which the head's argmax is the target, in [0, 1].

    batches: (x [n, hidden] on any device, of any dtype, target ids int64 [n]); with the full model's argmax as target
    this is the teacher-forced acceptance of greedy drafts. Raises FitError for no data.
    """
    weight = next(head.parameters(), None)
    hits = seen = 0
    for x, target in batches:
        state = x if weight is None else x.to(device=weight.device, dtype=weight.dtype)
        best = head.to_full_ids(head.logits(state, lm_head).argmax(-1))
        hits += int((best == target.to(best.device)).sum())
        seen += len(target)
    if seen == 0:
        raise FitError("no held-out positions to evaluate on")
    return hits / seen


def choose_ridge(
    fit: Callable[[float], tuple[ExitHead, FitReport]],
    batches: Iterable[tuple[Tensor, Tensor]],
    lm_head: LmHead,
    ridges: Sequence[float] = RIDGES,
) -> tuple[ExitHead, FitReport]:
    """The fit, of those with `ridges`, whose head agrees best on held-out data; ties go to the larger ridge.

    fit: ridge -> (head, report). batches: as for `agreement`. A ridge too small for the data is passed over; FitError
    is raised when none is left.
    """
    held_out = list(batches)
    best: tuple[float, tuple[ExitHead, FitReport]] | None = None
    refusal = FitError("no ridge to choose from")
    for ridge in sorted(ridges):
        try:
            fitted = fit(ridge)
        except FitError as error:
            refusal = error
            continue
        score = agreement(fitted[0], held_out, lm_head)
        if best is None or score >= best[0]:
            best = score, fitted
    if best is None:
        raise refusal
    return best[1]
