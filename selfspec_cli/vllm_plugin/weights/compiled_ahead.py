"""Compiles the products of draft steps side by side, in threads, while vLLM compiles the layers that draft.

Triton takes 2 to 6 seconds for a product of 2 to 32 tokens. Else each is compiled where a step of so many tokens runs
for the first time, one after the other, between the graphs that vLLM records (results/LOG.md, "Where does the start of
an engine with copies go?"). Triton does not hold Python's lock meanwhile, and what it has compiled, by any thread, the
first launch finds.
"""

from __future__ import annotations

import itertools
import os
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch
from torch import Tensor, nn

from selfspec_cli.vllm_plugin.weights.copied import CopiedLinear, CopiedProjection, CopiedWeight

CLASSES = (1, 4, 8, 16, 32)  # tokens; the products of all numbers from one to the next are the same kernels
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


def numbers_of_tokens(requests: int, above: int = 0) -> list[int]:
    """Those of CLASSES that steps of up to `requests` requests need, without those that are not `above` a number."""
    return [count for before, count in zip((0, *CLASSES), CLASSES, strict=False) if before < requests and count > above]


def begin(
    trunk: nn.Module, projection: object, requests: int, by_fused: int, device: torch.device, ranks: int
) -> list[Future[None]]:
    """Begin to compile what draft steps of up to `requests` requests multiply by; `finish` waits for it.

    projection: what makes the logits (`TargetHead.projection`). by_fused: requests up to which a kernel for a whole
    step takes the place of the layers' products. ranks: that share the processors of this host.
    """
    if device.type != "cuda":
        return []
    wanted = list(itertools.product(of_layers(trunk), numbers_of_tokens(requests, by_fused)))
    if isinstance(projection, CopiedProjection):
        wanted += [((projection.copy, projection.bias), count) for count in numbers_of_tokens(requests)]
    pool = ThreadPoolExecutor(
        max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)) // (2 * ranks))), thread_name_prefix="selfspec-compile"
    )
    futures = [pool.submit(_compiled, *copy, count, device) for copy, count in wanted]
    pool.shutdown(wait=False)
    return futures


def _compiled(copy: CopiedWeight, bias: Tensor | None, tokens: int, device: torch.device) -> None:
    with torch.inference_mode(), torch.cuda.device(device):
        copy.compile_for(tokens, bias)


def finish(futures: list[Future[None]]) -> None:
    """Wait for them. A kernel that could not be compiled is left to the step that needs it, which says why."""
    wait(futures)
