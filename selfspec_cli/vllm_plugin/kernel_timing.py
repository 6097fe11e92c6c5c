"""Times the draft's kernels in many settings and chooses one for each (`selfspec tune-kernels`). Needs no engine.

Weights, keys and values are random, of a model's shapes. A setting is timed in a CUDA graph of as many calls as there
are copies of what they read, which together are more than the second-level cache holds, because a draft step reads
every weight from memory. A product is timed after the kernel that rounds its tokens, less the time of that kernel
alone. A setting whose result is not that of the usual one, or that a device has no room for, is left out.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing import get_context
from typing import Any, Protocol

import torch
from torch import Tensor

from selfspec_cli.early_exit.draft_weights.integers import GROUP
from selfspec_cli.vllm_plugin.attention import one_query
from selfspec_cli.vllm_plugin.kernel_choice import DraftShape
from selfspec_cli.vllm_plugin.weights import lowbit_few_tokens, lowbit_one_token, rounding

Setting = tuple[tuple[str, int], ...]
"""Arguments of a kernel's function, as `dict` takes them."""
Clock = Callable[[Sequence[Callable[[], object]]], Callable[[], float]]
"""Of some calls a function that gives microseconds of one of them, each time that it is called."""

CACHE = 128 * 2**20  # bytes; more than twice the second-level cache of an H100
GRID, FINAL = 5, 15  # samples of each setting, and of those that may be the best
FINALISTS = 3
SAME = 1.01  # the usual setting is kept where it takes no longer than this share of the best
ERROR = 0.01  # relative, of a result: sums in another order
PAGE = 16  # tokens of a block of the KV cache

ONE_TOKEN = [
    {"rows_at_once": rows, "at_once": groups} for rows, groups in itertools.product((1, 2, 4, 8), (16, 32, 64))
]
FEW_TOKENS = [
    *itertools.product((16, 32, 64, 128), (1, 2, 4), (1, 2, 4), (4,)),
    *itertools.product((16, 32), (1, 2), (1, 2), (8,)),
]
"""Rows, parts, stages and warps (`lowbit_few_tokens.Settings`)."""
ATTENTION = [
    (64, 2, 2),
    (64, 4, 1),
    (64, 4, 2),
    (64, 8, 2),
    (128, 4, 1),
    (128, 4, 2),
    (128, 8, 1),
    (128, 8, 2),
    (256, 8, 1),
]
"""Keys of a step, warps and stages; each with half the usual splits, as many, and twice as many."""


class Case(Protocol):
    """What is chosen for: a product of some tokens, or attention of some requests with room for some context."""

    @property
    def kind(self) -> str:
        """Name of the product, or attention."""

    @property
    def tokens(self) -> int:
        """Of a step."""

    @property
    def usual(self) -> Setting:
        """What the kernel takes without a choice."""

    @property
    def settings(self) -> list[Setting]:
        """All to try, each once."""

    def points(self) -> list[Point]:
        """What a setting is timed at."""


class Point(Protocol):
    """Something to time."""

    @property
    def bytes(self) -> int:
        """That a call reads from memory."""

    def calls(self, device: torch.device, room: int) -> list[Callable[..., Tensor]]:
        """Functions of a setting's arguments, with inputs of their own that together have more than `room` bytes."""

    def in_front(self, device: torch.device) -> Callable[[], object] | None:
        """What the calls begin with, and what is not to be counted."""


# ---- products -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Product:
    """`tokens` tokens times a copy [rows, columns] of `bits` bits."""

    kind: str
    rows: int
    columns: int
    bits: int
    tokens: int

    @property
    def groups(self) -> int:
        """Of a row."""
        return self.columns // GROUP

    @property
    def bytes(self) -> int:
        """Of the copy, which a call reads once."""
        return self.rows * (self.columns * self.bits // 8 + 2 * self.groups)

    @property
    def usual(self) -> Setting:
        if self.tokens == 1:
            rows, at_once = lowbit_one_token.usual_settings(self.rows, self.groups, self.bits)
            return _setting({"rows_at_once": rows, "at_once": at_once})
        return self._possible(lowbit_few_tokens.usual_settings(self.rows, self.groups, self.bits, self.tokens))

    @property
    def settings(self) -> list[Setting]:
        if self.tokens == 1:
            return _once([self.usual, *map(_setting, ONE_TOKEN)])
        wanted = (lowbit_few_tokens.Settings(*one) for one in FEW_TOKENS)
        return _once([self.usual, *map(self._possible, wanted)])

    def _possible(self, wanted: lowbit_few_tokens.Settings) -> Setting:
        found = lowbit_few_tokens.possible(wanted, self.rows, self.groups, self.bits, self.tokens)
        return _setting(found._asdict())

    def points(self) -> list[Point]:
        return [self]

    def calls(self, device: torch.device, room: int) -> list[Callable[..., Tensor]]:
        return [partial(self._run, self._tokens(device), self._copy(device)) for _ in range(room // self.bytes + 1)]

    def in_front(self, device: torch.device) -> Callable[[], object]:
        return partial(rounding.round_tokens, self._tokens(device), self.bits)

    def _tokens(self, device: torch.device) -> Tensor:
        return torch.randn(self.tokens, self.columns, device=device).bfloat16()

    def _copy(self, device: torch.device) -> tuple[Tensor, Tensor]:
        words = torch.randint(
            -(2**31), 2**31, (self.rows, self.columns * self.bits // 32), dtype=torch.int32, device=device
        )
        scales = (
            torch.rand(self.rows, self.groups, device=device).add_(0.5).div_(self.columns**0.5 * 2 ** (self.bits - 1))
        )
        return words, scales.half()

    def _run(self, x: Tensor, copy: tuple[Tensor, Tensor], **setting: Any) -> Tensor:
        rounded, asm = rounding.round_tokens(x, self.bits), x.is_cuda
        if self.tokens == 1:
            return lowbit_one_token.product(*rounded, *copy, None, x.dtype, **setting, asm=asm)
        return lowbit_few_tokens.product(*rounded, self.tokens, *copy, None, x.dtype, **setting, asm=asm)


# ---- attention ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Attention:
    """One token of each of `tokens` requests, in an engine whose block tables have room for `context` tokens of each.

    Their lengths are not known when a graph is captured, so a setting is timed at `contexts`, all that there may be up
    to there, and that one is chosen which is at most the least share slower than the best at any of them.
    """

    query_heads: int
    heads: int
    dim: int
    tokens: int
    context: int
    contexts: tuple[int, ...]
    kind: str = "attention"

    @property
    def usual(self) -> Setting:
        device = torch.device(_device())
        return self._setting(*one_query.usual_settings(self.tokens, self.heads, self.context, device))

    @property
    def settings(self) -> list[Setting]:
        splits = one_query.usual_splits(self.tokens, self.heads)
        some = sorted({max(1, splits // 2), splits, min(one_query.MOST_SPLITS, 2 * splits)})
        return _once([self.usual, *(self._setting(*one, count) for one in ATTENTION for count in some)])

    @staticmethod
    def _setting(at_once: int, warps: int, stages: int, splits: int) -> Setting:
        return _setting({"at_once": at_once, "warps": warps, "stages": stages, "splits": splits})

    def points(self) -> list[Point]:
        return [Attended(self.query_heads, self.heads, self.dim, self.tokens, context) for context in self.contexts]


@dataclass(frozen=True)
class Attended:
    """Attention of one new token of each of `requests` requests of `context` tokens, the new one included."""

    query_heads: int
    heads: int
    dim: int
    requests: int
    context: int

    @property
    def bytes(self) -> int:
        """Of keys and values, which a call reads once."""
        return 4 * self.requests * self._pages * PAGE * self.heads * self.dim

    @property
    def _pages(self) -> int:
        return -(-self.context // PAGE)

    def calls(self, device: torch.device, room: int) -> list[Callable[..., Tensor]]:
        n, pages = self.requests, self._pages
        width = (self.query_heads + 2 * self.heads) * self.dim
        both = torch.randn(n, width, device=device).bfloat16().unflatten(1, (-1, self.dim))
        given = both.split([self.query_heads, self.heads, self.heads], dim=1)
        table = torch.randperm(n * pages, device=device).reshape(n, pages).int()
        lengths = torch.full((n,), self.context, device=device, dtype=torch.int32)
        slots = table[:, (self.context - 1) // PAGE].long() * PAGE + (self.context - 1) % PAGE
        shape = (n * pages, self.heads, PAGE, 2 * self.dim)
        caches = [
            torch.empty(shape, dtype=torch.bfloat16, device=device).normal_() for _ in range(room // self.bytes + 1)
        ]
        return [partial(self._run, *given, cache, table, lengths, slots) for cache in caches]

    def in_front(self, device: torch.device) -> None:
        return None

    def _run(self, query: Tensor, *others: Any, **setting: Any) -> Tensor:
        out = query.new_empty(self.requests, self.query_heads * self.dim)
        key, value, cache, table, lengths, slots = others
        one_query.attend(query, key, value, cache, table, lengths, slots, self.dim**-0.5, out, **setting)
        return out


def _setting(arguments: Mapping[str, int]) -> Setting:
    return tuple(arguments.items())


def _once(settings: Iterable[Setting]) -> list[Setting]:
    return list(dict.fromkeys(settings))


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def cases_of(shape: DraftShape, tokens: Sequence[int], contexts: Sequence[int]) -> list[Case]:
    """All products and attentions of a draft step, for numbers of tokens and of tokens of context in rising order."""
    products: list[Case] = [
        Product(name, *size, shape.bits, count) for name, size in shape.products.items() for count in tokens
    ]
    heads, rooms = (shape.query_heads, shape.heads, shape.dim), range(1, len(contexts) + 1)
    return products + [
        Attention(*heads, count, contexts[room - 1], tuple(contexts[:room])) for count in tokens for room in rooms
    ]


# ---- the clock ------------------------------------------------------------------------------------------------------


def captured(calls: Sequence[Callable[[], object]]) -> Callable[[], float]:
    """The clock of a GPU: the calls as one CUDA graph, each sample a replay of it."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()  # the first replay uploads it

    def sample() -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1000 / len(calls)

    return sample


def timed(calls: Sequence[Callable[[], object]], samples: int = GRID, clock: Clock = captured) -> float:
    """Median microseconds of one of `calls`."""
    sample = clock(calls)
    return statistics.median(sample() for _ in range(samples))


# ---- the choice -----------------------------------------------------------------------------------------------------


class Timings:
    """Times of settings at one point, each measured once; `samplers` measures some of them again."""

    def __init__(self, point: Point, device: torch.device, clock: Clock, room: int) -> None:
        self._calls, self._clock = point.calls(device, room), clock
        alone = point.in_front(device)
        self._less = 0.0 if alone is None else self._of_front([alone] * len(self._calls))
        self.us: dict[Setting, float] = {}
        self.failed: dict[Setting, str] = {}
        self._wanted: Tensor | None = None

    def _of_front(self, calls: Sequence[Callable[[], object]]) -> float:
        return timed(calls, FINAL, self._clock)

    def measure(self, usual: Setting, settings: Iterable[Setting]) -> None:
        """Fill `us`, or `failed` with why there is no time."""
        if self._wanted is None:
            self._wanted = self._calls[0](**dict(usual)).float()
        for setting in settings:
            if setting in self.us or setting in self.failed:
                continue
            try:
                found = self._calls[0](**dict(setting)).float()
                error = float((found - self._wanted).norm() / self._wanted.norm())
                if not error < ERROR:
                    self.failed[setting] = f"its result differs by {error:.3f}"
                    continue
                self.us[setting] = self._alone(timed(self._with(setting), GRID, self._clock))
            except Exception as error:  # Triton's and CUDA's have no common class: too much shared memory, say
                self.failed[setting] = f"{type(error).__name__}: {str(error)[:160]}"

    def again(self, settings: Sequence[Setting]) -> None:
        """Measure some settings anew, in turn, so that none has the better moment."""
        samplers = [self._clock(self._with(setting)) for setting in settings]
        samples = [[sample() for sample in samplers] for _ in range(FINAL)]
        for setting, values in zip(settings, zip(*samples, strict=True), strict=True):
            self.us[setting] = self._alone(statistics.median(values))

    def _alone(self, us: float) -> float:
        """Without what is in front; more than nothing, because a share of it is asked for."""
        return max(us - self._less, 0.001)

    def _with(self, setting: Setting) -> list[Callable[[], object]]:
        return [partial(call, **dict(setting)) for call in self._calls]


def regret(setting: Setting, points: Sequence[Timings]) -> float:
    """The most that a setting takes at any point, as a multiple of the best there; infinite where it failed."""
    if any(setting not in point.us for point in points):
        return float("inf")
    return max(point.us[setting] / min(point.us.values()) for point in points)


def chosen(case: Case, points: Sequence[Timings]) -> dict[str, Any]:
    """The row of a case (`kernel_choice.read`), with times in microseconds at its last point.

    usual_over_best: the most that the usual setting takes at any point, as a multiple of what was chosen there.
    """
    usual, settings = case.usual, case.settings
    for point in points:
        point.measure(usual, settings)
    ranked = sorted(settings, key=lambda one: regret(one, points))
    finalists = _once([*(one for one in ranked[:FINALISTS] if regret(one, points) < float("inf")), usual])
    for point in points:
        point.again(finalists)
    best = min(finalists, key=lambda one: regret(one, points))
    if regret(usual, points) <= SAME * regret(best, points):
        best = usual
    return {
        "setting": dict(best),
        "us": points[-1].us[best],
        "usual": dict(usual),
        "usual_us": points[-1].us[usual],
        "usual_over_best": max(point.us[usual] / point.us[best] for point in points),
        "tried": len(settings),
        "failed": sorted({reason for point in points for reason in point.failed.values()}),
    }


def tuned(
    cases: Sequence[Case], device: torch.device, clock: Clock = captured, room: int = CACHE
) -> Iterator[dict[str, Any]]:
    """The row of each case, in order. Attentions of one number of requests share what they are timed on."""
    made: dict[Point, Timings] = {}
    for case in cases:
        points = case.points()
        made = {point: timings for point, timings in made.items() if point in points}  # frees what is not needed
        about = {"kind": case.kind, "tokens": case.tokens, "bytes": points[-1].bytes}
        if isinstance(case, Attention):
            about["context"] = case.context
        try:
            for point in points:
                if point not in made:
                    made[point] = Timings(point, device, clock, room)
            yield {**about, **chosen(case, [made[point] for point in points])}
        except torch.OutOfMemoryError:
            yield {**about, "skipped": "the device has too little memory for it"}


# ---- compilation ----------------------------------------------------------------------------------------------------


def compile_all(cases: Sequence[Case], jobs: int) -> None:
    """Every kernel of the cases is compiled, by as many processes, and lies in Triton's cache from then on."""
    settings = _once(setting for case in cases for setting in case.settings)
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        list(pool.map(partial(_compiled, tuple(cases)), settings))


def _compiled(cases: tuple[Case, ...], setting: Setting) -> None:
    for case in cases:
        if setting in case.settings:
            try:
                point: Any = case.points()[0]
                _first_call(point)(**dict(setting))
            except Exception:
                continue


@cache
def _first_call(point: Point) -> Callable[..., Tensor]:
    return point.calls(torch.device(_device()), 0)[0]
