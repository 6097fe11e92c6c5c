"""Least squares, streamed: the sums of a regression and its solution, with memory that does not grow with the data.

One pass collects the normal equations in fp64: for inputs x [n, hidden] and targets y [n, outputs], the sums X^T X,
Y^T X, column sums and sums of squares. Means are taken out when solving (the same as a bias column that no ridge
touches, and better conditioned). With S = centred X^T X, C = centred Y^T X and lambda = ridge * mean(diag S) (Hoerl and
Kennard, 1970):

    weight = C (S + lambda I)^-1        bias = mean(y) - weight mean(x)"""

import math
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from selfspec_cli.early_exit.errors import HeadError

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
