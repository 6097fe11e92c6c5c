"""Triton's interpreter does what a device does, where vLLM's kernels and ours rely on it."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl

NAN, INF = math.nan, math.inf


@triton.jit
def _store_where_valid(out, requests, count, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    valid = tl.load(requests + tl.program_id(0)).to(tl.int64) >= 0
    tl.store(out + tl.program_id(0) * BLOCK + place, place + 1, mask=(place < count) & valid)


def test_a_scalar_comparison_masks_a_block():
    out = torch.zeros(2, 4, dtype=torch.int32)
    _store_where_valid[(2,)](out, torch.tensor([3, -1]), 3, BLOCK=4)
    assert out.tolist() == [[1, 2, 3, 0], [0, 0, 0, 0]]


@triton.jit
def _largest(values, places, row, BLOCK: tl.constexpr):
    numbers = tl.load(row + tl.arange(0, BLOCK))
    value, place = tl.max(numbers, axis=0, return_indices=True)
    tl.store(values, value)
    tl.store(places, place)
    tl.store(values + 1, tl.min(numbers, axis=0))
    tl.store(places + 1, tl.argmin(numbers, axis=0))


@pytest.mark.parametrize(
    ("row", "values", "places"),
    [
        ([1.0, 5.0, 2.0, 5.0], [5.0, 1.0], [1, 0]),
        ([NAN, 1.0, 3.0, NAN], [3.0, 1.0], [2, 1]),
        ([NAN] * 4, None, None),
        ([NAN, -INF, NAN, NAN], [-INF, -INF], None),
    ],
)
@pytest.mark.filterwarnings("error")
def test_the_largest_and_the_smallest_are_looked_for_among_numbers(row, values, places):
    found, at = torch.zeros(2), torch.full((2,), -1, dtype=torch.int32)
    _largest[(1,)](found, at, torch.tensor(row), BLOCK=4)
    assert found.isnan().all() if values is None else found.tolist() == values
    assert ((at >= 0) & (at < 4)).all() if places is None else at.tolist() == places


@triton.jit
def _count(out, start, end, step):
    for number in tl.range(start, end, step):
        tl.store(out + number.to(tl.int64), number)


def test_a_range_counts_in_numbers_that_kernels_can_cast():
    out = torch.zeros(8, dtype=torch.int32)
    _count[(1,)](out, 1, 8, 3)
    assert out.tolist() == [0, 1, 0, 0, 4, 0, 0, 7]
