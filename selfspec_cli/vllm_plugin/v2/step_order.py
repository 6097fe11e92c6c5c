"""When a step's tokens are read, and when the next step is launched.

vLLM launches a step before it has seen the tokens of the last one, and at once when it has seen those of the one
before, so that the device never waits for the host. A request that comes a moment later then waits for two steps.

With a draft loop behind the sampling the device is busy anyway while the host reads, answers, schedules and launches.
To have read first is then worth a round to each request: one that has ended is not verified once more, a new one joins
the next step and not the one behind it, and a first token leaves while the device drafts.

Where the draft loop is too short for that, the next step is launched as late as the device allows: so that the host is
done with it when the tokens of the step under way come. Until then a new request joins it. First tokens that come while
the host would still be launching are read before that, where no other request waits for the launch.

What is needed for that is measured, for each number of running requests: how long the device drafts, by two events
around the loop, how long the host takes from a step's tokens to the launch of the next forward pass and for a whole
launch, and how much time lies between the tokens of two steps. While that is not known, the order is vLLM's.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from selfspec_cli.vllm_plugin.v2.widths import planner_of
from selfspec_cli.vllm_plugin.vllm_names import init_logger

logger = init_logger("vllm.selfspec")  # below vLLM's own logger, which users configure

Method = Callable[..., Any]

SAMPLES = 16
"""Steps of one load after which its order is decided anew."""
MARGIN = 0.1
"""By so much one time has to be the longer one before the order changes, so that noise does not change it."""
PAUSE = 50e-6
"""Seconds between two looks at whether the tokens are there or a request has come."""
SLACK = 400e-6
"""Seconds that the host is to be done before the tokens come, when it launches as late as it can."""
WAITED = 150e-6
"""Seconds from the end of a launch to the tokens: with less, they may have been there for a while."""


class DraftClock:
    """When the host had launched the last step, and how long the device drafted behind earlier ones.

    launched: the forward pass; done: all of the step, with its drafts. In seconds of `time.perf_counter`;
    drafting_disabled.py sets them.
    """

    def __init__(self, device: torch.device) -> None:
        self.launched = self.done = -math.inf
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


def _recent() -> deque[float]:
    return deque(maxlen=SAMPLES)


@dataclass
class Order:
    """Of steps with about the same number of requests. first: whether tokens are read before the next launch.

    host, device: seconds that it was decided by: from a step's tokens to the launch of the next forward pass, and in
    the draft loop; None until then. launches: seconds of the last launches; rounds: from tokens to tokens.
    logged: whether the log says that there is a wait.
    """

    first: bool = False
    host: float | None = None
    device: float | None = None
    launches: deque[float] = field(default_factory=_recent)
    rounds: deque[float] = field(default_factory=_recent)
    logged: bool = False
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

    @property
    def wait(self) -> float:
        """Seconds from a step's tokens to the launch of the step after the next one, which is under way already.

        By the shortest round and the longest launch among the last ones: a device that waits costs everybody, and a
        launch that is too early only a request that would have come in time.
        """
        if len(self.launches) < SAMPLES or len(self.rounds) < SAMPLES:
            return 0.0
        return max(0.0, min(self.rounds) - max(self.launches) - SLACK)


class Reader:
    """Steps one engine core whose worker is in the same process."""

    def __init__(self, clock: DraftClock) -> None:
        self._clock = clock
        self._orders: dict[int, Order] = defaultdict(Order)
        self._read = math.inf  # when the last tokens were
        self._exact: float | None = None  # when they came, if the host waited for them
        self._paused = 0.0  # seconds since then in which the host could have launched
        self._first: dict[int, float] = {}  # of steps of new requests alone: seconds from the launch to the tokens

    def step(self, engine: Any, original: Method) -> Any:
        """`EngineCore.step_with_batch_queue`, in this order or in vLLM's."""
        queue, scheduler = engine.batch_queue, engine.scheduler
        under_way, came = queue[-1] if queue else None, None  # at most one; it was launched last
        launched = self._clock.done
        if under_way is not None and not _joins(scheduler):
            until = self._until(scheduler, *under_way[:2])
            since = time.perf_counter()
            what = _wait(under_way[0], getattr(engine, "input_queue", None), until)
            self._paused += time.perf_counter() - since
            if what == "message":
                return None, True  # the engine takes the messages in, and comes back
            if what == "tokens" and until == math.inf:
                self._exact = None  # what lies between these tokens and the next ones is not a round of the device
                with _nothing_to_schedule(scheduler):
                    outputs, _ = original(engine)
                self._came(under_way[1], self._read - launched)
                return outputs, True  # after a step without work vLLM sleeps
            if what == "tokens":  # sooner than expected
                came = time.perf_counter()
        newest, read, paused = queue[0] if queue else None, self._read, self._paused
        began = time.perf_counter()
        result = original(engine)
        drafts = bool(queue) and queue[0] is not newest and _drafts(*queue[0][:2])
        if drafts:
            self._launched(queue[0], read, paused, began)
        if under_way is not None and not (queue and queue[-1] is under_way):
            if drafts and self._read != read and self._read - self._clock.done > WAITED:
                came = self._read
            self._round(under_way[1], came)
            self._came(under_way[1], 0.0 if came is None else came - launched)
        return result

    def _until(self, scheduler: Any, future: Any, scheduled: Any) -> float:
        """When the next step is launched, at the latest: behind the tokens of the step under way (infinity), now, or at
        a moment in between."""
        planner, requests = planner_of(scheduler), scheduler.requests
        if planner is None or not planner.read_first or _event(future) is None:
            return -math.inf
        if not requests:
            return math.inf  # there is nothing to launch
        # Behind a step that is all inside of prefills nothing is drafted.
        if not _drafts(future, scheduled) or not any(
            name in requests and not requests[name].is_prefill_chunk for name in scheduled.num_scheduled_tokens
        ):
            return -math.inf
        order = self._orders[_load(scheduled)]
        if order.first or self._opens(scheduled):
            return math.inf
        return -math.inf if self._exact is None else self._exact + order.wait

    def _opens(self, scheduled: Any) -> bool:
        """Whether a step is of new requests alone whose tokens will be there before another step could be launched."""
        launches = self._orders[_load(scheduled)].launches
        return _is_new(scheduled) and self._first.get(_size(scheduled), math.inf) < min(launches, default=0.0)

    def _came(self, scheduled: Any, seconds: float) -> None:
        """Take in how long after its launch the tokens of a step came; 0: they were there before anybody looked."""
        if _is_new(scheduled):
            self._first[_size(scheduled)] = seconds

    def _launched(self, step: tuple[Any, Any, Any], read: float, paused: float, began: float) -> None:
        """Take in the times of a step that was just launched. read: when the tokens before its launch were. paused:
        for how long the host waited since then. began: when the launch did."""
        future, scheduled, _ = step
        future.add_done_callback(self._was_read)  # called where the result is set, by whoever reads the tokens
        if not _decodes(scheduled):
            return
        load = _load(scheduled)
        order = self._orders[load]
        order.launches.append(self._clock.done - began)
        host, device = self._clock.launched - read - paused, self._clock.seconds()
        if host > 0 and device is not None and order.add(host, device):
            logger.info(
                "early exit: at %d to %d requests, tokens are read %s the next step is launched (in between the host "
                "takes %.2f ms, drafting %.2f ms)", 2 ** (load - 1), 2**load - 1, "before" if order.first else "after",
                1000 * (order.host or 0), 1000 * (order.device or 0),
            )  # fmt: skip
        if order.wait and not (order.first or order.logged):
            order.logged = True
            logger.info("early exit: at %d to %d requests, a step is launched %.2f ms after the tokens of the last but "
                        "one (it takes the host %.2f ms, and a round %.2f ms)", 2 ** (load - 1), 2**load - 1,
                        1000 * order.wait, 1000 * max(order.launches), 1000 * min(order.rounds))  # fmt: skip

    def _was_read(self, future: Any) -> None:
        self._read, self._paused = time.perf_counter(), 0.0

    def _round(self, scheduled: Any, came: float | None) -> None:
        """Take in when the tokens of a step came; None: that is not known."""
        if came is not None and self._exact is not None and _decodes(scheduled):
            self._orders[_load(scheduled)].rounds.append(came - self._exact)
        self._exact = came


def _load(scheduled: Any) -> int:
    return len(scheduled.num_scheduled_tokens).bit_length()


def _is_new(scheduled: Any) -> bool:
    """Whether a step is of new requests alone."""
    return 0 < len(scheduled.scheduled_new_reqs) == len(scheduled.num_scheduled_tokens)


def _size(scheduled: Any) -> int:
    return int(scheduled.total_num_scheduled_tokens).bit_length()


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


def _wait(future: Any, messages: Any, until: float) -> str:
    """Wait for a step's tokens, a message to the engine or a moment; which of them came: "tokens", "message" or "time".

    messages: the queue of an engine in a process of its own. A request that comes is launched at once, while the device
    still has work. Another engine has none: reading the tokens waits for them, and nothing is gained by another wait.
    """
    if messages is None:
        return "tokens" if until == math.inf else "time"
    while time.perf_counter() < until:
        if _event(future).query():
            return "tokens"
        if not messages.empty():
            return "message"
        time.sleep(PAUSE)
    return "time"


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
