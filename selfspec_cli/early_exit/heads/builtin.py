"""The kinds of heads of this package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from selfspec_cli.early_exit.heads.base import HeadKind, Shape

if TYPE_CHECKING:
    from torch import Tensor

    from selfspec_cli.early_exit.equations import FitReport, NormalEquations


class Lens(HeadKind):
    """lm_head(x), read at the exit layer (nostalgebraist's logit lens, 2020): nothing to fit, nothing to store."""

    name = "lens"
    help = "the model's own final norm and lm_head, read at the exit layer: no fit, no extra weights"
    examples = ("lens",)


class LeastSquares(HeadKind):
    """x @ weight^T + bias, straight to tokens; the model's lm_head is not read."""

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


class Translator(HeadKind):
    """lm_head(x + f(x)), an affine map to the final hidden state (the tuned lens, arXiv:2303.08112); f = 0 is the lens.
    Full rank: f(x) = x @ weight^T + bias. Rank r: f(x) = (x @ down^T) @ up^T + bias, 2 * hidden * r parameters."""

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


LENS, LSQ, TRANSLATOR = Lens(), LeastSquares(), Translator()
