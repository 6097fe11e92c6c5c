"""Published files of single GPU runs as sections of the page of all figures."""

from __future__ import annotations

import statistics
from typing import Any

from figure_cells import data_of, names, number, ratio, table


def lossless() -> str:
    """Write how many outputs were compared on a GPU in batch-invariant mode, and how many differed."""
    lines = []
    for name in names("*lossless*.json"):
        report = data_of(name)
        cases = report.get("cases", [])
        gates = [each for engine in report.get("gates", {}).values() for each in engine.values()]
        differ = [
            len(one["different"]) if isinstance(one["different"], list) else one["different"]
            for one in [*cases, *gates]
        ]
        compared = sum(case["compared"] for case in cases)
        drafted = sum(one.get("drafted", 0) for one in [*cases, *gates])
        accepted = sum(one.get("accepted", 0) for one in [*cases, *gates])
        lines.append((f"`{name}`", len(differ), compared or None, f"{drafted:,}", f"{accepted:,}", str(sum(differ))))
    text = """### lossless: greedy outputs against plain decoding

On H200 cards in vLLM's batch-invariant mode, small models with random weights. A case is one model with one setting; for
gates, one gate in one engine of 64 requests.

```
python tests/gpu/test_v2_lossless.py [--gates | --lengths | --tensor-parallel 2] --out FILE
```

"""
    return text + table(("file", "cases", "outputs compared", "drafted", "accepted", "outputs that differ"), lines)


def trace() -> str:
    """Write where the time of a step goes at batch 1."""
    lines = []
    for name in ("gpu/trace_batch1.json", "gpu/earlier/first/trace_batch1.json"):
        for arm in data_of(name):
            parts = ", ".join(f"{part['part']} {part['busy']:,.0f}" for part in arm["parts"])
            lines.append((f"`{name}`", arm["arm"], number(arm["wall_us_profiled"], 5), parts))
    text = """### trace: where a round's time goes on a GPU

Microseconds of a round at batch 1, by part, under the profiler, which slows the host. The script that made these files
is in the history of the repository (`git show 8df6101 -- experiments`); [`selfspec profile`](report.md#where-the-time-goes-selfspec-profile) took
its place:

```
selfspec profile model=llama3_8b_shape engine=gpu workload=decode acceptance_length=3.0 perplexity_tokens=0
```

"""
    return text + table(("file", "arm", "µs of a round", "busy, by part (µs)"), lines)


def low_bits() -> str:
    """Write single runs: 4-bit drafts, code before and after a rearrangement, and another vLLM."""
    files = ("gpu/lowbit/engine_h200.json", "gpu/rearranged/before_after.json", "gpu/vllm_0.33/gpu_8b.json")
    lines = []
    for name in files:
        rows = data_of(name)["rows"]
        plain = {same_run(row): statistics.median(row["tok_s"]) for row in rows if row["arm"] == "baseline"}
        for row in rows:
            speed = statistics.median(row["tok_s"])
            over = plain.get(same_run(row))
            lines.append(
                (
                    f"`{name}`",
                    row.get("gpu"),
                    row["code"],
                    row["arm"],
                    row["batch"],
                    number(speed, 4),
                    ratio(over and speed / over),
                    row.get("note"),
                )
            )
    about = "\n\n".join(f"`{name}`: {data_of(name)['what']}." for name in files)
    header = ("file", "GPU", "revision", "arm", "at once", "tok/s (median)", "speedup", "note")
    return f"### lowbit, rearranged and vllm_0.33: single runs\n\n{about}\n\n" + table(header, lines)


def same_run(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return the values that a row shares with its baseline."""
    return row.get("gpu"), row["code"], row["batch"]


def fits() -> str:
    """Write how long a fit of heads takes on a GPU."""
    rows = []
    for name in ("gpu/fit_8b_shape.json", "gpu/fit_fp8.json"):
        fit = data_of(name)
        rows.append(
            (
                f"`{name}`",
                fit["model"],
                ", ".join(fit["heads"]),
                f"{fit['pairs']:,}",
                f"{fit['after_engine_start_s']:.2f} s",
                f"{fit['peak_device_gib']:.1f} GiB",
            )
        )
    text = """### fit: how long a fit of exit heads takes on a GPU

One H200. With random weights only times mean something.

```
python experiments/fit_on_gpu.py
python experiments/fit_on_gpu.py --model reference --quantization fp8 --layers 12 --heads lens lsq translator
```

"""
    return text + table(("file", "model", "heads", "pairs", "after the engine's start", "memory"), rows)


def kernels() -> str:
    """Write the list of files that are tables already."""
    return """### kernels: products of one and of a few tokens

These files are tables of their own, too wide for a page:

| file | what | command |
| --- | --- | --- |
| `gpu/kernels_h200.txt` | one to four tokens times bf16 and 8-bit weights, by our kernels and by cuBLAS; the search for tiles | (a script of that day; the file says what was tried) |
| `gpu/tune_kernels_h200.json` | settings of each product with 4-bit copies and of the draft's attention, the usual one of that day and the best, at 1 to 32 tokens and 1,024 to 32,768 of context; lm_head with logit statistics, by two kernels and by one | (`selfspec tune-kernels` of that day, on the shapes of Qwen2.5-Coder-1.5B and Llama 3 8B, both in one file) |
| `gpu/fp8/linear_h200.txt` | 8-bit products by four libraries | (a script of that day) |
| `gpu/lowbit/kernels_h100.json` | one token times 4-bit copies | (a script of that day) |
| `gpu/lowbit/few_tokens_h200.json` | 1 to 32 tokens times 4-bit and 8-bit copies: two kernels of ours, Marlin, cuBLAS | (a script of that day; the file names it) |
| `gpu/lowbit/one_token_h200.json` | one token times 4-bit copies, rounded in every program or once before | (a script of that day) |
| `gpu/lowbit/one_token_early_h200.json` | one token times 4-bit copies, the product launched while the token is rounded, and after it | (a script of that day) |
| `gpu/lowbit/one_token_layouts_h200.json` | one token times 4-bit and 8-bit copies in our layout, in Marlin's by our kernel (`tiles`), and by Marlin; shapes of SmolLM2 widened too | (a script of that day) |
| `gpu/lowbit/products_h100.json` | 1 to 64 tokens times 4-bit and 8-bit copies, by our kernels in many settings, by Marlin, and by cuBLAS | (a script of that day); 64 tokens by a kernel that takes up to 32 now |"""


LONG = 8192
"""Tokens of context up to which one request had the first of two settings."""


def attention() -> str:
    """Write the times of the draft's attention and vLLM's."""
    rows = []
    for row in data_of("gpu/attention/attention_h200.json")["rows"]:
        at_once = 256 if row["tokens"] <= LONG else 128  # what one request had, with 8 warps
        usual = [one["us"] for one in row["tried"] if (one["at_once"], one["warps"]) == (at_once, 8)]
        ours = usual[-1] if usual else row["ours_us"]
        rows.append(
            (
                row["shape"],
                row["requests"],
                f"{row['tokens']:,}",
                f"{row['vllm_us']:.1f}",
                f"{ours:.1f}",
                ratio(row["vllm_us"] / ours),
            )
        )
    text = """### attention of one new token a request

Microseconds a layer, medians inside a CUDA graph: vLLM's write to the cache and FlashAttention 3, and the kernel that drafts
have (`vllm_plugin/attention/`), with the setting that it had then for the context that the engine was started for. One H200, bf16.
`gpu/attention/attention_h200.json` has other settings too.

```
python experiments/kernels/time_attention.py --shapes 8b smollm2_widened --out attention.json
```

"""
    return text + table(("shape", "requests", "tokens of each", "vLLM", "drafts", "vLLM over drafts"), rows)
