"""An optional epoch of KL training for a head, after the closed form."""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from torch.nn import functional as F

from selfspec_cli.early_exit.fitting import FitError
from selfspec_cli.early_exit.head_module import ExitHead, LmHead


class KlTrainer:
    """AdamW on KL(p || q), a step a batch: p = softmax(lm_head(z)) is the full model's distribution, q the head's.

    (Belrose et al., arXiv:2303.08112.) With a draft vocabulary both are taken over it alone. The lm_head is frozen; the
    gradient goes through it to a copy of `head` in fp32.
    """

    def __init__(self, head: ExitHead, lm_head: LmHead, learning_rate: float = 1e-4, weight_decay: float = 0.0) -> None:
        self.losses: list[float] = []
        self._dtype = next(head.parameters()).dtype
        self._lm_head = lm_head
        self._head = copy.deepcopy(head).float().requires_grad_(True)
        self._optimizer = torch.optim.AdamW(self._head.parameters(), lr=learning_rate, weight_decay=weight_decay)

    def step(self, x: Tensor, z: Tensor) -> float:
        """One step on x [n, hidden] and z [n, hidden]; returns the loss in nats a token.

        Raises FitError, leaving the head as it was, for a loss that is not finite (naming the batch).
        """
        ids = self._head.vocab_ids
        with torch.no_grad():
            full = self._lm_head(z)  # [n, V]
            log_p = F.log_softmax(full if ids is None else full[:, ids], dim=-1, dtype=torch.float32)
        draft = self._head.logits(x.float(), _cast_to(self._lm_head, z.dtype))
        log_q = F.log_softmax(draft, dim=-1, dtype=torch.float32)
        loss = F.kl_div(log_q, log_p, reduction="batchmean", log_target=True)
        if not torch.isfinite(loss):
            raise FitError(f"the loss of batch {len(self.losses)} is {loss.item()}; lower the learning rate")
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self._optimizer.step()
        self.losses.append(loss.item())
        return self.losses[-1]

    def finish(self) -> ExitHead:
        """The trained head, frozen, in the dtype it came in. Raises FitError if no step was taken."""
        if not self.losses:
            raise FitError("no pairs to train on")
        return self._head.requires_grad_(False).to(self._dtype)


def _cast_to(lm_head: LmHead, dtype: torch.dtype) -> LmHead:
    """The lm_head keeps its own dtype; only the head is trained in fp32."""
    return lambda hidden: lm_head(hidden.to(dtype))
