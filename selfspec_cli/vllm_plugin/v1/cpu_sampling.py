"""What vLLM 0.32's CPU build gets wrong when speculated tokens are verified against sampled requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


def expand_on_cpu(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Replacement for the rejection sampler's `expand_batch_to_tokens`, in PyTorch where tensors are on the CPU.

    vLLM's C++ kernel writes into an int64 copy of the output and drops it, so temperature, top-k and top-p of drafted
    positions are whatever the memory held: sampled requests follow no distribution, and greedy ones beside them are not
    argmax. Any speculative method has it (seen with n-gram too).
    """

    def expand_batch_to_tokens(
        x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: Any = 0, replace_to: Any = 0
    ) -> Tensor:
        """[requests] -> [num_tokens]: each request's value once for each of its tokens; replace_from -> replace_to."""
        if x.device.type != "cpu":
            return original(x, cu_num_tokens, num_tokens, replace_from, replace_to)
        counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
        return x.masked_fill(x == replace_from, replace_to).repeat_interleave(counts, output_size=num_tokens)

    return expand_batch_to_tokens
