"""Weights as the kernel for a whole trunk reads them (exchange.cu says how it works). Needs torch alone.

Copies of 4 bits (`early_exit.draft_weights.integers`) are laid out anew, as records: a tile of 16 rows times one group
of 64 columns. Every warp of every block has the records of all layers in one stream, in the order in which it
multiplies them: its share of the columns of each of its block's tiles, for qkv, the output product, gate and up, and
down."""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from selfspec_cli.early_exit.draft_weights.integers import GROUP, integers

ROWS = 16  # of a tile
RECORD = 544  # bytes: 16 * 64 / 2 of integers, and 16 scales of two bytes
TOGETHER = 4  # tiles of gate and up that a warp multiplies together, and whose 32 results are rounded together
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
    def first(self) -> dict[str, int]:
        """Number of the first record of each product, in the order of PHASES."""
        counts = [self.groups[name] * self.tiles[name] for name in PHASES]
        return dict(zip(PHASES, accumulate([0, *counts]), strict=False))


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
    for _ in range(tiles["gate_up"] // TOGETHER):
        some, block = heapq.heappop(load)
        gated[block] += TOGETHER
        heapq.heappush(load, (some + TOGETHER * groups["gate_up"], block))
    parts = [list(zip(_starts(counts), counts, strict=True)) for counts in (qkv, rows, gated)]
    return Plan(tuple((*a, *b, *c) for a, b, c in zip(*parts, strict=True)), warps)


def _counts(tiles: int, blocks: int) -> list[int]:
    return [tiles // blocks + (block < tiles % blocks) for block in range(blocks)]


def _starts(counts: Sequence[int]) -> list[int]:
    return [sum(counts[:n]) for n in range(len(counts))]


def share(groups: int, warp: int, warps: int) -> range:
    """Groups of columns that are a warp's."""
    part = warp ^ (warp // 4 & 1)  # uneven shares alternate; every scheduler of a multiprocessor gets some of both
    return range(groups * part // warps, groups * (part + 1) // warps)


def records(copy: Mapping[str, Tensor]) -> Tensor:
    """A copy of 4 bits of a weight [out, in] as records, uint8 [out / 16, in / 64, 544].
    Lane 4 * row + t of a warp reads four words: of rows `row` and `row + 8`, of columns 8t to 8t + 7, then the same of
    columns 32 + 8t to 32 + 8t + 7. A word has four columns in the low halves of its bytes, and four in the high ones.
    """
    scales = copy["scales"]
    q = integers(copy, 4) & 15  # [out, groups, 64]
    tiles, groups = len(q) // ROWS, q.shape[1]
    # tile, below, row, group, half, t, high, byte
    split = q.view(tiles, 2, 8, groups, 2, 4, 2, 4)
    bytes_ = (split[..., 0, :] | (split[..., 1, :] << 4)).to(torch.uint8)  # tile, below, row, group, half, t, byte
    words = bytes_.permute(0, 3, 2, 5, 4, 1, 6).reshape(tiles, groups, 512)  # ... row, t, half, below, byte
    pairs = scales.to(torch.float16).view(tiles, 2, 8, groups).permute(0, 3, 2, 1).contiguous()  # ... row, below
    return torch.cat([words, pairs.view(torch.uint8).reshape(tiles, groups, 32)], dim=2)


def gate_and_up(copy: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A copy whose rows are gates and then what they gate, with eight of each in every tile of 16."""
    return {
        name: tensor.unflatten(0, (2, -1, 8)).transpose(0, 1).flatten(0, 2)
        for name, tensor in copy.items()
        if isinstance(tensor, Tensor)
    }


def unshifted(records: Tensor) -> Tensor:
    """Records whose bytes are multiplied without a shift: uint8 [..., 544]. The low half of a byte is the weight of a
    column of the group's first 32, plus 8; the high half that of the column 32 further on. Of a lane's four words the
    first two are columns 8t to 8t + 3 of rows `row` and `row + 8`, the others columns 8t + 4 to 8t + 7."""
    words = records[..., :512].unflatten(-1, (32, 2, 2, 4))  # lane, half, below, byte
    first, second = words[..., 0, :, :], words[..., 1, :, :]
    low = ((first & 15) ^ 8) | (second & 15) << 4
    high = ((first >> 4) ^ 8) | (second & 0xF0)
    return torch.cat([torch.stack([low, high], -3).flatten(-4), records[..., 512:]], -1)


class Records:
    """The records of all layers in one stream. `put` layer after layer what `records` makes of the four weights."""

    def __init__(self, layers: int, sources: Sequence[Tensor], device: torch.device) -> None:
        """sources: of each reader in turn (a warp, or a block), the numbers of its records in a layer."""
        counts = torch.tensor([len(source) for source in sources])
        before = torch.cumsum(counts, 0) - counts
        inside = torch.arange(int(counts.sum())) - torch.repeat_interleave(before, counts)
        self.offsets = (before * layers * RECORD).to(device)
        self._source = torch.cat(list(sources)).to(device)
        self._places = (torch.repeat_interleave(before * layers, counts) + inside).to(device)
        self._step = torch.repeat_interleave(counts, counts).to(device)
        self.records = torch.zeros(int(counts.sum()) * layers, RECORD, dtype=torch.uint8, device=device)

    def put(self, layer: int, weights: Mapping[str, Tensor]) -> None:
        """weights: records of each of PHASES, [tiles, groups, 544]; of gate and up those of `gate_and_up`."""
        all_records = torch.cat([weights[name].flatten(0, 1) for name in PHASES])
        self.records[self._places + layer * self._step] = all_records[self._source]


class Stream(Records):
    """All warps' records."""

    def __init__(self, shape: Shape, plan: Plan, device: torch.device) -> None:
        groups, first = shape.groups, shape.first

        def numbers(warp: int, name: str, start: int, count: int) -> Tensor:
            columns = share(groups[name], warp, plan.warps)
            together = TOGETHER if name == "gate_up" else 1
            tile = torch.arange(start, start + count).view(-1, 1, together) * groups[name]
            group = torch.arange(columns.start, columns.stop).view(1, -1, 1)
            return (first[name] + tile + group).flatten()

        sources = []
        for q0, qn, o0, on, g0, gn in plan.blocks:
            tiles = (("qkv", q0, qn), ("o", o0, on), ("gate_up", g0, gn), ("down", o0, on))
            sources += [torch.cat([numbers(warp, *some) for some in tiles]) for warp in range(plan.warps)]
        super().__init__(shape.layers, sources, device)

    def put(self, layer: int, weights: Mapping[str, Tensor]) -> None:
        super().put(layer, {name: unshifted(weights[name]) for name in PHASES})
