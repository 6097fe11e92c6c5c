"""How many draft slots the scheduler plans for each request of the next verify pass, on vLLM's V2 model runner.

The scheduler plans a step before the drafts of the last one exist, and all requests of a step get as many slots,
because the decode graphs are captured for steps of one shape: under gate `auto` as many as pay by measured times and
acceptance (rule.py), else as the longest draft that any request may make by the table and by its own wish. What each
drafts within that width is decided on the device (round_setup.py). Steps without slots are vLLM's plain decode steps.

And how many requests and tokens decode graphs are captured for. vLLM captures none for more than 512 tokens (1,024 on
some devices) unless a user says so, which with 5 tokens a request is every step of more than 102 requests. So the limit
is raised here for `RAISED` requests of k drafts each; the table says for which widths and how many requests."""

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from selfspec_cli.early_exit.counters import JUDGED, REASONS, STOOD, Snapshot
from selfspec_cli.early_exit.length_table import LengthTable
from selfspec_cli.early_exit.resolved import NOTHING, RequestSettings, ResolvedSettings, switched_off_by
from selfspec_cli.early_exit.rule import LARGEST_VERIFY, REQUESTS, WIDTHS, Choice, LengthRule, StepTimes, batch_size
from selfspec_cli.vllm_plugin.requests import own_settings
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


class WidthPlanner:
    """Plans for one scheduler, and learns from its steps.
    layers: of the model. times: reads what the engine measured at its start; None until it has."""

    def __init__(
        self, settings: ResolvedSettings, layers: int = 1, times: Callable[[], StepTimes | None] = lambda: None
    ) -> None:
        self.k, self.widest, self.widths = settings.k, settings.width, widths(settings)
        self._width_for = {k: min(width for width in self.widths if width >= k) for k in range(self.k + 1)}
        self._free_width, self._free_requests = free_width(settings), settings.free_requests
        self.off = dict.fromkeys(REASONS, 0)  # steps of a request without draft slots, by reason
        self.in_force = settings.width  # draft slots of the step planned last
        self.settings = settings
        self.chooses_width = settings.chooses_width  # by measured times; the gate of a live engine may say otherwise
        self.set_table(settings.table)
        self._own: dict[str, RequestSettings] = {}  # of requests that ask for anything
        assumed = StepTimes.assumed(settings.assumed_draft_step(layers))
        self.rule = LengthRule(assumed, self.widths) if settings.measures else None
        self._measured: Callable[[], StepTimes | None] | None = times
        self.choice: Choice | None = None  # of the step planned last
        self.steps = Counter[int]()  # planned decode steps by width
        self._accepted = [0, 0]  # of the step in hand: requests with drafts, and drafts of theirs that stood
        self._positions: dict[str, int] = {}  # totals of `judged` and `stood`, by name, when they were last heard of
        self._seconds = 0.0  # that the last decode step took
        self._last: tuple[float, int] | None = None  # when the last step's tokens were read, and its batch size

    def width(self, output: Any, requests: Mapping[str, Any]) -> int:
        """Draft slots that each request gets in the step that follows `output`, which was just scheduled.
        output: vLLM's SchedulerOutput. requests: the scheduler's, by name, which this step has advanced."""
        for new in output.scheduled_new_reqs:
            own = own_settings(new.sampling_params, self.settings)
            if own.k is not None:
                self._own[new.req_id] = own
        for name in output.finished_req_ids:
            self._own.pop(name, None)
        scheduled = output.num_scheduled_tokens
        longest, off = self._longest(scheduled, requests)
        width = self._width_for[longest]
        if width and self.chooses_width:
            width = self._chosen(scheduled, requests, width)
            if not width:
                off["cost"] = max(0, self._decoding(scheduled) - sum(off.values()))
        elif width:
            if len(scheduled) <= self._free_requests and not self.settings.chooses_width:
                width = max(width, self._free_width)
            if self.settings.free_drafts:
                self._chosen(scheduled, requests, width)  # sets `choice`, whose step_value ends drafts; not the width
        for reason, number in off.items():
            self.off[reason] += number
        self.steps[width] += 1
        self.in_force = width
        return width

    def _chosen(self, scheduled: Mapping[str, int], requests: Mapping[str, Any], most: int) -> int:
        """The rule's width for this batch, `most` at most."""
        assert self.rule is not None
        if self._measured is not None:  # the graphs were captured before the first step
            self.rule.times, self._measured = self._measured() or self.rule.times, None
        context = functools.partial(_context, scheduled, requests)
        self.choice = self.rule.choose(len(scheduled), context, most)
        return self.choice.width

    def set_table(self, table: LengthTable) -> None:
        """Other limits by load from the next step on. Graphs are for the widths that the engine was started with."""
        self._table, self._some_off = table, any(cell.k == 0 for cell in table.cells)
        self._at = functools.cache(table.at)  # numbers of requests are few, and it is asked in each step

    def landed(self) -> Snapshot:
        """What goes to a server's metrics."""
        states = {}
        if self.choice is not None:
            states = {
                "expected_us": round(1e6 * self.choice.seconds),
                "real_us": round(1e6 * self._seconds),
                "step_cost_milli": round(1000 * self.choice.step_cost),
            }
        return {"off": dict(self.off), "in_force": self.in_force, "steps_of_width": dict(self.steps)} | states

    # ---- what steps take, and bring ------------------------------------------------------------------------------

    def verdict(self, accepted: int) -> None:
        """A request of the step in hand had drafts verified, of which `accepted` stood."""
        self._accepted[0] += 1
        self._accepted[1] += accepted

    def counted(self, totals: Mapping[str, int]) -> None:
        """The worker's totals, by name (observe/transport.py): drafts that were judged and that stood, by position."""
        assert self.rule is not None
        if f"{JUDGED}.0" not in totals:
            return
        known = {name: totals[name] for name in totals if name.startswith((f"{JUDGED}.", f"{STOOD}."))}
        before, self._positions = self._positions, known
        if any(known[name] < before.get(name, 0) for name in known):
            before = {}  # the worker counts from zero again, as after its start
        places = range(self.widest)
        new = {name: known[name] - before.get(name, 0) for name in known}
        self.rule.judged([new[f"{JUDGED}.{place}"] for place in places], [new[f"{STOOD}.{place}"] for place in places])

    def read(self, output: Any, now: float) -> None:
        """The tokens of a step were read at `now`, in seconds; its verdicts are in. Since the last step's tokens the
        device drafted and verified once, if some request was there before. Steps after a much larger or smaller batch
        say nothing."""
        assert self.rule is not None
        scheduled = output.num_scheduled_tokens
        load = len(scheduled)
        drafts = output.scheduled_spec_decode_tokens
        lengths = list(map(len, drafts.values())) if drafts else []
        width = max(lengths, default=0)
        (verified, stood), self._accepted = self._accepted, [0, 0]
        last, self._last = self._last, (now, batch_size(load))
        if width not in self.widths:
            return
        if verified:
            self.rule.brought(load, width, stood / verified)
        if last is not None and last[1] == batch_size(load) and load > len(output.scheduled_new_reqs):
            seconds, prompt = now - last[0], output.total_num_scheduled_tokens - load - sum(lengths)
            self._seconds = self._seconds if prompt else seconds
            self.rule.stepped(load, width, seconds, prompt, stood / load, self.in_force)

    def _decoding(self, scheduled: Mapping[str, int]) -> int:
        """Requests that are past their prefill, known by their few tokens: exact but for the end of a long prompt."""
        most = 1 + self.widest
        if max(scheduled.values()) <= most:  # as in nearly all steps; a look at each request is slower
            return len(scheduled)
        return sum(tokens <= most for tokens in scheduled.values())

    def _longest(self, scheduled: Mapping[str, int], requests: Mapping[str, Any]) -> tuple[int, dict[str, int]]:
        """The most that any scheduled request may draft after its step, and how many may not draft, by reason.
        The host does this between two steps, so it looks at no request of which it is clear what it may draft."""
        load = len(scheduled)
        if not (self._table.by_context or self._own):
            k = self._at(load).k
            return k, {} if k else {"load": self._decoding(scheduled)}
        # Where nobody may be without drafts, nobody has to be counted.
        counting = self._some_off or any(own.k == 0 for own in self._own.values())
        cells = self._table.row(load)  # the first for any context
        longest, off = 0, Counter[str]()
        for name in scheduled:
            request = requests[name]
            context = request.num_computed_tokens
            if context < request.num_tokens:
                continue  # inside its prefill, where nothing is drafted
            own, cell = self._own.get(name, NOTHING), cells[0]
            for other in cells[1:]:
                cell = other if other.context <= context else cell
            reason = switched_off_by(cell, own)
            if reason is None:
                longest = max(longest, cell.k if own.k is None else min(cell.k, own.k))
                if longest == self.k and not counting:
                    break
            else:
                off[reason] += 1
        return longest, off


def _context(scheduled: Mapping[str, int], requests: Mapping[str, Any]) -> float:
    """Tokens of context of all scheduled requests together, before their step."""
    return float(sum(requests[name].num_computed_tokens - new for name, new in scheduled.items() if name in requests))
