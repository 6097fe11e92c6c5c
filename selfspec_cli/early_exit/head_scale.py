"""A scale and a prior that make probabilities of a least-squares head's outputs.

Least squares on one-hot targets gives numbers between about 0 and 1, so their softmax over a vocabulary is flat and no
gate sees anything in it. Two numbers are fitted on held-out pairs by maximum likelihood, as Guo et al. (2017,
arXiv:1706.04599) fit a temperature:

    logits = scale * head(x) + prior * log p(token)        p: how often a token was a target of the fit, plus one

The loss is convex in both. They become part of the head's weight and bias. A scale alone changes no argmax, and a prior
that costs agreement is left out.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from selfspec_cli.early_exit.equations import FitError
from selfspec_cli.early_exit.head_module import ExitHead

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
    """Scale and prior of a head with rows of its own; None where no scale above 0 makes it better than a guess.

    counts: how often each token was a target of the fit, [V]. batches: held-out (x [n, hidden], target ids int64 [n]).
    Raises FitError for no data.
    """
    held_out = [part for x, target in batches for part in zip(x.split(PIECE), target.split(PIECE), strict=True)]
    prior = log_frequencies(counts)
    if not sum(len(target) for _, target in held_out):
        raise FitError("no held-out positions to fit a scale on")
    before = _loss(head, prior, held_out, torch.tensor([1.0, 0.0], dtype=torch.float64))
    alone = _fitted(head, prior, held_out, with_prior=False)
    both = _fitted(head, prior, held_out, with_prior=True)
    usable = [fit for fit in (alone, both) if fit[0][0] > 0]
    if not usable:
        return None
    best = max(usable, key=lambda fit: (fit[1].agreement, -fit[1].nats))
    scale, weight = best[0].tolist()
    return HeadScale(scale, weight, before.nats, best[1].nats, best[1].agreement)


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


def _fitted(
    head: ExitHead, prior: Tensor, held_out: list[tuple[Tensor, Tensor]], *, with_prior: bool
) -> tuple[Tensor, _Means]:
    """(scale, prior) fp64 [2] that minimise the loss, by Newton's method with halved steps; prior 0 without one."""
    at = torch.tensor([1.0, 0.0], dtype=torch.float64)
    free = 2 if with_prior else 1
    now = _loss(head, prior, held_out, at)
    for _ in range(ROUNDS):
        hessian = now.hessian[:free, :free] + 1e-12 * torch.eye(free, dtype=torch.float64)
        step = torch.zeros(2, dtype=torch.float64)
        step[:free] = torch.linalg.lstsq(hessian, now.gradient[:free, None], driver="gelsd").solution[:, 0]
        for halving in range(HALVINGS):
            there = at - step / 2**halving
            then = _loss(head, prior, held_out, there)
            if then.nats < now.nats:
                break
        else:
            break  # no step is better: it is the least
        gained, at, now = now.nats - then.nats, there, then
        if gained < ENOUGH:
            break
    return at, now
