"""Exit heads in closed form, the ridge by held-out agreement, and the scale of their outputs.

Least squares are streamed: one pass collects the normal equations in fp64, with memory that does not grow with the
data: for inputs x [n, hidden] and targets y [n, outputs], the sums X^T X, Y^T X, column sums and sums of squares. Means
are taken out when solving (the same as a bias column that no ridge touches, and better conditioned). With S = centred
X^T X, C = centred Y^T X and lambda = ridge * mean(diag S) (Hoerl and Kennard, 1970):

    weight = C (S + lambda I)^-1        bias = mean(y) - weight mean(x)

A head "lsq" is fitted to one-hot tokens, which are added by index. A "translator" is fitted to z - x, so that the ridge
shrinks it toward the lens."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from selfspec_cli.early_exit.errors import HeadError
from selfspec_cli.early_exit.head_module import ExitHead, LmHead
from selfspec_cli.early_exit.heads import HEADS, HeadSpec

_BLOCK_VALUES = 2**22  # fp64 values a cast block holds: 32 MB
_TOO_ILL = 1e15  # condition at which fp64 has no digits left


class FitError(HeadError):
    """A fit that the data do not allow, or data that no fit can use; the message says which, and where."""


@dataclass(frozen=True)
class FitReport:
    """How a closed-form fit went.
    pairs: (x, target) pairs. outputs: targets a pair (V, or hidden). ridge: relative, as given. rank: None is full.
    condition: of the regularised normal matrix (square of X's). residual: mean squared error a target on the fitted
    data. baseline: the same for the best constant (with a bias) or for zero (without)."""

    pairs: int
    hidden: int
    outputs: int
    ridge: float
    rank: int | None
    condition: float
    residual: float
    baseline: float

    def to_dict(self) -> dict[str, Any]:
        """JSON form, the fit statistics of `HeadMetadata`; None for a value that is not finite."""
        values = asdict(self)
        return {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in values.items()}


class NormalEquations:
    """The running sums of one regression; memory 8 * (hidden^2 + hidden * outputs) bytes on `device`.
    hidden: width of x. outputs: V for token targets, the width of z for dense ones. bias: whether the fit has one."""

    def __init__(self, hidden: int, outputs: int, *, bias: bool = False, device: torch.device | str = "cpu") -> None:
        zeros = partial(torch.zeros, dtype=torch.float64, device=device)
        self.hidden, self.outputs, self.bias = hidden, outputs, bias
        self.count = 0
        self._xtx = zeros(hidden, hidden)
        self._ytx = zeros(outputs, hidden)  # a row per target: index_add's fast layout
        self._x_sum = zeros(hidden)
        self._y_sum = zeros(outputs)
        self._yy = zeros(outputs)
        self._eigenvalues: Tensor | None = None  # of the centred X^T X, until the next update

    def update(self, x: Tensor, target: Tensor) -> None:
        """Add pairs: x [n, hidden] with target int64 [n] (token ids, one-hot) or float [n, outputs] (dense).
        Any float dtype, any device. Raises FitError, adding nothing, for shapes that do not fit, a NaN or infinity (by
        token, counted from the start of the stream), or a token id outside [0, outputs)."""
        if x.dim() != 2 or x.shape[1] != self.hidden:
            raise FitError(f"x has shape {list(x.shape)}; expected [n, {self.hidden}]")
        dense = target.is_floating_point()
        expected = (x.shape[0], self.outputs) if dense else (x.shape[0],)
        if tuple(target.shape) != expected:
            raise FitError(f"target has shape {list(target.shape)}; expected {list(expected)}")
        self._refuse_non_finite(x, "hidden state")
        if dense:
            self._refuse_non_finite(target, "target")
        else:
            self._refuse_foreign_ids(target)
        device, rows = self._xtx.device, max(1, _BLOCK_VALUES // max(self.hidden, self.outputs if dense else 1))
        for x_part, y_part in zip(x.split(rows), target.split(rows), strict=True):
            x64 = x_part.to(device=device, dtype=torch.float64)
            y = y_part.to(device)
            if dense:
                y = y.double()
                self._ytx.addmm_(y.T, x64)
                self._y_sum += y.sum(0)
                self._yy += y.square().sum(0)
            else:
                self._ytx.index_add_(0, y, x64)
                counts = torch.bincount(y, minlength=self.outputs)
                self._y_sum += counts  # a one-hot target is its own square
                self._yy += counts
            self._xtx.addmm_(x64.T, x64)
            self._x_sum += x64.sum(0)
        self.count += x.shape[0]
        self._eigenvalues = None

    def solve(self, ridge: float = 0.0) -> tuple[Tensor, Tensor | None, FitReport]:
        """weight fp64 [outputs, hidden], bias fp64 [outputs] or None, and the report, on the device.
        ridge: relative, >= 0. Raises FitError for fewer pairs than unknowns, or a singular matrix, without a ridge."""
        factor, condition = self._factorise(ridge)
        weight = torch.empty_like(self._ytx)
        for rows in _row_blocks(self.outputs, self.hidden):
            weight[rows] = torch.cholesky_solve(self._cross(rows).T, factor).T
        return weight, self._intercept(weight), self._report(weight, ridge, None, condition)

    def solve_low_rank(self, rank: int, ridge: float = 0.0) -> tuple[Tensor, Tensor, Tensor | None, FitReport]:
        """down fp64 [rank, hidden], up fp64 [outputs, rank], bias fp64 [outputs] or None, and the report.
        Reduced-rank regression (Izenman, 1975): the best rank-r weight projects the full solution W on the leading r
        eigenvectors U of W (S + lambda I) W^T [outputs, outputs]; up = U, down = U^T W. Raises FitError as `solve`, and
        for a rank outside 1..min(hidden, outputs)."""
        most = min(self.hidden, self.outputs)
        if not 1 <= rank <= most:
            raise FitError(f"rank {rank} is out of range; allowed: 1 to {most}")
        weight, _, report = self.solve(ridge)
        moment = weight @ self._cross(slice(None)).T  # W (S + lambda I) W^T, because W (S + lambda I) = C
        up = torch.linalg.eigh((moment + moment.T) / 2).eigenvectors[:, -rank:].flip(-1).contiguous()
        down = up.T @ weight
        product = up @ down
        return down, up, self._intercept(product), self._report(product, ridge, rank, report.condition)

    @property
    def target_counts(self) -> Tensor:
        """Sum of each target over the pairs, fp64 [outputs]: for token targets their counts."""
        return self._y_sum

    def _refuse_non_finite(self, values: Tensor, what: str) -> None:
        # A sum is one pass without a mask; it may overflow to inf on finite values, so it only decides whether to look.
        if torch.isfinite(values.sum(dtype=torch.float32)):
            return
        bad = (~torch.isfinite(values)).any(-1).nonzero()
        if len(bad):
            token = int(bad[0])
            value = values[token][~torch.isfinite(values[token])][0].item()
            raise FitError(
                f"{what} of token {self.count + token} (counted from 0 over the whole stream) has {value}; "
                f"{len(bad)} such token(s) in this chunk"
            )

    def _refuse_foreign_ids(self, ids: Tensor) -> None:
        wrong = ((ids < 0) | (ids >= self.outputs)).nonzero()
        if len(wrong):
            token = int(wrong[0])
            raise FitError(
                f"target {int(ids[token])} of token {self.count + token} (counted from 0 over the whole "
                f"stream) is out of range; allowed: 0 to {self.outputs - 1}"
            )

    def _gram(self) -> Tensor:
        """S: X^T X, centred when there is a bias. [hidden, hidden]"""
        return self._xtx - torch.outer(self._x_sum, self._x_sum / self.count) if self.bias else self._xtx

    def _cross(self, rows: slice) -> Tensor:
        """Rows of C: Y^T X, centred when there is a bias. [rows, hidden]"""
        part = self._ytx[rows]
        return part - torch.outer(self._y_sum[rows], self._x_sum / self.count) if self.bias else part

    def _factorise(self, ridge: float) -> tuple[Tensor, float]:
        """The Cholesky factor of S + lambda I, and its condition number."""
        if not (ridge >= 0 and math.isfinite(ridge)):
            raise FitError(f"ridge {ridge!r} is out of range; allowed: a finite number, at least 0")
        unknowns = self.hidden + self.bias
        if self.count == 0 or (self.count < unknowns and ridge == 0):
            raise FitError(
                f"{self.count} pairs are fewer than the {unknowns} unknowns of each target; "
                "collect more, or give a ridge above 0"
            )
        gram = self._gram()
        shift = ridge * float(gram.diagonal().mean())
        if self._eigenvalues is None:
            self._eigenvalues = torch.linalg.eigvalsh(gram).cpu()
        least, greatest = float(self._eigenvalues[0].clamp_min(0)) + shift, float(self._eigenvalues[-1]) + shift
        condition = greatest / least if least > 0 else math.inf
        if condition > _TOO_ILL and ridge == 0:
            raise FitError(
                f"the hidden states do not determine the fit (condition {condition:.1e}); give a ridge above 0"
            )
        regularised = gram.clone()
        regularised.diagonal().add_(shift)
        factor, failed = torch.linalg.cholesky_ex(regularised)
        if failed:
            raise FitError(
                f"the normal equations are singular at ridge {ridge:g} (condition {condition:.1e}); give a larger ridge"
            )
        return factor, condition

    def _intercept(self, weight: Tensor) -> Tensor | None:
        return (self._y_sum - weight @ self._x_sum) / self.count if self.bias else None

    def _report(self, weight: Tensor, ridge: float, rank: int | None, condition: float) -> FitReport:
        """Residuals from the sums alone: |y - w x|^2 = y'y - 2 w c + w S w', for each target."""
        gram = self._gram()
        total = self._yy - self._y_sum.square() / self.count if self.bias else self._yy
        residual = torch.empty_like(total)
        for rows in _row_blocks(self.outputs, self.hidden):
            w, c = weight[rows], self._cross(rows)
            residual[rows] = total[rows] + ((w @ gram - 2 * c) * w).sum(-1)
        mean = float(residual.clamp_min_(0).mean()) / self.count  # rounding may go a hair below 0
        baseline = float(total.mean()) / self.count
        return FitReport(self.count, self.hidden, self.outputs, ridge, rank, condition, mean, baseline)


def _row_blocks(rows: int, width: int) -> list[slice]:
    """Slices of at most 2^26 values (512 MB of fp64), so that temporaries stay small compared with the sums."""
    step = max(1, 2**26 // width)
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


# ---- heads -----------------------------------------------------------------------------------------------------------

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
