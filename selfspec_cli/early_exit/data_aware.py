"""Rounding of a weight for the data that it meets, by GPTQ (Frantar et al., arXiv:2210.17323, section 3.3).

The data enter as the second moment of a linear layer's inputs, M = X^T X / n [in, in] over n tokens, because the error
that counts is that of the product: E|(W - Q) x|^2 = tr((W - Q) M (W - Q)^T).
Column by column, each column's rounding error is made up for in the columns that are still to be rounded.
"""

from collections.abc import Callable

import torch
from torch import Tensor

DAMPING = 0.01  # of the mean of M's diagonal: directions that the data hardly has are not to be trusted

Scales = Callable[[Tensor, Tensor], Tensor]
"""(a group's weights [out, group], importance of its columns [group]) -> scales [out, 1], none of them 0."""


def rounded_in_order(
    weight: Tensor, moment: Tensor, group: int, levels: tuple[int, int], scales: Scales
) -> tuple[Tensor, Tensor]:
    """GPTQ's rounding of `weight` [out, in] to integers in groups of `group` along a row.

    moment: M [in, in]. levels: the least and the greatest integer. scales: how a group's scale is chosen; it is asked
    when the group is reached, so it sees weights that make up for the columns before.

    Returns: integers (float32) [out, in / group, group], and scales [out, in / group, 1].
    """
    work = weight.float().clone()
    inverse = _inverse_factor(moment)
    integers, chosen = torch.empty_like(work), []
    for start in range(0, work.shape[1], group):
        block, factor = work[:, start : start + group], inverse[start : start + group, start : start + group]
        scale = scales(block, 1 / factor.diagonal().square())
        errors = torch.empty_like(block)
        for column in range(group):
            rounded = (block[:, column] / scale[:, 0]).round().clamp_(*levels)
            integers[:, start + column] = rounded
            errors[:, column] = (block[:, column] - rounded * scale[:, 0]) / factor[column, column]
            block[:, column + 1 :] -= errors[:, column : column + 1] * factor[column, column + 1 :]
        work[:, start + group :] -= errors @ inverse[start : start + group, start + group :]
        chosen.append(scale)
    return integers.unflatten(1, (-1, group)), torch.stack(chosen, dim=1)


def weighted_error(error: Tensor, moment: Tensor) -> float:
    """tr(error M error^T): the mean square error of the product, all outputs together, for a weight's [out, in]."""
    return float(((error.float() @ moment.float()) * error.float()).sum())


def _inverse_factor(moment: Tensor) -> Tensor:
    """Upper triangular U with M^-1 = U^T U; row i holds how an error in column i is made up for in later ones.

    M is damped, so that it is positive definite where columns were never used.
    """
    damped = moment.float().clone()
    damped.diagonal().add_(DAMPING * damped.diagonal().mean().clamp(min=1e-20))
    return torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(damped)), upper=True)
