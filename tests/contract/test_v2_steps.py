"""vLLM's scheduler with our plan of widths, and its engine core with our order of reading and launching.

A model runner of arithmetic answers a step late. What only the V2 runner does is here without a GPU: places are planned
before drafts exist, the batch changes between the two, requests are preempted, and the widths of successive steps
differ."""

import ast
import inspect
import itertools
import queue
import textwrap
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import vllm.envs
from fixed_times import fix_times
from v2_engine import K, add, alternating, asked_of, crowd, engine_of, run, serve
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.spec_decode.utils import DraftTokensHandler

from selfspec_cli.early_exit.length_table import LengthTable
from selfspec_cli.vllm_plugin.observe.transport import ATTRIBUTE, CARRIER, RUST_FRONTEND, take_out
from selfspec_cli.vllm_plugin.spec_config import settings_of
from selfspec_cli.vllm_plugin.v2 import step_order
from selfspec_cli.vllm_plugin.v2.runner import leave_out_drafting
from selfspec_cli.vllm_plugin.v2.scheduling import planner_of, planners_like
from selfspec_cli.vllm_plugin.v2.step_order import SAMPLES, Reader


@pytest.mark.parametrize("order", ["read first", "launch first", "alternating", "synchronous"])
@pytest.mark.parametrize("blocks", [1000, 40])  # the smaller cannot hold all requests: some are preempted
@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"length_table": "1:4 3:2 5:0"},
        {"length_table": "1:4 1@60:1 4:0 4@80:4"},
        {"length_table": "1:4 6:2", "gate": "auto"},
    ],
    ids=str,
)
def test_every_request_gets_all_of_its_tokens_in_any_order_while_widths_change(make, order, blocks, spec):
    requests = crowd(extra=lambda number: {"selfspec_k": (0, 1, 4)[number % 3]} if number % 2 else None)
    scheduler = make(order != "synchronous", blocks, **spec)
    if "gate" in spec:
        fix_times(planner_of(scheduler).rule)
    core, reader = engine_of(scheduler, order == "read first", asked=asked_of(requests))
    if order == "alternating":
        reader._orders = alternating()
    assert run(core, requests) == {name: most for name, _, most, _ in requests}
    seen = {width for _, widths in core.runner.lengths for width in widths}
    assert seen <= {K, 3, 2, 1, 0}
    assert max(seen) > 0 if "gate" in spec else K in seen  # of all widths the rule chooses
    assert scheduler.requests == {}
    pairs = list(zip(core.log, core.log[1:], strict=False))
    if order == "launch first":
        assert ("launch", "launch") in pairs
    elif order != "synchronous" and not spec:  # one after the other, for the most part
        assert pairs.count(("read", "launch")) > len(pairs) / 4


def test_steps_of_a_steady_batch_are_uniform_and_follow_the_table(make):
    requests = [(f"r{number}", 20, 60 + 12 * number, None) for number in range(6)]
    runner, _ = serve(make(length_table="1:4 3:2 5:0"), requests)
    wanted = {1: K, 2: K, 3: 2, 4: 2, 5: 0, 6: 0}
    steady = [(load, widths) for load, widths in runner.lengths if widths == {wanted[load]}]
    assert len(steady) > 0.8 * len(runner.lengths)
    assert {load for load, _ in steady} == {1, 2, 3, 4, 5, 6}


def test_a_table_that_is_set_before_the_first_step_is_in_force_in_it(make):
    scheduler, other = make(length_table="1:4 2:2"), make(length_table="1:4 3:2")
    found = planners_like(settings_of(scheduler.vllm_config))
    assert planner_of(scheduler) in found and planner_of(other) not in found
    for planner in found:
        planner.set_table(LengthTable.parse("1:1", K))
    runner, _ = serve(scheduler, [("r", 20, 60, None)])
    assert {width for _, widths in runner.lengths for width in widths} == {2}  # the next one that there are graphs for


@pytest.mark.parametrize(("table", "tokens"), [("1:4", 1 + K), ("1:2", 1)])
def test_a_new_request_of_one_token_is_padded_to_the_full_width_and_to_no_other(make, table, tokens):
    core, _ = engine_of(make(length_table=table))
    add(core.scheduler, "decodes", 20, 60)
    for _ in range(4):
        core.step_fn()
    add(core.scheduler, "new", 1, 60)
    core.step_fn()
    assert core.batch_queue[0][1].num_scheduled_tokens["new"] == tokens


def test_only_early_exit_on_the_v2_runner_is_planned_for(make):
    assert planner_of(make(v2=False)) is None
    plain = SimpleNamespace(speculative_config=None, additional_config=None)
    assert planner_of(SimpleNamespace(vllm_config=plain, use_v2_model_runner=True)) is None


def test_verdicts_reach_the_planner_of_their_scheduler(make, monkeypatch):
    heard = {True: [], False: []}
    one, other = make(gate="auto"), make(gate="auto")
    planner_of(one).chooses_width = False  # each step has all places, whatever it took
    for scheduler in (one, other):
        monkeypatch.setattr(planner_of(scheduler), "verdict", heard[scheduler is one].append)
    serve(one, [("r", 20, 60, None)])
    assert not heard[False] and set(heard[True]) == set(range(1 + K))


def statistics_of(scheduler, monkeypatch, worker=False):
    """Statistics that the scheduler gives out from now on. worker: its numbers are there twice a second, and take the
    scheduler's along."""
    update, found = scheduler.update_from_output, []

    def listening(output, answer):
        if worker:
            setattr(answer, ATTRIBUTE, {})
        outputs = update(output, answer)
        found.extend(each.scheduler_stats for each in outputs.values() if each.scheduler_stats is not None)
        return outputs

    monkeypatch.setattr(scheduler, "update_from_output", listening)
    return found


def nothing_of_ours(stats):
    return not any(name.startswith("selfspec") for name in getattr(stats, CARRIER))


@pytest.mark.parametrize("worker", [True, False], ids=["with each step", "at the end"])
def test_the_statistics_of_the_steps_add_up_to_what_was_counted(make, monkeypatch, worker):
    scheduler = make(log_stats=True, length_table="1:4 3:2 5:0")
    found = statistics_of(scheduler, monkeypatch, worker)
    serve(scheduler, crowd(12, extra=lambda number: {"selfspec_k": 0} if number == 3 else None))
    news = [take_out(stats) for stats in found]
    assert all(map(nothing_of_ours, found))
    lengths = [each.pop("in_force") for each in news if "in_force" in each]
    sums = sum(map(Counter, news), Counter())
    counted = {f"off.{reason}": number for reason, number in planner_of(scheduler).off.items() if number}
    steps = {name: sums.pop(name) for name in list(sums) if name.startswith("steps_of_width.")}
    assert steps == {f"steps_of_width.{width}": number for width, number in planner_of(scheduler).steps.items()}
    assert sums == counted
    assert set(counted) == {"off.load", "off.request"}
    assert set(lengths) == ({0, 2, 4} if worker else {4})
    assert all(one != other for one, other in itertools.pairwise(lengths))  # sent where it changed
    assert worker or sum(map(bool, news)) < 5 < len(news)  # where no request was left


def test_nothing_is_sent_to_an_api_server_that_would_not_take_it_out(make, monkeypatch):
    assert RUST_FRONTEND in vllm.envs.environment_variables
    monkeypatch.setenv(RUST_FRONTEND, "1")
    scheduler = make(log_stats=True, length_table="1:0")
    found = statistics_of(scheduler, monkeypatch)
    serve(scheduler, crowd(2))
    assert found and all(map(nothing_of_ours, found))


# ---- steps that rest, through what vLLM's runner does with its speculator in one step --------------------------------


def runner(**changes):
    """A runner whose speculator drafted nothing in the last step, before a step of three requests without drafts."""
    handler = DraftTokensHandler.__new__(DraftTokensHandler)
    handler.req_ids, handler.draft_tokens_np, handler.num_draft_tokens = ["gone"], torch.zeros(1, 4).numpy(), 4
    batch = SimpleNamespace(req_ids=["a", "b", "c"], num_draft_tokens=0, has_structured_output_reqs=False)
    made = SimpleNamespace(
        speculator=SimpleNamespace(drafting_disabled=True),
        num_speculative_steps=4,
        draft_tokens_handler=handler,
        execute_model_state=SimpleNamespace(input_batch=batch, num_spec_tokens_to_schedule=0),
        pp_handler=None,
    )
    for name, value in changes.items():
        owner = next(each for each in (batch, made.execute_model_state, made) if hasattr(each, name))
        setattr(owner, name, value)
    return made


def step(made):
    """What vLLM's part of the step sees: the speculator, and how many drafts a step has at most."""

    def sample_tokens(self, grammar_output):
        assert grammar_output == "grammar"
        return self.speculator, self.num_speculative_steps

    return leave_out_drafting(sample_tokens)(made, "grammar")


def test_a_step_that_rests_has_no_speculator_and_gets_it_back():
    made = runner()
    speculator = made.speculator
    assert step(made) == (None, 0)
    assert (made.speculator, made.num_speculative_steps) == (speculator, 4)
    found = made.draft_tokens_handler.get_draft_tokens()
    assert (found.req_ids, found.draft_token_ids) == (["a", "b", "c"], [[], [], []])


def test_the_speculators_clock_is_found_when_the_forward_pass_was_launched():
    made = runner(speculator=SimpleNamespace(clock=SimpleNamespace(launched=0.0)))
    step(made)
    assert made.speculator.clock.launched > 0


def test_a_step_that_fails_gives_the_speculator_back():
    made = runner()
    kept = made.speculator

    def fails(self):
        raise MemoryError

    with pytest.raises(MemoryError):
        leave_out_drafting(fails)(made)
    assert made.speculator is kept


@pytest.mark.parametrize(
    "changes",
    [
        {"speculator": SimpleNamespace(drafting_disabled=False)},  # takes in what was accepted
        {"speculator": SimpleNamespace()},  # one of vLLM's
        {"speculator": None},
        {"execute_model_state": None},
        {"num_spec_tokens_to_schedule": 2},
        {"num_draft_tokens": 3},
        {"has_structured_output_reqs": True},
        {"pp_handler": object()},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_any_other_step_is_vllms(changes):
    made = runner(**changes)
    kept = made.draft_tokens_handler.req_ids
    assert step(made) == (made.speculator, 4)
    assert made.draft_tokens_handler.req_ids == kept


def test_vllm_does_without_a_speculator_wherever_it_asks_for_one():
    """In its sampling step, what it does with a speculator is below a question whether there is one."""
    original = inspect.unwrap(model_runner.GPUModelRunner.sample_tokens)
    (function,) = ast.parse(textwrap.dedent(inspect.getsource(original))).body
    guarded = [node for node in ast.walk(function) if isinstance(node, ast.If | ast.Assign)]
    asks = {
        id(part)
        for node in guarded
        if "self.speculator is not None" in ast.unparse(getattr(node, "test", node))
        for part in ast.walk(node)
    }
    uses = [node for node in ast.walk(function) if isinstance(node, ast.Attribute) and node.attr == "speculator"]
    assert uses and all(id(node) in asks for node in uses)


# ---- when a step's tokens are read: before the next step is launched, or after it ------------------------------------


def steps_until(core, over):
    for _ in range(200):
        if over():
            return
        core.step_fn()
    raise AssertionError("this never came")


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
    steps_until(core, lambda: reader._orders[1, K].host is not None)
    order = reader._orders[1, K]
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


def step_of(requests, tokens=5, new=(), width=K):
    return SimpleNamespace(
        num_scheduled_tokens=dict.fromkeys(map(str, range(requests)), tokens),
        scheduled_new_reqs=list(new),
        total_num_scheduled_tokens=requests * tokens,
        num_spec_tokens_to_schedule=width,
        has_structured_output_requests=False,
    )


def future():
    return SimpleNamespace(async_output=SimpleNamespace(copy_event=object()), add_done_callback=lambda call: None)


@pytest.fixture
def reader():
    return Reader(SimpleNamespace(launched=0.0, seconds=lambda: 0.002))


def took(reader, milliseconds, steps, step=None, read=10.0, paused=0.5):
    for _ in range(steps):
        reader._clock.launched = read + paused + milliseconds / 1000
        reader._launched((future(), step or step_of(3), None), read, paused)


def test_tokens_are_read_first_where_the_host_is_faster_than_the_draft_loop(reader):
    took(reader, 1.0, SAMPLES - 1)
    assert not reader._orders[2, K].first
    took(reader, 1.0, 1)
    assert reader._orders[2, K].first
    took(reader, 2.1, SAMPLES)  # within the margin
    assert reader._orders[2, K].first
    took(reader, 2.3, SAMPLES)
    assert not reader._orders[2, K].first
    took(reader, 1.9, SAMPLES)
    assert not reader._orders[2, K].first
    took(reader, 1.7, SAMPLES)
    assert reader._orders[2, K].first


def test_a_few_slow_steps_change_nothing(reader):
    took(reader, 1.0, SAMPLES - 4)
    took(reader, 500.0, 4)
    assert reader._orders[2, K].first


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
    [(step_of(8), [(2, K), (4, K)]), (step_of(3, 3, width=2), [(2, K), (2, 2)])],
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
