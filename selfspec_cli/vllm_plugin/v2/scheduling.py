"""What vLLM's scheduler does with early exit on the V2 model runner: it has a planner of widths (widths.py), hands out
the draft slots that this plans, and tells it what steps took and brought."""

import functools
from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakSet

from selfspec_cli.early_exit.resolved import ResolvedSettings
from selfspec_cli.vllm_plugin import vllm_names as vllm
from selfspec_cli.vllm_plugin.spec_config import settings_of
from selfspec_cli.vllm_plugin.v2 import step_times
from selfspec_cli.vllm_plugin.v2.widths import WidthPlanner
from selfspec_cli.vllm_plugin.wrap import Function, around

CHOICE = "early_exit_choice"
"""Attribute of a SchedulerOutput: the `Choice` that it was planned by. It travels to the workers with the output."""
_PLANNER = "early_exit_planner"
"""Attribute of a scheduler. It is looked up for each request of each step, so it must be had quickly."""
_planners: WeakSet[WidthPlanner] = WeakSet()


def planners_like(settings: ResolvedSettings) -> list[WidthPlanner]:
    return [one for one in _planners if one.settings == settings]


def planner_of(scheduler: Any) -> WidthPlanner | None:
    """The planner of a scheduler; None without early exit, and for the V1 runner, whose drafts are there in time."""
    try:
        planner: WidthPlanner | None = getattr(scheduler, _PLANNER)
    except AttributeError:
        planner = _new_planner(scheduler.vllm_config) if scheduler.use_v2_model_runner else None
        setattr(scheduler, _PLANNER, planner)
        if planner is not None:
            _planners.add(planner)
    return planner


def _new_planner(config: Any) -> WidthPlanner | None:
    settings = settings_of(config)
    if settings is None or not settings.verify:
        return None
    layers = int(config.model_config.hf_text_config.num_hidden_layers)
    return WidthPlanner(settings, layers, functools.partial(step_times.known, config))


@around
def with_planner(original: Function, self: Any, *args: Any, **kwargs: Any) -> None:
    """Replacement for `Scheduler.__init__`: a scheduler has its planner from its beginning."""
    original(self, *args, **kwargs)
    planner_of(self)


@around
def plan_drafts(original: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Override of `Scheduler.schedule`. vLLM plans as many slots as in the step before."""
    output, planner = original(self, *args, **kwargs), planner_of(self)
    if planner is None or not output.num_scheduled_tokens:
        return output
    width = planner.width(output, self.requests)
    setattr(output, CHOICE, planner.choice)
    # A new request of one token is padded to k slots to keep a step's shape; with this list it is not.
    most = self.scheduler_config.max_num_seqs
    self.dynamic_sd_lookup = None if width == planner.widest else [width] * (most + 1)
    if width != output.num_spec_tokens_to_schedule:
        output.num_spec_tokens_to_schedule = width
        if isinstance(self, vllm.AsyncScheduler):
            _hand_out(width, (self.requests[name] for name in output.num_scheduled_tokens))
    return output


def _hand_out(width: int, requests: Iterable[Any]) -> None:
    """Give each request that drafts after the step just scheduled its slots in the next one, for drafts that an
    asynchronous scheduler does not know yet."""
    slots = [-1] * width
    for request in requests:
        if not request.is_prefill_chunk:
            request.spec_token_ids = slots


@around
def hear_verdicts(
    original: Function,
    self: Any,
    stats: Any,
    num_draft_tokens: int,
    num_accepted_tokens: int,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Replacement for `Scheduler.make_spec_decoding_stats`, which is called for each request that had drafts."""
    planner = planner_of(self)
    if planner is not None and planner.rule is not None and num_draft_tokens:
        planner.verdict(num_accepted_tokens)
    return original(self, stats, num_draft_tokens, num_accepted_tokens, *args, **kwargs)


def learn_from_step(scheduler: Any, scheduler_output: Any, totals: Mapping[str, int] | None, began: float) -> None:
    """After `Scheduler.update_from_output`, which was called at `began`: what the step took, and what it brought.
    totals: the worker's, where they came with the step."""
    planner = planner_of(scheduler)
    if planner is None or planner.rule is None or not scheduler_output.num_scheduled_tokens:
        return
    if totals is not None:
        planner.counted(totals)
    planner.read(scheduler_output, began)
