"""Least squares from the exit hidden state straight to tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from selfspec_cli.early_exit.heads.base import HeadKind, Shape

if TYPE_CHECKING:
    from torch import Tensor

    from selfspec_cli.early_exit.equations import FitReport, NormalEquations


class LeastSquares(HeadKind):
    """x @ weight^T + bias; the model's lm_head is not read."""

    name = "lsq"
    help = "least squares from the exit hidden state to the next token of the text, or to the full model's own argmax"
    targets = ("next_token", "argmax")
    biases = True
    rows = ("weight", "bias")
    examples = ("lsq", "lsq_argmax")

    def shapes(self, low_rank: bool, bias: bool) -> dict[str, Shape]:
        """weight [V', hidden], bias [V']."""
        return {"weight": ("rows", "hidden")} | ({"bias": ("rows",)} if bias else {})

    def fit(
        self, equations: NormalEquations, ridge: float, rank: int | None
    ) -> tuple[Mapping[str, Tensor | None], FitReport]:
        weight, bias, report = equations.solve(ridge)
        return {"weight": weight, "bias": bias}, report


HEAD = LeastSquares()
