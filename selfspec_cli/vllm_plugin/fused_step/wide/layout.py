"""How the kernel for many tokens shares out its work (memory.cu explains it). Needs torch alone.

It reads weights as ../layout.py stores them. For each of the four products a block copies the records of its own rows
and columns, a slab of column groups at a time."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from selfspec_cli.vllm_plugin.fused_step.layout import PHASES, RECORD, Shape, round_up

SHARED = 232448  # bytes of shared memory that a block of a Hopper GPU can have
WIDTHS = (16, 32, 48, 64)  # tokens that a kernel is compiled for, at most
WARPS = (12, 8)  # of a block that multiply; eight have more registers each, twelve wait less for each other
EIGHT_LOSES = 1.1  # how much longer eight warps take over as many records, assumed
TILES = {(16, 12): 7, (32, 12): 4, (48, 12): 2, (64, 12): 2, (16, 8): 12, (32, 8): 8, (48, 8): 6, (64, 8): 4}
"""Most tiles of a warp at a time, for tokens and warps: more need more registers."""
SLABS = (8, 4, 3, 2, 1)  # groups of columns of a copy of activations; the first with which the rings have room
FEWEST_BYTES = 95_000  # of the ring of weights, where it can have them: more than is on the way from memory at a time
MOST_SUMS = 60  # tiles times warps that share a tile's columns, whose sums lie in shared memory at a time
SUM_BYTES = 16 * 20 * 4  # of a tile's sums for 16 tokens
ROUND_US = 0.15  # assumed, to plan by: 12 warps multiply a record each
BYTES_PER_US = 60_000  # assumed, too: from L2 into one block
STAMPS = (
    *(f"{phase}_{point}" for phase in PHASES for point in ("ready", "multiplied", "stored")),
    *("attention_begun", "attention_ready", "attention_stored", "finish_ready", "finish_stored"),
)
"""Points of a layer whose time -DSTAMPS keeps, in memory.cu's order."""


def part_of(count: int, part: int, parts: int) -> range:
    """The part-th of `parts` equal shares of `count` things."""
    return range(count * part // parts, count * (part + 1) // parts)


@dataclass(frozen=True)
class Build:
    """What the kernel is compiled with. tokens: most of a step, a multiple of 16. rows: groups of warps that share the
    tiles of qkv, o, gate_up, down; the warps of a group share the columns. down_rows, down_slices: parts of the rows
    and of the columns of down. slab: groups of columns of a copy of activations."""

    shape: Shape
    tokens: int
    warps: int
    blocks: int
    rows: tuple[int, int, int, int]
    down_rows: int
    down_slices: int
    slab: int
    weight_slots: int = 0
    input_slots: int = 0

    name: ClassVar[bytes] = b"draft_trunk_wide"
    parts: ClassVar[tuple[str, ...]] = (
        "ptx.cu",
        "shape.cu",
        "wide/memory.cu",
        "keys.cu",
        "wide/product.cu",
        "wide/attention.cu",
        "wide/trunk.cu",
    )

    def work(self, phase: str, block: int) -> tuple[range, range]:
        """A block's tiles of rows and groups of columns of a product."""
        tiles, groups = self.shape.tiles[phase], self.shape.groups[phase]
        if phase != "down":
            # Blocks that have fewest rows of qkv have most of o.
            return part_of(tiles, self.blocks - 1 - block if phase == "o" else block, self.blocks), range(groups)
        piece = block // self.down_rows
        if piece >= self.down_slices:
            return range(0), range(0)
        return part_of(tiles, block % self.down_rows, self.down_rows), part_of(groups, piece, self.down_slices)

    def most_tiles(self, phase: str) -> int:
        """Most tiles of a block."""
        return -(-self.shape.tiles[phase] // (self.down_rows if phase == "down" else self.blocks))

    def most_groups(self, phase: str) -> int:
        """Most groups of columns of a block."""
        return -(-self.shape.groups[phase] // (self.down_slices if phase == "down" else 1))

    @property
    def tiles_of_warp(self) -> int:
        """Most tiles of a warp at a time."""
        return max(-(-self.most_tiles(phase) // rows) for phase, rows in zip(PHASES, self.rows, strict=True))

    @property
    def records(self) -> int:
        """Records that a slot of the ring of weights has room for."""
        return self.slab * max(map(self.most_tiles, PHASES))

    @property
    def items(self) -> int:
        """Most items of attention of a block."""
        return -(-self.tokens * self.shape.heads // self.blocks)

    @property
    def threads(self) -> int:
        """Of a block: those that multiply, and a warpgroup that copies."""
        return self.warps * 32 + 128

    @property
    def grid(self) -> int:
        return self.blocks

    @property
    def input_slot(self) -> int:
        """Bytes of a slot of the ring of activations."""
        return self.slab * self.tokens * 128

    @property
    def sums(self) -> int:
        """Bytes of the sums that warps add up in shared memory, of a product or of attention."""
        products = (
            self.warps // rows * self.most_tiles(phase) * SUM_BYTES
            for phase, rows in zip(PHASES, self.rows, strict=True)
        )
        heads = self.shape.query_heads // self.shape.heads
        return max(*products, self.warps * heads * (self.shape.dim + 2) * 4)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block; memory.cu lays it out."""
        shape, owned, biased = self.shape, self.most_tiles("o"), self.most_tiles("qkv")
        area = round_up(max(self.sums, self.input_slots * self.input_slot), 128)
        residual = owned * self.tokens * 64 + self.tokens * 4
        small = (2 * shape.layers + 1) * owned * 32 + shape.bias * shape.layers * biased * 32
        attention = self.items * (shape.dim * 4 + 48) + 16 * (shape.dim + 8) + 4 * shape.dim
        barriers = (2 * self.weight_slots + 2 * self.input_slots + 1 + 6 + 1) * 8
        return self.weight_slots * self.records * RECORD + area + residual + small + attention + barriers

    @property
    def memory_bytes(self) -> int:
        """Memory through which blocks pass results to each other; memory.cu lays it out."""
        shape, n = self.shape, self.tokens
        attended = shape.query_heads * shape.dim
        counters = round_up(6 * 128 + n * shape.heads * 4, 128)
        values = n * 2 * (shape.hidden + shape.qkv + attended + shape.intermediate)
        squares, sums = n * shape.tiles["o"] * 4, self.down_slices * n * shape.hidden * 4
        items = self.blocks * self.items * (shape.query_heads // shape.heads)
        return counters + values + squares + sums + items * (shape.dim + 2) * 4

    @property
    def options(self) -> list[str]:
        values = {
            **self.shape.options,
            "TOKENS": self.tokens,
            "NB": self.blocks,
            "WARPS": self.warps,
            **{f"ROWS_{phase.upper()}": rows for phase, rows in zip(PHASES, self.rows, strict=True)},
            "DOWN_ROWS": self.down_rows,
            "DOWN_SLICES": self.down_slices,
            "TILES": self.tiles_of_warp,
            "SLAB": self.slab,
            "RECORDS": self.records,
            "WEIGHT_SLOTS": self.weight_slots,
            "INPUT_SLOTS": self.input_slots,
            "ITEMS": self.items,
            "SHARED": self.shared_bytes,
            "MEMORY": self.memory_bytes,
        }
        return [f"-D{name}={value}" for name, value in values.items()]

    def memory(self, device: torch.device) -> dict[str, Tensor]:
        """Tensors of the kernel's own, by the names of its arguments."""
        return {"memory": torch.zeros(self.memory_bytes, dtype=torch.uint8, device=device)}


def built(shape: Shape, blocks: int, tokens: int, shared: int = SHARED, warps: int | None = None) -> Build:
    """The build for steps of up to `tokens` tokens (one of WIDTHS) on `blocks` multiprocessors. warps: one of WARPS;
    None: with which the slowest warp is fastest. Raises ValueError if a block's tiles or the rings have no room."""
    plans: list[tuple[float, Build]] = []
    reason = ValueError()
    parts = _parts_of_down(shape, blocks, tokens)
    for count in WARPS if warps is None else (warps,):
        try:
            plans.append(_planned(Build(shape, tokens, count, blocks, (1, 1, 1, 1), *parts, 1)))
        except ValueError as error:
            reason = error
    if not plans:
        raise reason
    _, plan = min(plans, key=lambda one: one[0])
    for slab in SLABS:
        # Activations have three slots, or as many as the sums need that lie there later; weights have the rest.
        some = replace(plan, slab=slab)
        for slots in range(max(3, some.sums // some.input_slot), 1, -1):
            room = shared - replace(some, input_slots=slots).shared_bytes
            weights = room // (some.records * RECORD + 16)
            if weights >= 3 and (weights * some.records * RECORD >= FEWEST_BYTES or slab == SLABS[-1]):
                return replace(some, input_slots=slots, weight_slots=min(weights, 64))
    raise ValueError(f"{shared} bytes of shared memory have no room for weights and activations of {tokens} tokens")


def _planned(plan: Build) -> tuple[float, Build]:
    """With row groups, and how long the slowest warps of the products take, as a number to compare."""
    work = [(plan.most_tiles(phase), plan.most_groups(phase)) for phase in PHASES]
    qkv, o, gate_up, down = (_row_groups(*one, plan.warps, TILES[plan.tokens, plan.warps]) for one in work)
    rows = (qkv, o, gate_up, down)
    rounds = sum(_rounds(*one, groups, plan.warps) for one, groups in zip(work, rows, strict=True))
    return rounds * plan.warps * (EIGHT_LOSES if plan.warps == 8 else 1.0), replace(plan, rows=rows)


def _rounds(tiles: int, groups: int, row_groups: int, warps: int) -> int:
    """Records of the warp that multiplies most."""
    return -(-tiles // row_groups) * -(-groups // (warps // row_groups))


def _row_groups(tiles: int, groups: int, warps: int, most: int) -> int:
    """Groups of warps that share a block's tiles: the number with which the slowest warp multiplies fewest records.
    most: tiles of a warp."""
    possible = [
        n for n in range(1, warps + 1) if warps % n == 0 and -(-tiles // n) <= most and warps // n * tiles <= MOST_SUMS
    ]
    if not possible:
        raise ValueError(f"a block has {tiles} tiles of rows, and no more than {most} of a warp have registers")
    return min(possible, key=lambda n: (_rounds(tiles, groups, n, warps), n))


def _parts_of_down(shape: Shape, blocks: int, tokens: int) -> tuple[int, int]:
    """Parts of the rows and of the columns of down with which it should take least time."""

    def cost(rows: int) -> tuple[float, int, int]:
        slices = min(blocks // rows, shape.groups["down"])
        tiles, groups = -(-shape.tiles["down"] // rows), -(-shape.groups["down"] // slices)
        if tiles > 1.25 * -(-shape.tiles["gate_up"] // blocks):  # slots are as large as the largest slab of weights
            return math.inf, rows, slices
        owned = -(-shape.tiles["o"] // blocks)
        moved = tokens * (groups * 128 + tiles * 64 + owned * slices * 64)
        return moved / BYTES_PER_US + min(products_us(tiles, groups, warps) for warps in WARPS), rows, slices

    def products_us(tiles: int, groups: int, warps: int) -> float:
        try:
            row_groups = _row_groups(tiles, groups, warps, TILES[tokens, warps])
        except ValueError:
            return math.inf
        return _rounds(tiles, groups, row_groups, warps) * ROUND_US * warps / 12

    _, rows, slices = min(map(cost, range(1, min(blocks, shape.tiles["down"]) + 1)))
    return rows, slices
