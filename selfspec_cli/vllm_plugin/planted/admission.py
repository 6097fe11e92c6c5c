"""What adaptive verification may look at when it admits a draft: that one and those before it, never later ones.

Whether a draft is verified must not depend on what comes after it, because what comes after it depends on the draft:
otherwise some tokens are verified more often than others, and the tokens that come out no longer have the target's
distribution (DeepSeek's DSpark paper, appendix A). vLLM ranks drafts by the product of confidences so far, which no
later draft can raise.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from selfspec_cli.vllm_plugin.planted.wrap import Undo, wrap

ROWS, LONGEST, TRIALS = 6, 4, 64


def looked_ahead(device: Any) -> dict[str, int]:
    """Change the confidences behind a draft, many times, and count how often its admission changed.

    The function that vLLM calls is asked, with requests, confidences and budgets of our own. Returns: compared, changed
    (admissions).
    """
    draw = torch.Generator().manual_seed(0)
    compared = changed = 0
    for trial in range(TRIALS):
        confidences = torch.rand(ROWS, LONGEST, generator=draw)
        budget = 1 + trial % (ROWS * LONGEST - 1)
        before = admitted(confidences, budget, device)
        row, place = trial % ROWS, trial % (LONGEST - 1)
        other = confidences.clone()
        other[row, place + 1 :] = torch.rand(LONGEST - place - 1, generator=draw)
        after = admitted(other, budget, device)
        compared += 1
        changed += min(int(before[row]), place + 1) != min(int(after[row]), place + 1)
    return {"compared": compared, "changed": changed}


def admitted(confidences: Tensor, budget: int, device: Any = "cpu") -> Tensor:
    """Drafts that vLLM admits of each request, int32 [rows], of the confidences [rows, k] and a budget for them all."""
    from vllm.v1.worker.gpu.spec_decode import adaptive_verification as vllm

    on_gpu = torch.device(device).type == "cuda"
    assign = vllm._assign_draft_token_budget_compiled if on_gpu else vllm._assign_draft_token_budget
    rows, k = confidences.shape
    capacities = torch.full((rows,), k, dtype=torch.int32, device=device)
    assign(confidences.to(device), torch.arange(rows, device=device), capacities, budget, k)
    return capacities.cpu()


def _look_ahead(runner: Any) -> list[Undo]:
    """A draft is admitted by how sure the whole of its request's draft is."""
    from vllm.v1.worker.gpu.spec_decode import adaptive_verification as vllm

    def make(original: Any) -> Any:
        def assign(confidences: Tensor, rows: Tensor, capacities: Tensor, budget: int, steps: int) -> None:
            whole = confidences.mean(1, keepdim=True).expand_as(confidences).contiguous()
            original(whole, rows, capacities, budget, steps)

        return assign

    names = ("_assign_draft_token_budget", "_assign_draft_token_budget_compiled")
    return [wrap(vllm, name, make) for name in names]


FAULTS = {"look_ahead": _look_ahead}
