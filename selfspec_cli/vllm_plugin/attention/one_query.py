"""Attention of one new token a request over a paged KV cache, which also writes that token's key and value.

At short contexts a draft step's attention takes little time but to begin: on an H200 and the shape of Llama 3 8B,
vLLM's three kernels (write to the cache, FlashAttention 3, combine its splits) take 9.5 to 12 us a layer at 64 to 1,024
tokens, this one 5 to 9; from about 4,000 tokens on both take about the same (gpu.jsonl.xz/attention). A program takes
some of a request's keys for the query heads that share them; one program has the newest key and value at hand, and
writes them to the cache. Where several programs share a request, the last one to arrive adds up what they found (flash
decoding)."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from selfspec_cli.vllm_plugin.weights.rounding import launches_early, none_arrived

LOG2_E = 1.4426950408889634
LEAST_ROWS = 16  # query heads of a product on tensor cores; fewer are padded
PROGRAMS = 256  # to aim at: about two for each multiprocessor of an H100
MOST_SPLITS = 32
BRIEF, LONG = 2048, 8192  # tokens that a request's block table has room for: up to the first, the second, or more
USUAL = {
    2: ((128, 8, 2, 32), (128, 8, 2, 16), (128, 8, 2, 32)),
    8: ((128, 8, 1, 16), (256, 8, 1, 16), (128, 8, 2, 16)),
    16: ((256, 8, 1, 8), (256, 8, 1, 8), (128, 4, 2, 16)),
    32: ((256, 8, 1, 8), (128, 8, 2, 8), (128, 8, 2, 8)),
    64: ((128, 8, 2, 4), (128, 8, 2, 4), (128, 8, 2, 4)),
}
"""Requests times KV heads, at most -> keys of a step, warps, stages and splits for each room. Measured on an NVIDIA
H200 at 1,024, 4,096 and 32,768 tokens, 128 dimensions, 2 and 8 heads (gpu/tune_kernels_h200.json)."""
SEVERAL = (128, 4, 2)  # keys of a step, warps and stages for more; and where `has_room` says no


@triton.jit
def _newest(q, key, value, keys, values, slot, scale, cache_block, cache_token, PAGE: tl.constexpr, DIM: tl.constexpr):
    """Scores of the newest token [ROWS] and its value [1, DIM], which it also writes to the token's slot of a head.
    key, value: of that token and head. keys, values: of the head, in the cache's first block."""
    dim = tl.arange(0, DIM)
    newest, worth = tl.load(key + dim), tl.load(value + dim)
    place = tl.load(slot)
    scores = tl.sum(q.to(tl.float32) * newest.to(tl.float32)[None, :], axis=1) * scale
    if place >= 0:
        at = place // PAGE * cache_block + place % PAGE * cache_token
        tl.store(keys + at + dim, newest)
        tl.store(values + at + dim, worth)
    return scores, worth.to(tl.float32)[None, :]


@triton.jit
def _over_cache(
    q,
    keys,
    values,
    blocks,
    block,
    cached,
    steps,
    split,
    best,
    weight,
    sums,
    scale,
    cache_block,
    cache_token,
    table_columns,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
    DIM: tl.constexpr,
):
    """best, weight and sums with every SPLITS-th step of KEYS cached keys: an online softmax, [ROWS] and [ROWS, DIM].
    keys, values: of a head, in the cache's first block. blocks: the request's row of the block table. block: the blocks
    of the first step's keys, read before."""
    dim, place = tl.arange(0, DIM), tl.arange(0, KEYS)
    for step in tl.range(split, steps, SPLITS):
        position = step * KEYS + place
        here = position < cached
        at = block.to(tl.int64) * cache_block + position % PAGE * cache_token
        some = tl.load(keys + at[None, :] + dim[:, None], mask=here[None, :], other=0.0)  # [DIM, KEYS]
        what = tl.load(values + at[:, None] + dim[None, :], mask=here[:, None], other=0.0)  # [KEYS, DIM]
        at_block = ((step + SPLITS) * KEYS + place) // PAGE
        block = tl.load(blocks + at_block, mask=at_block < table_columns, other=0)
        scores = tl.where(here[None, :], tl.dot(q, some) * scale, float("-inf"))
        larger = tl.maximum(best, tl.max(scores, axis=1))
        shares = tl.exp2(scores - larger[:, None])
        before = tl.exp2(best - larger)
        weight = weight * before + tl.sum(shares, axis=1)
        sums = sums * before[:, None] + tl.dot(shares.to(what.dtype), what)
        best = larger
    return best, weight, sums


@triton.jit
def _together(
    best,
    weight,
    sums,
    parts,
    stats,
    arrived,
    split,
    programs,
    exists,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Store what a program found; the last program to arrive adds up what all of them stored. Returns whether this is
    the last one, and then the weight [ROWS] and sums [ROWS, DIM] over all programs.
    parts [SPLITS, ROWS, DIM], stats [SPLITS, 2, ROWS] and arrived: of the request and head."""
    dim, row = tl.arange(0, DIM), tl.arange(0, ROWS)
    parts += row[:, None] * DIM + dim[None, :]
    tl.store(parts + split * ROWS * DIM, sums, mask=exists[:, None])
    tl.store(stats + split * 2 * ROWS + row, best)
    tl.store(stats + split * 2 * ROWS + ROWS + row, weight)
    tl.debug_barrier()  # all of the program's sums are there before it says so
    complete = tl.atomic_add(arrived, 1, sem="acq_rel") == programs - 1
    if complete:
        other = tl.arange(0, SPLITS)
        at = stats + other[:, None] * 2 * ROWS + row[None, :]
        there = (other < programs)[:, None]
        bests = tl.load(at, mask=there, other=float("-inf"), cache_modifier=".cg")  # [SPLITS, ROWS]
        weights = tl.load(at + ROWS, mask=there, other=0.0, cache_modifier=".cg")
        best = tl.max(bests, axis=0)
        weight = tl.sum(weights * tl.exp2(bests - best[None, :]), axis=0)
        sums = tl.zeros([ROWS, DIM], tl.float32)
        for one in tl.range(0, programs, loop_unroll_factor=4):
            share = tl.exp2(tl.load(stats + one * 2 * ROWS + row, cache_modifier=".cg") - best)
            more = tl.load(parts + one * ROWS * DIM, mask=exists[:, None], other=0.0, cache_modifier=".cg")
            sums += more * share[:, None]
        tl.store(arrived, 0)
    return complete, weight, sums


@triton.jit
def _attend(
    query,
    key,
    value,
    out,
    keys,
    values,
    table,
    seq_lens,
    slots,
    partial,
    found,
    arrived,
    scale,
    query_token,
    query_head,
    key_token,
    key_head,
    value_token,
    value_head,
    out_token,
    cache_block,
    cache_head,
    cache_token,
    table_row,
    table_columns,
    DIM: tl.constexpr,
    SHARED: tl.constexpr,
    ROWS: tl.constexpr,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """A program takes every SPLITS-th step of KEYS keys of a request for one head.
    scale: of the scores, times log2(e). SHARED: query heads that share a key, of ROWS rows of a product. PAGE: tokens
    of a block of the cache. partial: float32 [requests, heads, SPLITS, ROWS, DIM]. found: float32 [requests, heads,
    SPLITS, 2, ROWS], the largest score and the sum of all shares. arrived: int32 [requests, heads], left at 0."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    request, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    dim, row, place = tl.arange(0, DIM), tl.arange(0, ROWS), tl.arange(0, KEYS)
    exists = row < SHARED
    keys, values = keys + head * cache_head, values + head * cache_head
    blocks = table + request.to(tl.int64) * table_row
    at_block = (split * KEYS + place) // PAGE  # read before it is known how many there are
    block = tl.load(blocks + at_block, mask=at_block < table_columns, other=0)
    cached = tl.load(seq_lens + request) - 1  # a closed request has no tokens, and -1 here
    steps = tl.maximum((cached + KEYS - 1) // KEYS, 0)
    programs = tl.maximum(tl.minimum(steps, SPLITS), 1)
    if split < programs:
        rows = query + request * query_token + (head * SHARED + row)[:, None] * query_head + dim[None, :]
        q = tl.load(rows, mask=exists[:, None], other=0.0)
        best = tl.full([ROWS], float("-inf"), tl.float32)
        weight = tl.zeros([ROWS], tl.float32)
        sums = tl.zeros([ROWS, DIM], tl.float32)
        if split == 0:
            key += request * key_token + head * key_head
            value += request * value_token + head * value_head
            best, worth = _newest(
                q, key, value, keys, values, slots + request, scale, cache_block, cache_token, PAGE, DIM
            )
            weight += 1.0
            sums += worth
        best, weight, sums = _over_cache(
            q,
            keys,
            values,
            blocks,
            block,
            cached,
            steps,
            split,
            best,
            weight,
            sums,
            scale,
            cache_block,
            cache_token,
            table_columns,
            PAGE,
            KEYS,
            SPLITS,
            DIM,
        )
        if EARLY:
            tl.extra.cuda.gdc_launch_dependents()  # what comes next waits for this kernel's end itself
        complete = programs == 1
        if SPLITS > 1:  # noqa: SIM102 - a constant, by which the rest is compiled or not
            if programs > 1:
                unit = request * tl.num_programs(1) + head
                parts, stats = partial + (unit * SPLITS).to(tl.int64) * ROWS * DIM, found + unit * SPLITS * 2 * ROWS
                complete, weight, sums = _together(
                    best, weight, sums, parts, stats, arrived + unit, split, programs, exists, ROWS, DIM, SPLITS
                )
        if complete:
            whole = tl.where(cached >= 0, sums / weight[:, None], 0.0)
            result = out + request * out_token + (head * SHARED + row)[:, None] * DIM + dim[None, :]
            tl.store(result, whole.to(out.dtype.element_ty), mask=exists[:, None])


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache: Tensor,
    table: Tensor,
    seq_lens: Tensor,
    slots: Tensor,
    scale: float,
    out: Tensor,
    at_once: int | None = None,
) -> None:
    """Attention of one token a request, into out [n or more, query heads * dim]; its key and value go to the cache.
    query [n, query heads, dim], key and value [n, heads, dim]: contiguous in the last dimension. cache [blocks, heads,
    tokens of a block, 2 * dim]: each token's key, then its value (`fits`). table int32 [n or more, blocks a request].
    seq_lens int32 [n or more]: tokens of each request, with the new one; 0 for a closed request, whose result is 0.
    slots int64 [n or more]: where the new token belongs, counted in tokens; -1: nowhere. scale: of the scores. at_once:
    keys of a step; None for what is usual."""
    early = launches_early(query.device)
    n, query_heads, dim = query.shape
    heads, page = cache.shape[1], cache.shape[2]
    keys, warps, stages, splits = usual_settings(n, heads, table.shape[1] * page, query.device)
    rows = max(LEAST_ROWS, triton.next_power_of_2(query_heads // heads))
    parts = n * heads * splits * rows
    partial = torch.empty(parts * dim, dtype=torch.float32, device=query.device)
    found = torch.empty(parts * 2, dtype=torch.float32, device=query.device)
    _attend[(n, heads, splits)](
        query,
        key,
        value,
        out,
        cache,
        cache[..., dim:],
        table,
        seq_lens,
        slots,
        partial,
        found,
        none_arrived(query.device),
        scale * LOG2_E,
        query.stride(0),
        query.stride(1),
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        out.stride(0),
        cache.stride(0),
        cache.stride(1),
        cache.stride(2),
        table.stride(0),
        table.shape[1],
        DIM=dim,
        SHARED=query_heads // heads,
        ROWS=rows,
        PAGE=page,
        KEYS=at_once or keys,
        SPLITS=splits,
        EARLY=early,
        num_warps=warps,
        num_stages=stages,
        launch_pdl=early,
    )


def usual_settings(requests: int, heads: int, context: int, device: torch.device) -> tuple[int, int, int, int]:
    """Keys of a step, warps, stages and splits. context: tokens that a request's block table has room for."""
    pairs = requests * heads
    known = next((settings for most, settings in USUAL.items() if pairs <= most), None)
    if known is None or not has_room(device):
        return (*SEVERAL, min(MOST_SPLITS, max(1, triton.next_power_of_2(PROGRAMS // pairs + 1) // 2)))
    return known[0 if context <= BRIEF else 1 if context <= LONG else 2]


@lru_cache
def has_room(device: torch.device) -> bool:
    """Whether programs that take 256 keys a step have their 132 KiB of shared memory (dim 128); some cards have 99."""
    if device.type != "cuda":
        return True
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", 0)) >= 160 * 2**10


def fits(cache: Tensor, heads: int, dim: int) -> bool:
    """Whether a layer's KV cache is laid out as `attend` reads it."""
    return cache.dim() == 4 and cache.shape[1] == heads and cache.shape[3] == 2 * dim and cache.stride(3) == 1
