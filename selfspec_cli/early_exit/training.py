"""An optional epoch of KL training for a translator, after the closed form."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional as F

from selfspec_cli.early_exit.fitting import FitError
from selfspec_cli.early_exit.heads import LmHead, Translator


def train_kl(
    head: Translator,
    batches: Iterable[tuple[Tensor, Tensor]],
    lm_head: LmHead,
    learning_rate: float = 1e-4,
    weight_decay: float = 0.0,
) -> tuple[Translator, list[float]]:
    """A trained copy of `head`, and the loss of each batch in nats a token.

    Minimises KL(p || q) by AdamW over one pass of `batches`, (x [n, hidden], z [n, hidden]): p = softmax(lm_head(z)) is
    the full model's distribution and q the head's (Belrose et al., arXiv:2303.08112). With a draft vocabulary both are
    taken over it alone. The lm_head is frozen; the gradient goes through it to the translator. Raises FitError for no
    data or a loss that is not finite (naming the batch).
    """
    trained = copy.deepcopy(head).float().requires_grad_(True)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=learning_rate, weight_decay=weight_decay)
    losses: list[float] = []
    for x, z in batches:
        with torch.no_grad():
            full = lm_head(z)  # [n, V]
            full = full if trained.vocab_ids is None else full[:, trained.vocab_ids]
            log_p = F.log_softmax(full, dim=-1, dtype=torch.float32)
        draft = trained.logits(x.float(), _cast_to(lm_head, z.dtype))
        log_q = F.log_softmax(draft, dim=-1, dtype=torch.float32)
        loss = F.kl_div(log_q, log_p, reduction="batchmean", log_target=True)
        if not torch.isfinite(loss):
            raise FitError(f"the loss of batch {len(losses)} is {loss.item()}; lower the learning rate")
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if not losses:
        raise FitError("no pairs to train on")
    return trained.requires_grad_(False).to(next(head.parameters()).dtype), losses


def _cast_to(lm_head: LmHead, dtype: torch.dtype) -> LmHead:
    """The lm_head keeps its own dtype; only the translator is trained in fp32."""
    return lambda hidden: lm_head(hidden.to(dtype))
