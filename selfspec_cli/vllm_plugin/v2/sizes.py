"""How many requests and tokens decode graphs are captured for on vLLM's V2 model runner: pure arithmetic.

vLLM captures no graph for more than 512 tokens (1,024 on some devices) unless a user says so, and runs larger steps
kernel by kernel. With 5 tokens a request that is every step of more than 102 requests, and a mixed prefill and decode
batch even sooner. So the limit is raised here for `RAISED` requests of k drafts each, whatever the table of
lengths says. The table says for which widths and how many requests graphs are captured.
"""

from collections.abc import Iterable
from typing import Any

from selfspec_cli.early_exit.resolved import ResolvedSettings
from selfspec_cli.early_exit.rule import LARGEST_VERIFY, REQUESTS, WIDTHS, batch_size
from selfspec_cli.vllm_plugin.spec_config import settings_of

RAISED, MOST = 256, 512
"""Requests that drafting steps have graphs for, whatever their tokens; and requests that any decode step has them for,
which is as many as vLLM has."""


def widths(settings: ResolvedSettings) -> tuple[int, ...]:
    """Draft slots that a verify pass may have a request, the most first: decode graphs are captured for these."""
    if settings.chooses_width:
        return (settings.width, *(width for width in WIDTHS if width < settings.width))
    return tuple(sorted({settings.width, *(k for k in settings.table.lengths if k < settings.k), 0}, reverse=True))


def free_width(settings: ResolvedSettings) -> int:
    """Places of a step in which the table does not bound free drafts; 0 without these."""
    return min(width for width in widths(settings) if width >= settings.free_drafts)


def request_counts(most: int) -> tuple[int, ...]:
    """Numbers of requests that vLLM captures plain decode steps for, up to `most`; others are padded to the next."""
    grid = {1, 2, 4, *range(8, 256, 8), *range(256, most + 1, 16)}
    return tuple(sorted({count for count in grid if count < most} | {most}))


def most_requests(settings: ResolvedSettings, width: int, limit: int) -> int:
    """The most requests of a step of `width` places, on an engine that runs `limit` of them; 0 where there is no such
    step. The table says so, and a request may want less than it, but not more; free drafts may be longer."""
    below = max((other for other in widths(settings) if other < width), default=-1)
    if below < 0:
        return limit
    if settings.chooses_width:
        return min(limit, LARGEST_VERIFY // (width + 1))
    starts = sorted({cell.requests for cell in settings.table.cells})
    most = min(limit, settings.free_requests) if width == free_width(settings) else 0
    for start, following in zip(starts, [*starts[1:], limit + 1], strict=True):
        longest = max(cell.k for cell in settings.table.cells if cell.requests == start)
        if longest > below and start <= limit:
            most = max(most, min(following - 1, limit))
    return most


def decode_sizes(settings: ResolvedSettings, width: int, limit: int) -> tuple[int, ...]:
    """Tokens of the steps of `width` places that get a graph, in rising order."""
    most = min(most_requests(settings, width, limit), MOST)
    if not most:
        return ()
    counts: Iterable[int] = request_counts(most)
    if settings.chooses_width and width:
        fitting = batch_size(limit) * (width + 1) <= LARGEST_VERIFY  # a full engine may be no batch size of its own
        counts = sorted({*(count for count in REQUESTS if count <= most), *([limit] if fitting else [])})
    return tuple(count * (width + 1) for count in counts)


def mixed_sizes(sizes: Iterable[int]) -> list[int]:
    """Of the sizes that vLLM captures, in tokens, those that mixed prefill and decode batches get a full graph for: a
    step is padded by no more than an eighth beyond what vLLM pads it by."""
    found: list[int] = []
    for size in sorted(sizes, reverse=True):
        while len(found) > 1 and 8 * found[-2] <= 9 * size:
            found.pop()
        found.append(size)
    return sorted(found)


def reach(settings: ResolvedSettings, limit: int) -> int:
    """Tokens of the largest step that has to have a graph."""
    if settings.chooses_width:
        return max(size for width in widths(settings) for size in decode_sizes(settings, width, limit))
    return (settings.width + 1) * min(limit, RAISED)


def capture_larger_steps(config: Any) -> None:
    """Adds to the sizes that vLLM chose for an engine with early exit those beyond its limit. config: a VllmConfig."""
    settings = settings_of(config)
    if settings is None or not settings.verify or not config.use_v2_model_runner:
        return
    chosen, scheduler = config.compilation_config, config.scheduler_config
    own, room = chosen.cudagraph_capture_sizes, scheduler.max_num_batched_tokens
    limit = scheduler.max_num_seqs
    if settings.chooses_width:
        sizes = sorted({size for width in widths(settings) if width for size in decode_sizes(settings, width, limit)})
    else:
        sizes = [count * (settings.width + 1) for count in request_counts(min(limit, RAISED))]
    more = [size for size in sizes if own and own[-1] < size <= room]
    if more:
        chosen.cudagraph_capture_sizes = [*own, *more]
        chosen.max_cudagraph_capture_size = more[-1]
