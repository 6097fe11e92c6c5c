"""Named ranges around the parts of a round, for Nsight Systems (NVTX) and for PyTorch's profiler."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

PREFIX = "selfspec."


def annotate(runner: Any, drafter: Any) -> list[str]:
    """Put ranges around a live engine's verify pass, sampling, draft loop and exit head; returns their names.

    A CUDA graph replays as one launch, so inside a captured draft loop the head has no range of its own.
    """
    places = [("verify", runner, "execute_model"), ("sample", runner, "sample_tokens"), ("draft", drafter, "propose")]
    places.append(("head", getattr(drafter, "head", None), "logits"))
    found = [(name, owner, method) for name, owner, method in places if hasattr(owner, method)]
    for name, owner, method in found:
        setattr(owner, method, _in_range(PREFIX + name, getattr(owner, method)))
    return [PREFIX + name for name, _, _ in found]


def _in_range(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    cuda = torch.cuda.is_available()

    @functools.wraps(function)
    def ranged(*args: Any, **kwargs: Any) -> Any:
        if cuda:
            torch.cuda.nvtx.range_push(name)
        try:
            with torch.profiler.record_function(name):
                return function(*args, **kwargs)
        finally:
            if cuda:
                torch.cuda.nvtx.range_pop()

    return ranged
