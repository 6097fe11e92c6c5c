"""When a step's tokens are read: before the next step is launched, where drafting hides what the host does in between.

vLLM launches a step before it has seen the tokens of the last one, so that the device never waits for the host. With a
draft loop behind the sampling the device is busy anyway while the host reads, answers, schedules and launches. To have
read first is then worth a round to each request: one that has ended is not verified once more, a new one joins the next
step and not the one behind it, and a first token leaves while the device drafts.

Both times are measured, for each number of running requests: how long the device drafts, by two events around the loop,
and how long the host takes from a step's tokens to the launch of the next forward pass. Where the host is slower, the
order is vLLM's.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.logger import init_logger

from selfspec_cli.vllm_plugin.v2.widths import planner_of

logger = init_logger("vllm.selfspec")  # below vLLM's own logger, which users configure

Method = Callable[..., Any]

SAMPLES = 16
"""Steps of one load after which its order is decided anew."""
MARGIN = 0.1
"""By so much one time has to be the longer one before the order changes, so that noise does not change it."""
PAUSE = 50e-6
"""Seconds between two looks at whether the tokens are there or a request has come."""


class DraftClock:
    """When the host had launched the last forward pass, and how long the device drafted behind earlier ones.

    launched: in seconds of `time.perf_counter`; resting.py sets it.
    """

    def __init__(self, device: torch.device) -> None:
        self.launched = -math.inf
        # Two steps are under way at most, so of three pairs of events the oldest can be read.
        pairs = 3 if device.type == "cuda" else 0
        self._pairs = [[torch.cuda.Event(enable_timing=True) for _ in ("begin", "end")] for _ in range(pairs)]
        self._begun = 0

    @contextmanager
    def drafting(self) -> Iterator[None]:
        """Around the launch of a draft loop."""
        if not self._pairs:
            yield
            return
        begin, end = self._pairs[self._begun % 3]
        begin.record()
        yield
        end.record()
        self._begun += 1

    def seconds(self) -> float | None:
        """Of the last draft loop that is certain to be done; None before there is one. Waits for nothing."""
        if self._begun < 3:
            return None
        begin, end = self._pairs[self._begun % 3]  # the oldest of the three
        return begin.elapsed_time(end) / 1000 if end.query() else None


@dataclass
class Order:
    """Of steps with about the same number of requests. first: whether tokens are read before the next launch.

    host, device: seconds that it was decided by: from a step's tokens to the launch of the next forward pass, and in
    the draft loop; None until then.
    """

    first: bool = False
    host: float | None = None
    device: float | None = None
    _steps: list[tuple[float, float]] = field(default_factory=list)

    def add(self, host: float, device: float) -> bool:
        """Take in a step; whether the order was decided for the first time, or changed."""
        self._steps.append((host, device))
        if len(self._steps) < SAMPLES:
            return False
        before, new = self.first, self.host is None
        self.host, self.device = map(statistics.median, zip(*self._steps, strict=True))
        self._steps = []
        self.first = self.host < self.device * (1 + MARGIN if before else 1 - MARGIN)
        return new or self.first != before


class Reader:
    """Steps one engine core whose worker is in the same process."""

    def __init__(self, clock: DraftClock) -> None:
        self._clock = clock
        self._orders: dict[int, Order] = defaultdict(Order)
        self._read = math.inf  # when the last tokens were
        self._known = 0  # requests that were there when the last step was launched

    def step(self, engine: Any, original: Method) -> Any:
        """`EngineCore.step_with_batch_queue`, in this order or in vLLM's."""
        queue = engine.batch_queue
        newest = queue[0] if queue else None
        if newest is None or self._joins(engine.scheduler) or not self._reads(engine, *queue[-1][:2]):
            read = self._read
            result = original(engine)
            if queue and queue[0] is not newest:
                self._launched(queue[0], read)
            self._known = len(engine.scheduler.requests)
            return result
        if not _there(queue[-1][0].async_output.copy_event, getattr(engine, "input_queue", None)):
            return None, True  # the engine takes the messages in, and comes back
        with _nothing_to_schedule(engine.scheduler):
            outputs, _ = original(engine)
        return outputs, True  # after a step without work vLLM sleeps

    def _joins(self, scheduler: Any) -> bool:
        """Whether a request has come since the last launch that a step can take in."""
        return len(scheduler.requests) > self._known and len(scheduler.running) < scheduler.max_num_running_reqs

    def _reads(self, engine: Any, future: Any, scheduled: Any) -> bool:
        """Whether the tokens of the step under way are read before the next one is launched."""
        planner, requests = planner_of(engine.scheduler), engine.scheduler.requests
        return (
            planner is not None
            and planner.read_first
            and _drafts(future, scheduled)
            and self._orders[_load(scheduled)].first
            # Behind a step that is all inside of prefills nothing is drafted.
            and any(name in requests and not requests[name].is_prefill_chunk for name in scheduled.num_scheduled_tokens)
        )

    def _launched(self, step: tuple[Any, Any, Any], read: float) -> None:
        """Take in the times of a step that was just launched. read: when the tokens before its launch were."""
        future, scheduled, _ = step
        if not _drafts(future, scheduled):
            return
        future.add_done_callback(self._was_read)  # called where the result is set, by whoever reads the tokens
        requests = len(scheduled.num_scheduled_tokens)
        # A prefill takes the host longer, and keeps the device busy for longer than its launch.
        decodes = scheduled.total_num_scheduled_tokens <= requests * (1 + scheduled.num_spec_tokens_to_schedule)
        if scheduled.scheduled_new_reqs or not decodes:
            return
        host, device = self._clock.launched - read, self._clock.seconds()
        if host <= 0 or device is None:
            return
        load = _load(scheduled)
        order = self._orders[load]
        if order.add(host, device):
            logger.info(
                "early exit: at %d to %d requests, tokens are read %s the next step is launched (in between the host "
                "takes %.2f ms, drafting %.2f ms)", 2 ** (load - 1), 2**load - 1, "before" if order.first else "after",
                1000 * (order.host or 0), 1000 * (order.device or 0),
            )  # fmt: skip

    def _was_read(self, future: Any) -> None:
        self._read = time.perf_counter()


def _load(scheduled: Any) -> int:
    return len(scheduled.num_scheduled_tokens).bit_length()


def _drafts(future: Any, scheduled: Any) -> bool:
    """Whether drafts follow a step, its tokens can be waited for here, and no grammar has to see the drafts."""
    event = getattr(getattr(future, "async_output", None), "copy_event", None)
    drafts = scheduled.num_spec_tokens_to_schedule > 0
    return event is not None and drafts and not scheduled.has_structured_output_requests


def _there(tokens: Any, messages: Any) -> bool:
    """Wait for a step's tokens, or a message to the engine; whether it is the tokens.

    messages: the queue of an engine in a process of its own. A request that comes is launched at once, while the device
    still has work. Another engine has none: reading the tokens waits for them.
    """
    while messages is not None and not tokens.query():
        if not messages.empty():
            return False
        time.sleep(PAUSE)
    return True


@contextmanager
def _nothing_to_schedule(scheduler: Any) -> Iterator[None]:
    """vLLM reads the tokens of the oldest step where its scheduler has no requests."""
    scheduler.has_requests = lambda: False
    try:
        yield
    finally:
        del scheduler.has_requests


_READER = "early_exit_reader"
"""Attribute of an engine core."""


def reader_of(engine: Any) -> Reader | None:
    """The reader of an engine core; None without early exit, and where its worker is in another process or is one of
    several ranks that step together."""
    try:
        found: Reader | None = getattr(engine, _READER)
    except AttributeError:
        worker = getattr(engine.model_executor, "driver_worker", None)
        runner = getattr(worker, "model_runner", None)
        clock = getattr(getattr(runner, "speculator", None), "clock", None)
        alone = engine.vllm_config.parallel_config.world_size_across_dp == 1
        found = Reader(clock) if isinstance(clock, DraftClock) and alone else None
        setattr(engine, _READER, found)
    return found


def read_before_launching(original: Method) -> Method:
    """Replacement for `EngineCore.step_with_batch_queue`."""

    @functools.wraps(original)
    def step_with_batch_queue(self: Any) -> Any:
        reader = reader_of(self)
        return original(self) if reader is None else reader.step(self, original)

    return step_with_batch_queue
