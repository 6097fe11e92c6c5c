"""few_tokens.cu, run on the CPU by cuda_emulation.h: the same source, a thread for each of the device's threads."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from selfspec_cli.early_exit.draft_weights import DRAFT_WEIGHTS

few_tokens = pytest.importorskip("selfspec_cli.vllm_plugin.weights.few_tokens")  # imports Triton
HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++ to compile the kernel with")
@pytest.mark.parametrize(
    ("bits", "tokens", "rows", "groups", "warps", "row_tiles", "splits", "biased"),
    [
        (4, 5, 40, 8, 2, 1, 2, True),
        (5, 5, 40, 8, 2, 1, 2, False),
        (6, 5, 40, 8, 2, 1, 2, False),
        (8, 5, 40, 8, 2, 1, 2, False),
        (4, 17, 70, 6, 2, 2, 1, False),  # groups in pairs, tokens and rows that end within a tile
        (4, 3, 33, 5, 1, 1, 4, True),  # single groups, which the blocks share unevenly
        (4, 9, 33, 36, 2, 1, 2, False),  # more groups than shared memory holds at once
    ],
)
def test_products_are_those_of_the_copy(tmp_path, bits, tokens, rows, groups, warps, row_tiles, splits, biased):
    shape = few_tokens.shape_of(bits, tokens, rows, groups, 1, biased)
    shape = shape._replace(warps=warps, row_tiles=row_tiles, splits=splits)
    library = tmp_path / "kernel.so"
    subprocess.run(
        ["g++", "-std=c++20", "-O1", "-w", "-shared", "-fPIC", "-pthread", "-x", "c++", "-", "-o", str(library),
         "-include", str(HERE / "cuda_emulation.h"), f'-DKERNEL="{few_tokens.SOURCE}"', *shape.definitions()],
        input="", text=True, check=True,
    )  # fmt: skip
    kind = DRAFT_WEIGHTS[f"int{bits}"]
    copy = kind.quantise(torch.randn(rows, 64 * groups))
    x, bias = torch.randn(tokens, 64 * groups).bfloat16(), torch.randn(rows).bfloat16()
    out = torch.full((tokens, rows), torch.nan, dtype=torch.bfloat16)
    tensors = (x, copy["words"], copy.get("more", x), copy["scales"], bias, out)
    ctypes.CDLL(str(library)).emulate(*(ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors), tokens, rows, groups)
    wanted = x.double() @ kind.dequantise(copy, torch.float64).T + (bias.double() if biased else 0)
    # Nothing but the rounding of the result: half a step of bf16 is 2^-9 of it, and sums are float32.
    torch.testing.assert_close(out.double(), wanted, rtol=2**-8, atol=2**-12)


@pytest.mark.parametrize(
    ("tokens", "rows", "groups", "wanted"),
    [
        (2, 28672, 64, {"token_tiles": 1, "splits": 2, "unit": 4}),  # 224 blocks are fewer than two each
        (8, 4096, 64, {"token_tiles": 1, "splits": 8, "unit": 4}),
        (9, 4096, 64, {"token_tiles": 2}),
        (64, 128256, 64, {"token_tiles": 8, "splits": 1}),
        (3, 576, 9, {"unit": 1, "splits": 4}),  # 9 units: 8 splits would leave less than two each
        (3, 2304, 36, {"unit": 4}),
    ],
)
def test_blocks_share_columns_until_every_multiprocessor_has_work(tokens, rows, groups, wanted):
    shape = few_tokens.shape_of(4, tokens, rows, groups, 132, False)
    assert {name: getattr(shape, name) for name in wanted} == wanted


@pytest.mark.slow
@pytest.mark.parametrize("bits", [4, 5, 6, 8])
def test_it_compiles_for_hopper_without_a_gpu(bits):
    pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC comes with PyTorch's CUDA build")
    for tokens in (8, 16, 32, 64):
        assert few_tokens.compiled(few_tokens.shape_of(bits, tokens, 4096, 64, 132, True), "sm_90")
