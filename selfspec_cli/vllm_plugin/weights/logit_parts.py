"""What some logits say of a whole row: from these parts follow its most likely token and every gate's statistic."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def parts_of(scores, place):
    """Over the first dimension of float32 scores: the greatest and where it is, the second greatest, the sum of
    e^(x - greatest), the mean of x - greatest under these weights, and the weighted sum of its squared deviations
    (E[x^2] - E[x]^2 would cancel in float32). place: 0, 1, ... along that dimension."""
    best, at = tl.max(scores, axis=0), tl.argmax(scores, axis=0)
    second = tl.max(tl.where(place == at, -float("inf"), scores), axis=0)
    shifted = scores - tl.where(best == -float("inf"), 0.0, best)
    weight = tl.exp(shifted)  # NaN where a logit is NaN or +inf, and so is the sum
    total = tl.sum(weight, axis=0)
    mean = tl.sum(tl.where(weight > 0, weight * shifted, 0.0), axis=0) / tl.where(total > 0, total, 1.0)
    spread = tl.sum(tl.where(weight > 0, weight * (shifted - mean) * (shifted - mean), 0.0), axis=0)
    return best, at, second, total, mean, spread


@triton.jit
def store_parts(found, parts, indices, row, block, blocks, first, here):
    """What `parts_of` found in a block of a row, or of several rows at a time.

    parts: float32 [rows, 5, blocks]; indices: int32 [rows, blocks], counted from the row's first logit. first: the
    block's first logit.
    """
    best, at, second, total, mean, spread = found
    place = parts + row * 5 * blocks + block
    tl.store(place, best, mask=here)
    tl.store(place + blocks, second, mask=here)
    tl.store(place + 2 * blocks, total, mask=here)
    tl.store(place + 3 * blocks, mean, mask=here)
    tl.store(place + 4 * blocks, spread, mask=here)
    tl.store(indices + row * blocks + block, first + at, mask=here)
