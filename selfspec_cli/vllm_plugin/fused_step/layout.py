"""Weights as both kernels for a whole trunk read them, and what each block of the one for few tokens multiplies
(exchange.cu says how it works). Needs torch alone.

Copies of 4 bits (`early_exit.draft_weights.integers`) are laid out anew, as records: a tile of 16 rows times one group
of 64 columns. A layer is stored as the records of qkv, then those of the output product, gate and up, and down. The
records of a product are stored tile by tile, and in a tile group by group. Gate and up differ: four tiles are a strip,
which is stored group by group, with the four records of a group side by side. So a warp or a block needs a few runs of
neighbouring records at a time."""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from selfspec_cli.early_exit.draft_weights.integers import GROUP, integers

ROWS = 16  # of a tile
RECORD = 544  # bytes: 16 * 64 / 2 of integers, and 16 scales of two bytes
STRIP = 4  # tiles of gate and up that a warp multiplies together, and whose 32 results are rounded together
PHASES = ("qkv", "o", "gate_up", "down")


@dataclass(frozen=True)
class Shape:
    """What the kernel is compiled for, apart from the number of tokens. page: tokens of a block of the KV cache."""

    layers: int
    hidden: int
    intermediate: int
    query_heads: int
    heads: int
    dim: int
    page: int
    epsilon: float
    bias: bool = False
    head_norms: bool = False
    rope_float: bool = False

    @property
    def qkv(self) -> int:
        """Rows of the product that gives queries, keys and values."""
        return (self.query_heads + 2 * self.heads) * self.dim

    @property
    def groups(self) -> dict[str, int]:
        """Groups of columns of each product."""
        attended = self.query_heads * self.dim
        columns = {"qkv": self.hidden, "o": attended, "gate_up": self.hidden, "down": self.intermediate}
        return {name: count // GROUP for name, count in columns.items()}

    @property
    def options(self) -> dict[str, object]:
        """What either kernel is compiled with for this shape."""
        return {
            "LAYERS": self.layers,
            "HIDDEN": self.hidden,
            "INTER": self.intermediate,
            "QH": self.query_heads,
            "KVH": self.heads,
            "DIM": self.dim,
            "PAGE": self.page,
            "BIAS": int(self.bias),
            "QKNORM": int(self.head_norms),
            "ROPE_FLOAT": int(self.rope_float),
            "EPSILON": f"{self.epsilon!r}f",
        }

    @property
    def tiles(self) -> dict[str, int]:
        """Tiles of rows of each product."""
        rows = {"qkv": self.qkv, "o": self.hidden, "gate_up": 2 * self.intermediate, "down": self.hidden}
        return {name: count // ROWS for name, count in rows.items()}

    @property
    def records(self) -> int:
        """Records of a layer."""
        return sum(self.groups[name] * self.tiles[name] for name in PHASES)


@dataclass(frozen=True)
class Plan:
    """Which tiles each block multiplies: (first, how many) of qkv, of the rows of the residual, of gate and up."""

    blocks: tuple[tuple[int, int, int, int, int, int], ...]
    warps: int

    @property
    def most_tiles(self) -> int:
        """Most tiles of a block in one phase."""
        return max(max(one[1::2]) for one in self.blocks)

    @property
    def most_rows(self) -> int:
        """Most tiles of a block of the residual."""
        return max(one[3] for one in self.blocks)

    def tensor(self) -> Tensor:
        """int32 [blocks, 6]."""
        return torch.tensor(self.blocks, dtype=torch.int32)


def round_up(count: int, unit: int) -> int:
    return -(-count // unit) * unit


def planned(shape: Shape, blocks: int, warps: int, evenly: float = 1.0) -> Plan:
    """Tiles for `blocks` blocks, so that each reads about as much of a layer. evenly: how much of what a block reads
    for the rows of the residual counts where tiles of gate and up are given out; with 0 every block gets as many."""
    tiles, groups = shape.tiles, shape.groups
    qkv, rows = _counts(tiles["qkv"], blocks), _counts(tiles["o"], blocks)[::-1]
    load = [
        (evenly * (q * groups["qkv"] + r * (groups["o"] + groups["down"])), b)
        for b, (q, r) in enumerate(zip(qkv, rows, strict=True))
    ]
    heapq.heapify(load)
    gated = [0] * blocks
    for _ in range(tiles["gate_up"] // STRIP):
        some, block = heapq.heappop(load)
        gated[block] += STRIP
        heapq.heappush(load, (some + STRIP * groups["gate_up"], block))
    parts = [list(zip(_starts(counts), counts, strict=True)) for counts in (qkv, rows, gated)]
    return Plan(tuple((*a, *b, *c) for a, b, c in zip(*parts, strict=True)), warps)


def _counts(tiles: int, blocks: int) -> list[int]:
    return [tiles // blocks + (block < tiles % blocks) for block in range(blocks)]


def _starts(counts: Sequence[int]) -> list[int]:
    return [sum(counts[:n]) for n in range(len(counts))]


def records(copy: Mapping[str, Tensor]) -> Tensor:
    """A copy of 4 bits of a weight [out, in] as records, uint8 [out / 16, in / 64, 544].
    Lane 4 * row + t of a warp reads four words: columns 8t to 8t + 3 of rows `row` and `row + 8`, then columns 8t + 4
    to 8t + 7 of the same rows. The low half of a byte is the weight of one of the group's first 32 columns, plus 8. The
    high half is the weight 32 columns further on."""
    scales = copy["scales"]
    q = integers(copy, 4) & 15  # [out, groups, 64]
    tiles, groups = len(q) // ROWS, q.shape[1]
    # tile, below, row, group, half, t, four, byte
    split = q.view(tiles, 2, 8, groups, 2, 4, 2, 4)
    bytes_ = ((split[:, :, :, :, 0] ^ 8) | (split[:, :, :, :, 1] << 4)).to(torch.uint8)
    words = bytes_.permute(0, 3, 2, 4, 5, 1, 6).reshape(tiles, groups, 512)  # ... row, t, four, below, byte
    pairs = scales.to(torch.float16).view(tiles, 2, 8, groups).permute(0, 3, 2, 1).contiguous()  # ... row, below
    return torch.cat([words, pairs.view(torch.uint8).reshape(tiles, groups, 32)], dim=2)


def gate_and_up(copy: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A copy whose rows are gates and then what they gate, with eight of each in every tile of 16."""
    return {
        name: tensor.unflatten(0, (2, -1, 8)).transpose(0, 1).flatten(0, 2)
        for name, tensor in copy.items()
        if isinstance(tensor, Tensor)
    }


def layer_of(weights: Mapping[str, Tensor]) -> Tensor:
    """A layer as the kernels read it, uint8 [records of a layer, 544].
    weights: by phase, its records [tiles, groups, 544]; gate and up with their rows in the order of `gate_and_up`."""
    strips = weights["gate_up"].unflatten(0, (-1, STRIP)).transpose(1, 2)  # [strips, groups, tiles of a strip, 544]
    ordered = {**weights, "gate_up": strips.flatten(1, 2)}
    return torch.cat([ordered[name].flatten(0, 1) for name in PHASES])
