"""Exit heads in closed form (equations.py), the ridge by held-out agreement, and the scale of their outputs.

A head "lsq" is fitted to one-hot tokens, which are added by index. A "translator" is fitted to z - x, so that the ridge
shrinks it toward the lens."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from selfspec_cli.early_exit.equations import FitError, FitReport, NormalEquations
from selfspec_cli.early_exit.head_module import ExitHead, LmHead
from selfspec_cli.early_exit.heads import HEADS, HeadSpec

RIDGES: tuple[float, ...] = (1e-6, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0)
"""Relative ridges worth trying, in units of the inputs' mean variance: from hardly any to one that makes a translator
the lens, which is the better head on a model that was trained for early exit."""


def translator_target(x: Tensor, z: Tensor) -> Tensor:
    """The target of a translator: z - x in fp64 (bf16 states would lose the difference), [n, hidden]."""
    return z.to(device=x.device, dtype=torch.float64) - x.double()


def fit_head(spec: HeadSpec, equations: NormalEquations, ridge: float = 0.0) -> tuple[ExitHead, FitReport]:
    """The head of `spec` in fp32 from equations over its target. ridge: relative.
    Raises FitError as `NormalEquations.solve`, HeadError for equations over targets of another width."""
    tensors, report = HEADS[spec.kind].fit(equations, ridge, spec.rank)
    return ExitHead(spec.kind, {name: None if part is None else part.float() for name, part in tensors.items()}), report


@torch.no_grad()
def agreement(head: ExitHead, batches: Iterable[tuple[Tensor, Tensor]], lm_head: LmHead) -> float:
    """Share of positions at which the head's argmax is the target, in [0, 1]; with the model's argmax as target, the
    teacher-forced acceptance of greedy drafts. batches: (x [n, hidden], ids int64 [n]). Raises FitError for no data."""
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
    """The fit, of those with `ridges`, whose head agrees best on held-out data; ties go to the larger ridge. fit: ridge
    -> (head, report). batches: as for `agreement`. Raises FitError where every ridge is too small for the data."""
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


# ---- the scale of a least-squares head -------------------------------------------------------------------------------
#
# Least squares on one-hot targets gives numbers between about 0 and 1, so their softmax over a vocabulary is flat and
# no gate sees anything in it. Two numbers are fitted on held-out pairs by maximum likelihood, as Guo et al. (2017,
# arXiv:1706.04599) fit a temperature:
#
#     logits = scale * head(x) + prior * log p(token)        p: how often a token was a target of the fit, plus one
#
# The loss is convex in both. They become part of the head's weight and bias. A scale alone changes no argmax, and a
# prior that costs agreement is left out.

ROUNDS = 50  # of Newton's method; some ten are enough
HALVINGS = 40
PIECE = 64  # states at a time: some eight tensors of [PIECE, V] fp32 are alive at once
ENOUGH = 1e-7  # nats a token


@dataclass(frozen=True)
class HeadScale:
    """scale: above 0. prior: weight of the log frequencies, 0 for none. nats_before, nats: held-out cross entropy a
    token of the head as it was solved, and with both. agreement: share of held-out targets that are its argmax."""

    scale: float
    prior: float
    nats_before: float
    nats: float
    agreement: float

    def to_dict(self) -> dict[str, float]:
        return {"scale": self.scale, "prior": self.prior, "nats_before": self.nats_before, "nats": self.nats}


def log_frequencies(counts: Tensor) -> Tensor:
    """log of (counts + 1) as shares, [V] fp32."""
    smoothed = counts.double() + 1
    return (smoothed / smoothed.sum()).log().float()


def fit_scale(head: ExitHead, counts: Tensor, batches: Iterable[tuple[Tensor, Tensor]]) -> HeadScale | None:
    """Scale and prior of a head with rows of its own; None where no scale above 0 makes it better than a guess. counts:
    how often each token was a target of the fit, [V]. batches: as for `agreement`. Raises FitError for no data."""
    held_out = [part for x, target in batches for part in zip(x.split(PIECE), target.split(PIECE), strict=True)]
    if not sum(len(target) for _, target in held_out):
        raise FitError("no held-out positions to fit a scale on")
    loss = partial(_loss, head, log_frequencies(counts), held_out)
    start = torch.tensor([1.0, 0.0], dtype=torch.float64)  # the head as it was solved
    fits = _fitted(loss, start, 1), _fitted(loss, start, 2)  # without a prior, and with one
    usable = [fit for fit in fits if fit[0][0] > 0]
    if not usable:
        return None
    at, means = max(usable, key=lambda fit: (fit[1].agreement, -fit[1].nats))
    scale, weight = at.tolist()
    return HeadScale(scale, weight, loss(start).nats, means.nats, means.agreement)


def scaled(head: ExitHead, counts: Tensor, found: HeadScale) -> ExitHead:
    """The same head with its scale and its prior in the weight [V, hidden] and the bias [V]; over all tokens."""
    rows, bias = head.kind.rows
    weight, constant = head.tensors[rows] * found.scale, head.tensors.get(bias)
    if constant is not None:
        constant = constant * found.scale
    if found.prior:
        shift = found.prior * log_frequencies(counts).to(weight.device)
        constant = shift if constant is None else constant + shift
    return ExitHead(head.kind.name, {**head.tensors, rows: weight, bias: constant})


class _Means(NamedTuple):
    """Means over held-out positions: cross entropy, its gradient [2] and Hessian [2, 2] in (scale, prior)."""

    nats: float
    gradient: Tensor
    hessian: Tensor
    agreement: float


@torch.no_grad()
def _loss(head: ExitHead, prior: Tensor, held_out: list[tuple[Tensor, Tensor]], at: Tensor) -> _Means:
    nats, gradient, hessian = 0.0, torch.zeros(2, dtype=torch.float64), torch.zeros(2, 2, dtype=torch.float64)
    hits = seen = 0
    weight = head.tensors[head.kind.rows[0]]
    for x, target in held_out:
        outputs = head.logits(x.to(device=weight.device, dtype=weight.dtype)).float()
        ids = target.to(outputs.device)[:, None]
        features = (outputs, prior.to(outputs.device).expand_as(outputs))
        logits = float(at[0]) * features[0] + float(at[1]) * features[1]
        logs = logits.log_softmax(-1)
        p = logs.exp()
        means = [(p * feature).sum(-1) for feature in features]
        nats -= float(logs.gather(-1, ids).double().sum())
        hits += int((logits.argmax(-1, keepdim=True) == ids).sum())
        seen += len(target)
        for i in range(2):
            gradient[i] += float((means[i] - features[i].gather(-1, ids)[:, 0]).double().sum())
            for j in range(2):
                moment = (p * features[i] * features[j]).sum(-1) - means[i] * means[j]
                hessian[i, j] += float(moment.double().sum())
    return _Means(nats / seen, gradient / seen, hessian / seen, hits / seen)


def _fitted(loss: Callable[[Tensor], _Means], at: Tensor, free: int) -> tuple[Tensor, _Means]:
    """(scale, prior) fp64 [2] that minimise the loss, by Newton's method with halved steps. free: 1 keeps the prior."""
    now = loss(at)
    for _ in range(ROUNDS):
        hessian = now.hessian[:free, :free] + 1e-12 * torch.eye(free, dtype=torch.float64)
        step = torch.zeros(2, dtype=torch.float64)
        step[:free] = torch.linalg.lstsq(hessian, now.gradient[:free, None], driver="gelsd").solution[:, 0]
        for halving in range(HALVINGS):
            there = at - step / 2**halving
            then = loss(there)
            if then.nats < now.nats:
                break
        else:
            break  # no step is better: it is the least
        gained, at, now = now.nats - then.nats, there, then
        if gained < ENOUGH:
            break
    return at, now
