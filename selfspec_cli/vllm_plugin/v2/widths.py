"""How many places for drafts the scheduler plans for each request of the next verify pass, on vLLM's V2 model runner.

The scheduler plans a step before the drafts of the last one exist, and all requests of a step get as many places, for
the decode graphs are captured for steps of one shape. What each request drafts within that width is decided on the
device (round_setup.py). Here it is decided how wide: as wide as the longest that any request may draft by the table and
by its own wish, wide enough for free drafts where few requests run, and not at all where nobody may, or where what was
accepted recently does not pay for drafting. Steps without places are vLLM's plain decode steps.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakSet

from selfspec_cli.early_exit.acceptance import BatchSwitch
from selfspec_cli.early_exit.counters import REASONS, Snapshot
from selfspec_cli.early_exit.length_table import LengthTable
from selfspec_cli.early_exit.request_settings import NOTHING, RequestSettings, switched_off_by
from selfspec_cli.early_exit.resolved import ResolvedSettings
from selfspec_cli.vllm_plugin.requests import own_settings
from selfspec_cli.vllm_plugin.spec_config import settings_of
from selfspec_cli.vllm_plugin.v2.sizes import free_width, widths

Method = Callable[..., Any]


class WidthPlanner:
    """Plans for one scheduler."""

    def __init__(self, settings: ResolvedSettings) -> None:
        self.k, self.widest, self.widths = settings.k, settings.width, widths(settings)
        self._width_for = {k: min(width for width in self.widths if width >= k) for k in range(self.k + 1)}
        self._free_width, self._free_requests = free_width(settings), settings.free_requests
        self.switch = BatchSwitch(settings.draft_cost or 0.0) if settings.adaptive_length else None
        self.off = dict.fromkeys(REASONS, 0)  # steps of a request without places for drafts, by reason
        self.in_force = settings.width  # places of the step planned last
        self.settings, self.read_first = settings, settings.read_first
        self.set_table(settings.table)
        self._own: dict[str, RequestSettings] = {}  # of requests that ask for anything

    def width(self, output: Any, requests: Mapping[str, Any]) -> int:
        """Places a request in the step after `output`, which was just scheduled.

        output: vLLM's SchedulerOutput. requests: the scheduler's, by name, not advanced by this step yet.
        """
        for new in output.scheduled_new_reqs:
            own = own_settings(new.sampling_params, self.settings)
            if own.k is not None:
                self._own[new.req_id] = own
        for name in output.finished_req_ids:
            self._own.pop(name, None)
        scheduled = output.num_scheduled_tokens
        wanted, off = self._longest(scheduled, requests)
        width = self._width_for[wanted]
        if width and len(scheduled) <= self._free_requests:
            width = max(width, self._free_width)
        if self.switch is not None:
            self.switch.forget(output.finished_req_ids)
            if width and not self.switch.open(scheduled.keys(), min(width, self.k), self._at(len(scheduled)).cost):
                off["acceptance"] = max(0, self._decoding(scheduled) - sum(off.values()))
                width = 0
        for reason, number in off.items():
            self.off[reason] += number
        self.in_force = width
        return width

    def set_table(self, table: LengthTable) -> None:
        """Other lengths by load from the next step on. Graphs are for the widths that the engine was started with."""
        self._table, self._some_off = table, any(cell.k == 0 for cell in table.cells)
        self._at = functools.cache(table.at)  # numbers of requests are few, and it is asked in each step

    def landed(self) -> Snapshot:
        """What goes to a server's metrics."""
        return {"off": dict(self.off), "in_force": self.in_force}

    def _decoding(self, scheduled: Mapping[str, int]) -> int:
        """Requests that are past their prefill, known by their few tokens: exact but for the end of a long prompt."""
        return sum(tokens <= 1 + self.widest for tokens in scheduled.values())

    def _longest(self, scheduled: Mapping[str, int], requests: Mapping[str, Any]) -> tuple[int, dict[str, int]]:
        """The most that any scheduled request may draft after its step, and how many may not draft, by reason.

        The host does this between two steps, so it looks at no request of which it is clear what it may draft.
        """
        load = len(scheduled)
        if not (self._table.by_context or self._own):
            k = self._at(load).k
            return k, {} if k else {"load": self._decoding(scheduled)}
        # Where nobody may be without drafts, nobody has to be counted.
        counting = self._some_off or any(own.k == 0 for own in self._own.values())
        cells = self._table.row(load)  # the first for any context
        longest, off = 0, Counter[str]()
        for name, tokens in scheduled.items():
            request = requests[name]
            context = request.num_computed_tokens + tokens
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


_PLANNER = "early_exit_planner"
"""Attribute of a scheduler. It is looked up for each request of each step, so it must be had quickly."""
_planners: WeakSet[WidthPlanner] = WeakSet()


def planners_like(settings: ResolvedSettings) -> list[WidthPlanner]:
    """The planners in this process of engines with these settings."""
    return [one for one in _planners if one.settings == settings]


def planner_of(scheduler: Any) -> WidthPlanner | None:
    """The planner of a scheduler; None without early exit, and for the V1 runner, whose drafts are there in time."""
    try:
        found: WidthPlanner | None = getattr(scheduler, _PLANNER)
    except AttributeError:
        settings = settings_of(scheduler.vllm_config) if scheduler.use_v2_model_runner else None
        found = None if settings is None or not settings.verify else WidthPlanner(settings)
        setattr(scheduler, _PLANNER, found)
        if found is not None:
            _planners.add(found)
    return found


def with_planner(original: Method) -> Method:
    """Replacement for `Scheduler.__init__`: a scheduler has its planner from its beginning."""

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        planner_of(self)

    return __init__


def plan_drafts(original: Method) -> Method:
    """Replacement for `Scheduler._update_after_schedule`, after which the asynchronous scheduler hands out places."""

    @functools.wraps(original)
    def _update_after_schedule(self: Any, scheduler_output: Any) -> None:
        planner = planner_of(self)
        if planner is not None and scheduler_output.num_scheduled_tokens:
            width = planner.width(scheduler_output, self.requests)
            scheduler_output.num_spec_tokens_to_schedule = width
            # A new request of one token is padded to k places to keep a step's shape; with this list it is not.
            most = self.scheduler_config.max_num_seqs
            self.dynamic_sd_lookup = None if width == planner.widest else [width] * (most + 1)
        original(self, scheduler_output)

    return _update_after_schedule


def hear_verdicts(original: Method) -> Method:
    """Replacement for `Scheduler.make_spec_decoding_stats`, which is called for each request that had drafts."""

    @functools.wraps(original)
    def make_spec_decoding_stats(
        self: Any, stats: Any, num_draft_tokens: int, num_accepted_tokens: int, *args: Any, **kwargs: Any
    ) -> Any:
        planner = planner_of(self)
        if planner is not None and planner.switch is not None and num_draft_tokens:
            planner.switch.verdict(kwargs["request_id"], num_accepted_tokens)
        return original(self, stats, num_draft_tokens, num_accepted_tokens, *args, **kwargs)

    return make_spec_decoding_stats
