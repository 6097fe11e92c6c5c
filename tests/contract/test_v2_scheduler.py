"""vLLM's own scheduler with our plan of widths, and a model runner of arithmetic whose answers come a step late.

What only the V2 runner does is here without a GPU: places are planned before drafts exist, the batch changes between
the two, requests are preempted, and the widths of successive steps differ."""

import ast
import inspect
import itertools
import textwrap
from collections import Counter, deque
from types import SimpleNamespace

import pytest
import torch
import vllm.envs
from fixed_times import fix_times
from v2_engine import K, Runner, add, asked_of, crowd
from vllm.v1.request import RequestStatus
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.spec_decode.utils import DraftTokensHandler

from selfspec_cli.early_exit.length_table import LengthTable
from selfspec_cli.vllm_plugin.observe.transport import ATTRIBUTE, CARRIER, RUST_FRONTEND, take_out
from selfspec_cli.vllm_plugin.spec_config import settings_of
from selfspec_cli.vllm_plugin.v2.runner import leave_out_drafting
from selfspec_cli.vllm_plugin.v2.scheduling import planner_of, planners_like


def serve(scheduler, requests, rate=0.7, late=1):
    """Run requests (name, prompt tokens, output tokens, extra_args) to their end; requests arrive while others run."""
    runner, waiting, pending, done = Runner(rate, asked_of(requests)), deque(requests), deque(), {}
    live = {}
    for turn in range(5000):
        if waiting and turn % 3 == 0:
            name, prompt, most, extra = waiting.popleft()
            live[name] = add(scheduler, name, prompt, most, extra)
        output = scheduler.schedule()
        pending.append((output, runner.step(output) if output.num_scheduled_tokens else None))
        if not scheduler.scheduler_config.async_scheduling and output.num_scheduled_tokens:
            width = output.num_spec_tokens_to_schedule
            names = list(output.num_scheduled_tokens)
            drafts = SimpleNamespace(req_ids=names, draft_token_ids=[[-1] * width for _ in names])
        while len(pending) > (late if scheduler.scheduler_config.async_scheduling else 0):
            output, answer = pending.popleft()
            if answer is not None:
                scheduler.update_from_output(output, answer)
                if not scheduler.scheduler_config.async_scheduling:
                    scheduler.update_draft_token_ids(drafts)
        done |= {name: len(one.output_token_ids) for name, one in live.items() if one.is_finished()}
        if not waiting and len(done) == len(requests):
            return runner, done
    statuses = {name: (RequestStatus(one.status).name, one.num_output_tokens) for name, one in live.items()}
    raise AssertionError(f"requests that never end: {statuses}")


@pytest.mark.parametrize("asynchronous", [True, False])
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
def test_every_request_gets_all_of_its_tokens_while_widths_change(make, asynchronous, blocks, spec):
    requests = crowd(extra=lambda number: {"selfspec_k": (0, 1, 4)[number % 3]} if number % 2 else None)
    scheduler = make(asynchronous, blocks, **spec)
    if "gate" in spec:
        fix_times(planner_of(scheduler).rule)
    runner, done = serve(scheduler, requests)
    assert done == {name: most for name, _, most, _ in requests}
    seen = {width for _, widths in runner.lengths for width in widths}
    assert seen <= {K, 3, 2, 1, 0}
    assert max(seen) > 0 if "gate" in spec else K in seen  # of all widths the rule chooses
    assert scheduler.requests == {}


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
    for path, value in changes.items():
        *owners, name = path.split("__")
        owner = made
        for each in owners:
            owner = getattr(owner, each)
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
        {"speculator__drafting_disabled": False},  # takes in what was accepted
        {"speculator": SimpleNamespace()},  # one of vLLM's
        {"speculator": None},
        {"execute_model_state": None},
        {"execute_model_state__num_spec_tokens_to_schedule": 2},
        {"execute_model_state__input_batch__num_draft_tokens": 3},
        {"execute_model_state__input_batch__has_structured_output_reqs": True},
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
