"""An affine map from the exit hidden state to the final one, then the frozen lm_head (the tuned lens,
arXiv:2303.08112)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from selfspec_cli.early_exit.heads.base import HeadKind, Shape

if TYPE_CHECKING:
    from torch import Tensor

    from selfspec_cli.early_exit.equations import FitReport, NormalEquations


class Translator(HeadKind):
    """lm_head(x + f(x)); the residual form makes f = 0 the lens.

    Full rank: f(x) = x @ weight^T + bias. Rank r: f(x) = (x @ down^T) @ up^T + bias, 2 * hidden * r parameters.
    """

    name = "translator"
    help = "a linear map from the exit hidden state to the final one, then the lm_head; may be of low rank"
    targets = ("final_hidden",)
    ranks = biases = True
    examples = ("translator", "translator_bias", "translator_r15", "translator_r64")

    def shapes(self, low_rank: bool, bias: bool) -> dict[str, Shape]:
        """weight [hidden, hidden], or down [rank, hidden] and up [hidden, rank]; bias [hidden]."""
        low: dict[str, Shape] = {"down": ("rank", "hidden"), "up": ("hidden", "rank")}
        full: dict[str, Shape] = {"weight": ("hidden", "hidden")}
        return (low if low_rank else full) | ({"bias": ("hidden",)} if bias else {})

    def transform(self, x: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        """z_hat, [N, hidden] -> [N, hidden]."""
        from torch.nn import functional as F

        bias = tensors.get("bias")
        if "weight" in tensors:
            return x + F.linear(x, tensors["weight"], bias)
        return x + F.linear(F.linear(x, tensors["down"]), tensors["up"], bias)  # [N, r] in between

    def fit(
        self, equations: NormalEquations, ridge: float, rank: int | None
    ) -> tuple[Mapping[str, Tensor | None], FitReport]:
        """As the ridge grows it becomes the lens; with a bias, the lens on x shifted by mean(z - x)."""
        if rank is None:
            weight, bias, report = equations.solve(ridge)
            return {"weight": weight, "bias": bias}, report
        down, up, bias, report = equations.solve_low_rank(rank, ridge)
        return {"down": down, "up": up, "bias": bias}, report


HEAD = Translator()
