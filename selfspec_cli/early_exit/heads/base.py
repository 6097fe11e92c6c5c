"""What a kind of exit head is: from the normed exit hidden state to draft logits. Free of torch until a method runs.

Throughout, x is the exit hidden state after the model's final norm, [N, hidden]; z the same at the last layer; V the
vocabulary size and V' the size of a draft vocabulary (V' = V without one). A head is a kind and its tensors by name:

    logits = projection(transform(x))

where the projection is the model's own lm_head, or rows that the head brings along."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from selfspec_cli.early_exit.equations import FitReport, NormalEquations

Shape = tuple[str | int, ...]
"""Sizes of a tensor: numbers, or "hidden", "rows" (V') and "rank"."""


class HeadKind:
    """A kind of exit head. The object has no state: a head's tensors are handed to its methods.

    name: what users write. help: one line for `--help`. targets: what it may be fitted to, its default first: the next
    token of the text (next_token, one-hot), the full model's own argmax (argmax, one-hot), or z - x (final_hidden,
    dense; the ridge shrinks such a head toward f(x) = 0); empty for a head that needs no fit. ranks, biases: whether
    there are heads of a lower rank, and with a constant term. rows: names of the weight [rows, hidden] and of the bias
    [rows] that take the place of the model's lm_head, if any do. examples: short names (`heads.HeadSpec`) that messages
    offer."""

    name: str
    help: str
    targets: tuple[str, ...] = ()
    ranks: bool = False
    biases: bool = False
    rows: tuple[str, ...] = ()
    examples: tuple[str, ...] = ()

    def shapes(self, low_rank: bool, bias: bool) -> dict[str, Shape]:
        """Its tensors by name, as they are kept in a file; a draft vocabulary is kept beside them."""
        return {}

    def transform(self, x: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        """The input of the projection, [N, hidden] -> [N, hidden]; x itself by default."""
        return x

    def fit(
        self, equations: NormalEquations, ridge: float, rank: int | None
    ) -> tuple[Mapping[str, Tensor | None], FitReport]:
        """Tensors (None: there is none) from the normal equations of one of `targets`, and how the fit went.
        ridge: relative. rank: None is full. Raises FitError as `NormalEquations.solve`."""
        raise NotImplementedError
