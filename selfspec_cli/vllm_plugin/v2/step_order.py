"""When a step's tokens are read: before the next step is launched, or after it.

vLLM launches a step before it has seen the tokens of the last one, and at once when it has seen those of the one
before, so that the device never waits for the host. A request that comes a moment later then waits for two steps.

With a draft loop behind the sampling the device is busy anyway while the host reads, answers, schedules and launches.
To have read first is then worth a round to each request: one that has ended is not verified once more, a new one joins
the next step and not the one behind it, and a first token leaves while the device drafts. Where no request is left, the
next step would be in vain, and the tokens are read first too.

Which order is the faster one is measured, for each number of running requests: how long the device drafts, by two
events around the loop, and how long the host takes from a step's tokens to the launch of the next forward pass. While
that is not known, and where the loop is too short, the order is vLLM's."""

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from selfspec_cli.vllm_plugin.v2.scheduling import planner_of
from selfspec_cli.vllm_plugin.wrap import Function, around

SAMPLES = 16
"""Steps of one load after which its order is decided anew."""
MARGIN = 0.1
"""By so much one time has to be the longer one before the order changes, so that noise does not change it."""
PAUSE = 50e-6
"""Seconds between two looks at whether the tokens are there or a message has come."""


class DraftClock:
    """When the host had launched the last forward pass, and how long the device drafted behind earlier ones.
    launched: in seconds of `time.perf_counter`; runner.py sets it."""

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
    the draft loop; None until then."""

    first: bool = False
    host: float | None = None
    device: float | None = None
    _steps: list[tuple[float, float]] = field(default_factory=list)

    def add(self, host: float, device: float) -> None:
        """Take in a step, and decide after every SAMPLES of them."""
        self._steps.append((host, device))
        if len(self._steps) == SAMPLES:
            self.host, self.device = map(statistics.median, zip(*self._steps, strict=True))
            self._steps = []
            self.first = self.host < self.device * (1 + MARGIN if self.first else 1 - MARGIN)


class Reader:
    """Steps one engine core whose worker is in the same process."""

    def __init__(self, clock: DraftClock) -> None:
        self._clock = clock
        self._orders: dict[tuple[int, int], Order] = defaultdict(Order)  # by load and width
        self._read = math.inf  # when the last tokens were
        self._paused = 0.0  # seconds since then in which the host could have launched

    def step(self, engine: Any, original: Function) -> Any:
        """`EngineCore.step_with_batch_queue`, in this order or in vLLM's."""
        queue, scheduler = engine.batch_queue, engine.scheduler
        under_way = queue[-1] if queue else None  # at most one; it was launched last
        if under_way is not None and not _joins(scheduler) and self._first(scheduler, *under_way[:2]):
            since = time.perf_counter()
            came = _wait(under_way[0], getattr(engine, "input_queue", None))
            self._paused += time.perf_counter() - since
            if not came:
                return None, True  # the engine takes its messages in, and comes back
            with _nothing_to_schedule(scheduler):
                outputs, _ = original(engine)
            return outputs, True  # after a step without work vLLM sleeps
        newest, read, paused = queue[0] if queue else None, self._read, self._paused
        result = original(engine)
        if queue and queue[0] is not newest and _drafts(*queue[0][:2]):
            self._launched(queue[0], read, paused)
        return result

    def _first(self, scheduler: Any, future: Any, scheduled: Any) -> bool:
        """Whether the tokens of the step under way are read before the next step is launched."""
        requests = scheduler.requests
        if planner_of(scheduler) is None or _event(future) is None:
            return False
        if not requests:
            return True  # there is nothing to launch
        # Behind a step that is all inside of prefills nothing is drafted.
        return (
            _drafts(future, scheduled)
            and any(name in requests and not requests[name].is_prefill_chunk for name in scheduled.num_scheduled_tokens)
            and self._orders[_load(scheduled), scheduled.num_spec_tokens_to_schedule].first
        )

    def _launched(self, step: tuple[Any, Any, Any], read: float, paused: float) -> None:
        """Take in the times of a step that was just launched. read: when the tokens before its launch were. paused:
        for how long the host waited since then."""
        future, scheduled, _ = step
        future.add_done_callback(self._was_read)  # called where the result is set, by whoever reads the tokens
        if not _decodes(scheduled):
            return
        host, device = self._clock.launched - read - paused, self._clock.seconds()
        if host > 0 and device is not None:
            self._orders[_load(scheduled), scheduled.num_spec_tokens_to_schedule].add(host, device)

    def _was_read(self, future: Any) -> None:
        self._read, self._paused = time.perf_counter(), 0.0


def _load(scheduled: Any) -> int:
    return len(scheduled.num_scheduled_tokens).bit_length()


def _joins(scheduler: Any) -> bool:
    """Whether a request waits that the next step can take in."""
    return bool(scheduler.waiting) and len(scheduler.running) < scheduler.max_num_running_reqs


def _decodes(scheduled: Any) -> bool:
    """Whether no request of a step is in its prefill, which takes the host longer, and the device too."""
    most = len(scheduled.num_scheduled_tokens) * (1 + scheduled.num_spec_tokens_to_schedule)
    return not scheduled.scheduled_new_reqs and scheduled.total_num_scheduled_tokens <= most


def _event(future: Any) -> Any:
    """The event behind which a step's tokens are on the host; None where they cannot be waited for here."""
    return getattr(getattr(future, "async_output", None), "copy_event", None)


def _drafts(future: Any, scheduled: Any) -> bool:
    """Whether drafts follow a step, its tokens can be waited for here, and no grammar has to see the drafts."""
    drafts = scheduled.num_spec_tokens_to_schedule > 0
    return _event(future) is not None and drafts and not scheduled.has_structured_output_requests


def _wait(future: Any, messages: Any) -> bool:
    """Wait for a step's tokens or a message to the engine; whether the tokens came.
    messages: the queue of an engine in a process of its own. A request that comes is launched at once, while the device
    still has work. Another engine has none: reading the tokens waits for them, and nothing is gained by another wait.
    """
    while messages is not None and not _event(future).query():
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


@around
def read_before_launching(original: Function, self: Any) -> Any:
    """Replacement for `EngineCore.step_with_batch_queue`."""
    reader = reader_of(self)
    return original(self) if reader is None else reader.step(self, original)
