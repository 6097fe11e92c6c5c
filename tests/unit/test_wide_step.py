"""The kernel for 9 to 64 tokens: its plan and its layout of weights. tests/unit/test_emulated_trunk.py runs it."""

import re
from importlib.resources import files
from pathlib import Path

import pytest
from scripts import importable

from selfspec_cli.vllm_plugin.fused_step.layout import PHASES, Shape
from selfspec_cli.vllm_plugin.fused_step.wide.launch import Arguments
from selfspec_cli.vllm_plugin.fused_step.wide.layout import SHARED, STAMPS, WIDTHS, Build, built

QWEN = Shape(28, 1536, 8960, 12, 2, 128, 16, 1e-6, bias=True)
QWEN3 = Shape(28, 1024, 3072, 16, 8, 128, 16, 1e-6, head_norms=True)
LLAMA = Shape(32, 4096, 14336, 32, 8, 128, 16, 1e-5)
SMALL = Shape(3, 256, 448, 4, 2, 64, 16, 1e-6)
SOURCE = "".join((files("selfspec_cli.vllm_plugin.fused_step") / part).read_text() for part in Build.parts)


@pytest.mark.parametrize("tokens", WIDTHS)
@pytest.mark.parametrize("shape", [QWEN, QWEN3, LLAMA])
def test_every_build_shares_out_each_tile_and_fits_into_a_block(shape, tokens):
    build = built(shape, 132, tokens)
    assert build.shared_bytes <= SHARED and build.weight_slots >= 3 and build.input_slots >= 2
    for phase in PHASES:
        cells = set()
        for block in range(build.blocks):
            tiles, groups = build.work(phase, block)
            assert len(tiles) <= build.most_tiles(phase)
            mine = {(tile, group) for tile in tiles for group in groups}
            assert not mine & cells
            cells |= mine
        assert len(cells) == shape.tiles[phase] * shape.groups[phase]


@pytest.mark.parametrize(
    ("shape", "tokens", "over"), [(QWEN, 16, 1.15), (QWEN, 32, 1.15), (LLAMA, 16, 1.15), (LLAMA, 32, 1.05)]
)
def test_the_slowest_warp_multiplies_little_more_than_the_mean(shape, tokens, over):
    """Of gate_up and down, which are most of the weights."""
    build, most, mean = built(shape, 132, tokens), 0, 0.0
    for phase, rows in list(zip(PHASES, build.rows, strict=True))[2:]:
        tiles, groups = shape.tiles[phase], shape.groups[phase]
        columns = -(-groups // build.down_slices) if phase == "down" else groups
        most += -(-build.most_tiles(phase) // rows) * -(-columns // (build.warps // rows))
        mean += tiles * groups / build.blocks / build.warps
    assert most < over * mean


def test_a_block_without_room_is_refused():
    with pytest.raises(ValueError, match="60000 bytes of shared memory have no room for weights and activations of 32"):
        built(LLAMA, 132, 32, 60_000)
    with pytest.raises(ValueError, match="a block has 96 tiles of rows, and no more than 12 of a warp have registers"):
        built(LLAMA, 4, 16)


def test_arguments_and_stamps_are_those_of_the_source():
    body = re.search(r"struct Arguments \{(.*?)\n\};", SOURCE, re.DOTALL).group(1)
    names = re.findall(r"(\w+)(?=[,;])", re.sub(r"//.*", "", body))
    assert names == [name for name, *_ in Arguments._fields_]
    assert int(re.search(r"#define STAMPS_OF_LAYER (\d+)", SOURCE).group(1)) == len(STAMPS)


def test_the_script_for_a_gpu_finds_what_it_imports():
    with importable(Path(__file__).resolve().parents[2] / "experiments/kernels") as find:
        assert find("wide_step").TINY.layers == 2
