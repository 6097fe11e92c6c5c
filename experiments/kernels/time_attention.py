"""How long attention of one new token a request takes on the GPU at hand: our kernel, and vLLM's way.

    python experiments/kernels/time_attention.py --out attention.json

vLLM's way: `reshape_and_cache_flash`, then FlashAttention with up to 32 splits and its schedule made beforehand, as an
engine runs it inside a CUDA graph. Calls rotate over several caches, so that keys come from memory. Figures: median
microseconds a call; `ours_in_turn_us`: where each begins when the one before has ended. `error`: largest difference of
the two results. `written`: whether both wrote the same to the cache.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor
from triton.testing import do_bench_cudagraph
from vllm.v1.attention.backends.fa_utils import (
    flash_attn_varlen_func,
    get_flash_attn_version,
    get_scheduler_metadata,
    reshape_and_cache_flash,
)

from selfspec_cli.vllm_plugin.attention.one_query import attend

SHAPES = {"8b": (32, 8, 128), "smollm2_widened": (36, 12, 64), "reference_widened": (32, 32, 128)}
"""Query heads, heads, dim."""
POINTS = [(1, 64), (1, 256), (1, 1024), (1, 4096), (1, 32768), (8, 256), (8, 4096), (32, 256), (32, 2048), (128, 512)]
"""Requests, tokens of each."""
PAGE, CACHE, MOST_CALLS = 16, 120 * 2**20, 48


class Case:
    """One shape: queries, keys and values of a new token for each request, and caches to rotate over."""

    def __init__(self, shape: str, requests: int, tokens: int) -> None:
        self.query_heads, self.heads, self.dim = SHAPES[shape]
        width = (self.query_heads + 2 * self.heads) * self.dim
        sizes = [self.query_heads * self.dim, self.heads * self.dim, self.heads * self.dim]
        both = torch.randn(requests, width, device="cuda", dtype=torch.bfloat16)
        self.query, self.key, self.value = (part.unflatten(1, (-1, self.dim)) for part in both.split(sizes, dim=1))
        pages = -(-tokens // PAGE)
        blocks = requests * pages
        size = blocks * self.heads * PAGE * 2 * self.dim
        count = min(MOST_CALLS, max(4, CACHE // (2 * size)))
        self.caches = [
            torch.randn(blocks, self.heads, PAGE, 2 * self.dim, device="cuda").bfloat16() for _ in range(count)
        ]
        self.table = torch.randperm(blocks, device="cuda").reshape(requests, pages).int()
        self.seq_lens = torch.full((requests,), tokens, device="cuda", dtype=torch.int32)
        self.slots = self.table[:, (tokens - 1) // PAGE].long() * PAGE + (tokens - 1) % PAGE
        self.starts = torch.arange(requests + 1, device="cuda", dtype=torch.int32)
        self.longest, self.scale = tokens, self.dim**-0.5
        self.one = torch.ones(1, device="cuda")
        self.schedule = get_scheduler_metadata(
            batch_size=requests,
            max_seqlen_q=1,
            max_seqlen_k=tokens,
            num_heads_q=self.query_heads,
            num_heads_kv=self.heads,
            headdim=self.dim,
            cache_seqlens=self.seq_lens,
            qkv_dtype=torch.bfloat16,
            cu_seqlens_q=self.starts,
            page_size=PAGE,
            causal=True,
            window_size=(-1, -1),
            num_splits=32,
        )

    def ours(self, cache: Tensor, **setting: int) -> Tensor:
        """Our kernel."""
        out = torch.empty(len(self.query), self.query_heads * self.dim, device="cuda", dtype=torch.bfloat16)
        attend(
            self.query, self.key, self.value, cache, self.table, self.seq_lens, self.slots, self.scale, out, **setting
        )
        return out

    def vllms(self, cache: Tensor) -> Tensor:
        """vLLM's two calls."""
        keys, values = cache.transpose(1, 2).split(self.dim, dim=-1)
        reshape_and_cache_flash(self.key, self.value, keys, values, self.slots, "auto", self.one, self.one)
        out = torch.empty_like(self.query, memory_format=torch.contiguous_format)
        flash_attn_varlen_func(
            q=self.query,
            k=keys,
            v=values,
            out=out,
            cu_seqlens_q=self.starts,
            max_seqlen_q=1,
            seqused_k=self.seq_lens,
            max_seqlen_k=self.longest,
            softmax_scale=self.scale,
            causal=True,
            window_size=[-1, -1],
            block_table=self.table,
            scheduler_metadata=self.schedule,
            fa_version=get_flash_attn_version(),
            num_splits=32,
        )
        return out.flatten(1)


def timed(calls: Sequence[Callable[[], object]]) -> float:
    """Microseconds of one of `calls`, by CUDA graphs of all of them."""
    milliseconds = do_bench_cudagraph(lambda: [call() for call in calls], return_mode="median")
    return 1000 * float(milliseconds) / len(calls)


def main() -> None:
    """Measure every shape, and write all as JSON after each point."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("attention.json"))
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=tuple(SHAPES))
    arguments = parser.parse_args()
    found = []
    for shape, (requests, tokens) in product(arguments.shapes, POINTS):
        case = Case(shape, requests, tokens)
        first, second = case.caches[0].clone(), case.caches[0].clone()
        error = float((case.ours(first) - case.vllms(second)).abs().max())
        row = {"shape": shape, "requests": requests, "tokens": tokens, "error": error, "written": first.equal(second)}
        row["vllm_us"] = timed([partial(case.vllms, cache) for cache in case.caches])
        row["ours_us"] = timed([partial(case.ours, cache) for cache in case.caches])
        row["ours_in_turn_us"] = timed([partial(case.ours, cache, early=False) for cache in case.caches])
        found.append(row)
        arguments.out.write_text(json.dumps({"device": torch.cuda.get_device_name(), "rows": found}, indent=1) + "\n")
        print(json.dumps(row), flush=True)
        del case


if __name__ == "__main__":
    main()
