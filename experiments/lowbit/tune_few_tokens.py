"""How fast 2 to 64 tokens times integer copies are on the GPU at hand: our kernel in several shapes, cuBLAS, Marlin.

    python experiments/lowbit/tune_few_tokens.py --bits 4 8 --tokens 1 2 4 8 16 32 64 --out few_tokens.json

Measured as tune_kernels.py measures, whose shapes these are. `error` is relative to a float32 product of the copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product as every
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from tune_kernels import CACHE, SHAPES, copy_rate, parser_of, several, timed, write

from selfspec_cli.early_exit.draft_weights import DRAFT_WEIGHTS
from selfspec_cli.vllm_plugin.weights import few_tokens, lowbit


def variants(bits: int, tokens: int, rows: int, groups: int) -> Iterator[few_tokens.Shape]:
    """The kernels to try: warps, row tiles and splits."""
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    default = few_tokens.shape_of(bits, tokens, rows, groups, processors, biased=False)
    yield default
    for (warps, row_tiles), splits in every([(8, 1), (4, 1), (4, 2), (8, 2)], few_tokens.SPLITS):
        shape = default._replace(warps=warps, row_tiles=row_tiles, splits=splits)
        too_large = shape.token_tiles * shape.rows > 8 * 128  # more shared memory than a block gets
        if shape != default and not too_large and groups // shape.unit >= splits:
            yield shape


def marlin(weight: Tensor, bits: int) -> tuple[list[Callable[[Tensor], Tensor]], int]:
    """vLLM's kernel for GPTQ checkpoints, on as many copies as exceed the cache; bytes of one."""
    from vllm.model_executor.layers.quantization.utils import marlin_utils
    from vllm.model_executor.layers.quantization.utils.marlin_utils_test import marlin_quantize
    from vllm.scalar_type import scalar_types

    kind = scalar_types.uint4b8 if bits == 4 else scalar_types.uint8b128
    _, words, scales = marlin_quantize(weight.T.contiguous(), kind, 128)
    size = sum(tensor.numel() * tensor.element_size() for tensor in (words, scales))
    empty, workspace = marlin_utils.marlin_make_empty(weight.device), marlin_utils.get_marlin_workspace(weight.device)

    def call(words: Tensor, scales: Tensor, x: Tensor) -> Tensor:
        rows, columns = weight.shape
        return marlin_utils.apply_gptq_marlin_linear(x, words, scales, empty, workspace, kind, rows, columns)

    return [partial(call, words.clone(), scales.clone()) for _ in range(1 + CACHE // size)], size


def rows(shape: str, bits: list[int], token_counts: list[int]) -> Iterator[dict[str, Any]]:
    """Every product of one shape of layer."""
    out, inner = SHAPES[shape]
    weight = torch.randn(out, inner, device="cuda", dtype=torch.bfloat16) / inner**0.5
    inputs = {tokens: torch.randn(tokens, inner, device="cuda", dtype=torch.bfloat16) for tokens in token_counts}
    plain, size = several({"weight": weight})
    for tokens, x in inputs.items():
        us = timed([partial(F.linear, x, one["weight"]) for one in plain])
        yield {"shape": shape, "kind": "cublas", "tokens": tokens, "us": us, "bytes": size}
    del plain
    for width in bits:
        kind = DRAFT_WEIGHTS[f"int{width}"]
        copies, size = several(kind.quantise(weight))
        dense = kind.dequantise(copies[0], torch.float32)
        for tokens, x in inputs.items():
            found = {"shape": shape, "kind": kind.name, "tokens": tokens, "bytes": size}
            wanted = x.float() @ dense.T
            if tokens == 1:
                calls = [partial(lowbit.product, x, c["words"], c.get("more"), c["scales"]) for c in copies]
                yield {**found, "kind": f"{kind.name} dp4a", "us": timed(calls)}
            for variant in variants(width, tokens, out, inner // 64):
                ours = partial(few_tokens.product, x, shape=variant)
                calls = [partial(ours, c["words"], c.get("more"), c["scales"]) for c in copies]
                error = float((calls[0]().float() - wanted).norm() / wanted.norm())
                yield {**found, "variant": variant._asdict(), "error": error, "us": timed(calls)}
        del copies, dense
        if width in (4, 8):
            kernels, size = marlin(weight, width)
            for tokens, x in inputs.items():
                us = timed([partial(kernel, x) for kernel in kernels])
                yield {"shape": shape, "kind": f"marlin{width}", "tokens": tokens, "us": us, "bytes": size}


def main() -> None:
    """Measure, print the best of each product, and write everything as JSON after each shape of layer."""
    parser = parser_of(__doc__, "few_tokens.json")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    arguments = parser.parse_args()
    rate = copy_rate()
    found: list[dict[str, Any]] = []
    print(f"{torch.cuda.get_device_name()}, copies at {rate / 1e12:.2f} TB/s")
    for shape in arguments.shapes:
        for row in rows(shape, arguments.bits, arguments.tokens):
            found.append({**row, "share": row["bytes"] / row["us"] * 1e6 / rate})
            write(arguments.out, rate, found)
        mine = [row for row in found if row["shape"] == shape]
        for kind, tokens in dict.fromkeys((row["kind"], row["tokens"]) for row in mine):
            tried = [row for row in mine if (row["kind"], row["tokens"]) == (kind, tokens)]
            best = min(tried, key=lambda row: row["us"])
            chosen = {name: best["variant"][name] for name in ("warps", "row_tiles", "splits") if "variant" in best}
            print(
                f"{shape:<8} {kind:<9} {tokens:>3} {best['us']:7.1f} us {best['share']:.2f}  {chosen or ''}", flush=True
            )


if __name__ == "__main__":
    main()
