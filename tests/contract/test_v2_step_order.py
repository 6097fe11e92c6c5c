"""vLLM's engine core with our order of reading and launching, over its own scheduler and a runner of arithmetic."""

import queue
from collections import deque
from types import SimpleNamespace

import pytest
import torch
from v2_engine import add, alternating, asked_of, crowd, engine_of

from selfspec_cli.vllm_plugin.v2 import step_order
from selfspec_cli.vllm_plugin.v2.step_order import SAMPLES, Reader

WIDTH = 4
"""Draft slots of a step."""


def run(core, requests=(), every=3):
    """Steps until all have ended; a request arrives every few steps. Tokens of each."""
    waiting, live, turn = deque(requests), {}, 0
    while waiting or core.scheduler.has_requests() or core.batch_queue:
        if waiting and turn % every == 0:
            name, prompt, most, extra = waiting.popleft()
            live[name] = add(core.scheduler, name, prompt, most, extra)
        _, worked = core.step_fn()
        assert worked or not core.scheduler.requests  # else vLLM sleeps
        turn += 1
        assert turn < 9000
    return {name: len(request.output_token_ids) for name, request in live.items()}


def steps_until(core, over):
    for _ in range(200):
        if over():
            return
        core.step_fn()
    raise AssertionError("this never came")


@pytest.mark.parametrize("blocks", [1000, 40])  # the smaller cannot hold all requests: some are preempted
@pytest.mark.parametrize("first", [True, False, None], ids=["read first", "launch first", "alternating"])
def test_every_request_gets_all_of_its_tokens_in_any_order(make, blocks, first):
    requests = crowd(extra=lambda number: {"selfspec_k": (0, 1, 4)[number % 3]} if number % 2 else None)
    core, reader = engine_of(make(True, blocks, length_table="1:4 3:2 7:0"), first, asked=asked_of(requests))
    if first is None:
        reader._orders = alternating()
    assert run(core, requests) == {name: most for name, _, most, _ in requests}
    pairs = list(zip(core.log, core.log[1:], strict=False))
    if first is False:
        assert ("launch", "launch") in pairs
    else:  # one after the other, for the most part
        assert pairs.count(("read", "launch")) > len(pairs) / 4


def test_a_request_that_has_ended_is_not_verified_again(make):
    launches = {}
    for first in (True, False):
        core, _ = engine_of(make(), first, rate=1.0)
        add(core.scheduler, "one", 20, 41)
        run(core)
        launches[first] = core.log.count("launch")
    assert launches == {True: 9, False: 10}  # a prefill, and 40 tokens of 5 a round


def test_a_request_that_comes_while_tokens_are_waited_for_is_launched_at_once(make):
    core, _ = engine_of(make(), True, late=5)
    add(core.scheduler, "one", 20, 60)
    core.step_fn()
    core.step_fn()  # the prefill is read
    core.step_fn()
    assert core.log == ["launch", "read", "launch"]
    core.looked = lambda: core.input_queue.put("a request")
    assert core.step_fn() == (None, True)  # the engine takes its messages in
    assert core.log[3:] == []
    core.looked, core.input_queue = lambda: None, queue.Queue()
    add(core.scheduler, "two", 20, 60)
    core.step_fn()
    assert core.log[3:] == ["launch", "read"]
    assert core.batch_queue[-1][1].num_scheduled_tokens.keys() == {"one", "two"}


def test_an_engine_that_gets_no_messages_waits_for_its_tokens(make):
    core, _ = engine_of(make(), True)
    del core.input_queue
    add(core.scheduler, "one", 20, 30)
    assert run(core) == {}
    assert core.log[:4] == ["launch", "read", "launch", "read"]


def test_times_are_from_tokens_that_were_read_to_the_next_launch(make, monkeypatch):
    core, reader = engine_of(make(), False)
    moments = iter(range(10_000))
    monkeypatch.setattr(step_order.time, "perf_counter", lambda: next(moments))
    clock = reader._clock = SimpleNamespace(launched=-1.0, seconds=lambda: 7.0)
    sample = core.model_executor.sample_tokens

    def sample_tokens(*arguments, **more):  # runner.py, in the worker
        clock.launched = step_order.time.perf_counter()
        return sample(*arguments, **more)

    core.model_executor.sample_tokens = sample_tokens
    add(core.scheduler, "one", 20, 200)
    steps_until(core, lambda: reader._orders[1, WIDTH].host is not None)
    order = reader._orders[1, WIDTH]
    assert (order.host, order.device) == (2.0, 7.0)  # moments at which somebody looked: transport.py did, too
    assert order.first


def test_a_request_for_which_there_is_no_room_does_not_launch_a_step(make):
    core, _ = engine_of(make(), True)
    for number in range(8):  # as many as the engine runs
        add(core.scheduler, f"r{number}", 20, 200)
    steps_until(core, lambda: len(core.scheduler.running) == 8 and core.log[-1] == "launch")
    before = len(core.log)
    add(core.scheduler, "late", 20, 20)
    core.step_fn()
    assert core.log[before:] == ["read"]
    assert "late" in core.scheduler.requests


@pytest.mark.parametrize("left", ["driver_worker", "clock", "one rank"])
def test_vllms_order_stays_where_ours_cannot_be_had(make, left):
    core, _ = engine_of(make(), True)
    del core.early_exit_reader
    if left == "driver_worker":
        del core.model_executor.driver_worker
    if left == "clock":
        core.model_executor.driver_worker.model_runner.speculator = None
    if left == "one rank":
        core.vllm_config.parallel_config.world_size_across_dp = 2
    assert step_order.reader_of(core) is None
    add(core.scheduler, "one", 20, 60)
    run(core)
    assert core.log[:4] == ["launch", "launch", "read", "launch"]


@pytest.mark.parametrize("what", ["nothing", "grammar", "no drafts", "inside a prefill"])
def test_vllms_order_stays_where_nothing_hides_the_reading(make, what):
    core, reader = engine_of(make(**({"length_table": "1:0"} if what == "no drafts" else {})), True)
    add(core.scheduler, "one", 100 if what == "inside a prefill" else 20, 60)  # 64 tokens a step at most
    core.step_fn()
    future, scheduled, _ = core.batch_queue[-1]
    scheduled.has_structured_output_requests = what == "grammar"
    assert reader._first(core.scheduler, future, scheduled) == (what == "nothing")


def test_a_step_that_fails_leaves_the_scheduler_as_it_was(make):
    core, _ = engine_of(make(), True)
    add(core.scheduler, "one", 20, 30)
    core.step_fn()

    def fails():
        raise RuntimeError("the device is gone")

    core.batch_queue[-1][0].async_output.get_output = fails
    with pytest.raises(RuntimeError, match="the device is gone"):
        core.step_fn()
    assert core.scheduler.has_requests()
    assert "has_requests" not in vars(core.scheduler)


def step_of(requests, tokens=5, new=(), width=WIDTH):
    return SimpleNamespace(
        num_scheduled_tokens=dict.fromkeys(map(str, range(requests)), tokens),
        scheduled_new_reqs=list(new),
        total_num_scheduled_tokens=requests * tokens,
        num_spec_tokens_to_schedule=width,
        has_structured_output_requests=False,
    )


def future(event=True):
    return SimpleNamespace(
        async_output=SimpleNamespace(copy_event=object() if event else None), add_done_callback=lambda call: None
    )


@pytest.fixture
def reader():
    return Reader(SimpleNamespace(launched=0.0, seconds=lambda: 0.002))


def took(reader, milliseconds, steps, step=None, read=10.0, paused=0.5):
    for _ in range(steps):
        reader._clock.launched = read + paused + milliseconds / 1000
        reader._launched((future(), step or step_of(3), None), read, paused)


def test_tokens_are_read_first_where_the_host_is_faster_than_the_draft_loop(reader):
    took(reader, 1.0, SAMPLES - 1)
    assert not reader._orders[2, WIDTH].first
    took(reader, 1.0, 1)
    assert reader._orders[2, WIDTH].first
    took(reader, 2.1, SAMPLES)  # within the margin
    assert reader._orders[2, WIDTH].first
    took(reader, 2.3, SAMPLES)
    assert not reader._orders[2, WIDTH].first
    took(reader, 1.9, SAMPLES)
    assert not reader._orders[2, WIDTH].first
    took(reader, 1.7, SAMPLES)
    assert reader._orders[2, WIDTH].first


def test_a_few_slow_steps_change_nothing(reader):
    took(reader, 1.0, SAMPLES - 4)
    took(reader, 500.0, 4)
    assert reader._orders[2, WIDTH].first


@pytest.mark.parametrize(
    ("milliseconds", "step"),
    [
        (-1.0, None),
        (1.0, step_of(3, new=["request"])),
        (1.0, step_of(3, tokens=9)),
        (1.0, step_of(3, width=0)),
        (1.0, "a loop that is not over"),
    ],
    ids=["a launch before anything was read", "a new request", "a prefill", "no drafts", "a loop that is not over"],
)
def test_other_steps_are_no_samples(reader, milliseconds, step):
    if isinstance(step, str):
        reader._clock.seconds, step = lambda: None, None
    took(reader, milliseconds, 100, step)
    assert not any(order._steps or order.host for order in reader._orders.values())


@pytest.mark.parametrize(
    ("step", "kinds"),
    [(step_of(8), [(2, WIDTH), (4, WIDTH)]), (step_of(3, 3, width=2), [(2, WIDTH), (2, 2)])],
    ids=["loads", "widths"],
)
def test_loads_and_widths_have_orders_of_their_own(reader, step, kinds):
    """Gate `auto` changes the width, and a shorter loop may be too short to hide the host."""
    took(reader, 1.0, SAMPLES)
    took(reader, 3.0, SAMPLES, step)
    assert [reader._orders[kind].first for kind in kinds] == [True, False]


def test_the_clock_reads_the_oldest_of_three_loops_and_never_waits():
    moments = iter(range(100))

    class Event:
        done = True

        def record(self):
            self.at = next(moments) ** 2

        def query(self):
            return self.done

        def elapsed_time(self, other):
            return float(other.at - self.at)

    clock = step_order.DraftClock(torch.device("cpu"))
    assert clock.seconds() is None
    clock._pairs = [(Event(), Event()) for _ in range(3)]
    for _ in range(2):
        with clock.drafting():
            pass
        assert clock.seconds() is None
    with clock.drafting():
        pass
    assert clock.seconds() == 0.001  # from 0 to 1
    with clock.drafting():
        pass
    assert clock.seconds() == 0.005  # from 4 to 9
    Event.done = False
    assert clock.seconds() is None
