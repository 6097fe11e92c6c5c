"""Muon (Jordan et al., 2024): momentum whose updates are orthogonalised, for the matrices of the hidden layers."""

from collections import defaultdict

import torch
from torch import Tensor, nn

# Newton-Schulz quintic with the published coefficients: steep at zero, singular values end between 0.7 and 1.2.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5


def orthogonalise(matrices: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrices, roughly, to [count, rows, columns]; in bf16, same shape."""
    x = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """All matrices of one shape are updated together.

    Updates are scaled by 0.2 sqrt(max(rows, columns)), which gives them the root mean square of Adam's updates
    (Liu et al., 2025), so that both optimisers share one learning rate.
    """

    def __init__(self, matrices: list[nn.Parameter], lr: float, weight_decay: float, momentum: float = 0.95) -> None:
        by_shape: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
        for matrix in matrices:
            by_shape[matrix.shape].append(matrix)
        groups = [{"params": same} for same in by_shape.values()]
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            matrices = group["params"]
            gradients = torch.stack([matrix.grad for matrix in matrices])
            state = self.state[matrices[0]]
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(gradients)
            average = state["momentum"].lerp_(gradients, 1 - group["momentum"])
            update = orthogonalise(gradients.lerp(average, group["momentum"])).to(gradients.dtype)
            update *= 0.2 * max(update.shape[-2:]) ** 0.5 * group["lr"]
            torch._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_sub_(matrices, list(update.unbind()))
