"""How what drafting counts gets from a worker to the process that answers /metrics: within what vLLM sends anyway.

A model runner lays its totals on the output of a step (`attach`), which vLLM takes to the scheduler. There they are
joined with the scheduler's own, and what is new goes into the step's SchedulerStats (`send`), which vLLM takes to one
of the API servers, where metrics.py takes it out. Nobody waits for a device, and an engine without statistics sends
nothing.

The numbers are in `num_kv_fetch_reqs_by_stage`: that is numbers by name, of which vLLM reads only those that it knows.
What is decoded there has the type of SchedulerStats itself, so fields of our own would be lost."""

import logging
import os
import time
from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from selfspec_cli.early_exit.counters import Snapshot
from selfspec_cli.vllm_plugin.spec_config import LOGGER, settings_of
from selfspec_cli.vllm_plugin.v2.scheduling import learn_from_step, planner_of
from selfspec_cli.vllm_plugin.wrap import Function, around

Numbers = dict[str, int]

ATTRIBUTE = "early_exit_totals"
"""Of vLLM's ModelRunnerOutput: what the worker counted."""
WARNED = "early_exit_warned_of_nan"
"""Of a model runner: whether it has said `NAN_LOGITS`."""
NAN_LOGITS = (
    "drafts were made from logits that are no numbers (vllm:selfspec_nan_logits on /metrics); look whether the model "
    "is sound"
)
CARRIER = "num_kv_fetch_reqs_by_stage"
"""The field of vLLM's SchedulerStats that the numbers travel in."""
PREFIX = "selfspec."
RUST_FRONTEND = "VLLM_USE_RUST_FRONTEND"
"""Environment variable of a vLLM whose API server is not in Python, and so without our logger."""
STATES = ("in_force", "expected_us", "real_us", "step_cost_milli")
"""The numbers that are states, and no counts."""
UNSENT = ("seconds", "active_histogram", "drafted")
"""Of a snapshot, what is long, no whole number, or a sum of what is sent."""


def flat(snapshot: Snapshot) -> Numbers:
    """A snapshot as numbers by name: "rounds", "off.load", "length_histogram.3"."""
    numbers: Numbers = {}
    for name, value in snapshot.items():
        if name in UNSENT:
            continue
        if isinstance(value, int):
            numbers[name] = value
        else:
            parts: Iterable[tuple[Any, int]] = value.items() if isinstance(value, Mapping) else enumerate(value)
            numbers |= {f"{name}.{key}": part for key, part in parts}
    return numbers


@around
def attach(original: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Override of a model runner's `sample_tokens` (Ray's executor leaves the worker's out): its answer has counts."""
    answer = original(self, *args, **kwargs)
    drafter = getattr(self, "drafter", None) or getattr(self, "speculator", None)
    landed = getattr(getattr(drafter, "counters", None), "landed", None)
    if landed is not None and answer is not None:
        totals = landed()
        if totals and totals.get("nan_logits") and not vars(self).setdefault(WARNED, False):
            setattr(self, WARNED, True)
            logging.getLogger(LOGGER).warning(NAN_LOGITS)
        output = getattr(answer, "model_runner_output", answer)  # of the V2 runner, that of a step under way
        if totals is not None and getattr(output, "req_ids", None):  # not vLLM's shared empty output
            setattr(output, ATTRIBUTE, flat(totals))
    return answer


class News:
    """What is new since it was last asked for."""

    def __init__(self) -> None:
        self._known: Numbers = {}

    def since(self, totals: Numbers) -> Numbers:
        """The growth of each total, and the state where it changed; what did not change is left out."""
        news: Numbers = {}
        for name, value in totals.items():
            before = self._known.get(name)
            if name in STATES:
                news |= {name: value} if value != before else {}
            elif value > (before or 0):  # a counter takes nothing negative
                news[name] = value - (before or 0)
        self._known |= totals
        return news


_news: WeakKeyDictionary[Any, News | None] = WeakKeyDictionary()


def _news_of(scheduler: Any) -> News | None:
    """None where nothing is to be sent: without early exit, and where nobody would take the numbers out again."""
    if scheduler not in _news:
        settings = settings_of(scheduler.vllm_config)
        wanted = settings is not None and settings.verify and os.environ.get(RUST_FRONTEND, "0") == "0"
        _news[scheduler] = News() if wanted else None
    return _news[scheduler]


@around
def send(original: Function, self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
    """Override of `Scheduler.update_from_output`: the statistics of the step also say what drafting counted."""
    began = time.perf_counter()
    outputs = original(self, scheduler_output, model_runner_output)
    totals = getattr(model_runner_output, ATTRIBUTE, None)
    learn_from_step(self, scheduler_output, totals, began)
    # The scheduler's own numbers wait for the worker's, or for the last request: steps are to cost nothing.
    if totals is None and self.requests:
        return outputs
    found = (each.scheduler_stats for each in outputs.values() if each.scheduler_stats is not None)
    news, stats = _news_of(self), next(found, None)
    if news is not None and stats is not None:
        planner, totals = planner_of(self), totals or {}
        if planner is not None:
            totals = totals | flat(planner.landed())
        getattr(stats, CARRIER).update({PREFIX + name: number for name, number in news.since(totals).items()})
    return outputs


def take_out(stats: Any) -> Numbers:
    """The numbers in a SchedulerStats that are ours; they are not there afterwards."""
    carrier = getattr(stats, CARRIER)
    names = [name for name in carrier if name.startswith(PREFIX)]
    return {name.removeprefix(PREFIX): carrier.pop(name) for name in names}
