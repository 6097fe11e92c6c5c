"""Compiles the products of draft steps side by side, in threads, while vLLM compiles the layers that draft.

Triton takes 2 to 6 seconds for a product of 2 to 32 tokens. Otherwise each is compiled when a step of that many tokens
first runs, one after the other, between the graphs that vLLM records (results/LOG.md, "Where does the start of an
engine with copies go?"). Triton's own mode for that makes the key of each kernel where it is asked for, so that no
kernel is compiled twice, and leaves to threads what needs neither CUDA nor, for the most part, Python's lock.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import Context
from typing import Any

import torch
from torch import Tensor, nn

from selfspec_cli.vllm_plugin.weights.copied import CopiedLinear, CopiedWeight

CLASSES = (1, 2, 4, 8, 16, 32)  # tokens; the products of all numbers from one to the next are the same kernels
MOST_THREADS = 16

Copy = tuple[CopiedWeight, Tensor | None]
"""With the bias that is added to its product."""


def of_layers(trunk: nn.Module) -> list[Copy]:
    """A copy of each shape that the layers multiply by; most layers of a model have the same."""
    found: dict[object, Copy] = {}
    for layer in trunk.modules():
        if isinstance(getattr(layer, "quant_method", None), CopiedLinear):
            copy: Any = layer.copy_of_weight
            bias: Any = None if getattr(layer, "skip_bias_add", False) else getattr(layer, "bias", None)
            shapes = tuple(tensor.shape for tensor in copy.parameters())
            found.setdefault((shapes, bias is None), (copy, bias))
    return [*found.values()]


def numbers_of_tokens(requests: int) -> list[int]:
    """Those of CLASSES that steps of up to `requests` requests need."""
    return [count for before, count in zip((0, *CLASSES), CLASSES, strict=False) if before < requests]


@contextmanager
def beside(
    trunk: nn.Module | None, logits: Copy | None, requests: int, device: torch.device, ranks: int
) -> Iterator[None]:
    """While the block runs, compile what draft steps of up to `requests` requests multiply by; at its end, wait for it.

    trunk: None where one kernel takes the place of the layers' products. logits: what makes them (`TargetHead.copied`).
    ranks: that share the processors of this host.

    A kernel that cannot be compiled is left to the step that launches it, and a warning says so. Where the block
    raises, what no thread has begun is not compiled.
    """
    if device.type != "cuda":
        yield
        return
    from triton import AsyncCompileMode

    copies = [*([] if trunk is None else of_layers(trunk)), *([] if logits is None else [logits])]
    wanted = list(itertools.product(copies, numbers_of_tokens(requests)))
    failures: list[BaseException] = []
    with ThreadPoolExecutor(_threads(ranks), thread_name_prefix="selfspec-compile") as pool:
        # A context of its own: what the block itself compiles does not wait for this.
        mode, context = AsyncCompileMode(pool, ignore_errors=True), Context()
        context.run(mode.__enter__)
        try:
            for (copy, bias), count in wanted:
                try:
                    context.run(copy.compile_for, count, bias)
                except Exception as error:
                    failures.append(error)
            yield
            failures += filter(None, [future.exception() for future in mode.raw_futures])
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for future in mode.raw_futures:
                if future.cancelled():
                    future.set_running_or_notify_cancel()  # Triton waits for all of them, and only this ends a wait
            raise
        finally:
            context.run(mode.__exit__, None, None, None)
    if failures:
        logging.getLogger("vllm.selfspec").warning(
            "draft kernels: %d could not be compiled ahead, and will be where they are first launched (%s: %s)",
            len(failures),
            type(failures[0]).__name__,
            failures[0],
        )


def _threads(ranks: int) -> int:
    """Half of this rank's share of the processors that the process may use; vLLM compiles on the others."""
    return max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)) // (2 * ranks)))
