"""When steps are launched, in virtual time: vLLM's engine core over a device that works while the host waits."""

from __future__ import annotations

import pytest
from v2_device import Device, World

pytest.importorskip("vllm")
pytestmark = pytest.mark.contract

SHORT = {"verify": 4e-3, "loop": 0.8e-3, "prefill": 2e-3}
"""Seconds of a device whose draft loop is shorter than what the host does between two steps."""


@pytest.fixture
def world(make, monkeypatch):
    return lambda read_first=True, **times: World(make(read_first=read_first), monkeypatch, Device(**SHORT | times))


@pytest.mark.parametrize("clients", [2, 3, 6])
def test_a_new_request_joins_the_next_step_and_the_device_waits_no_longer(world, clients):
    soon, idle = world().serve(clients, 1200)
    late, idle_before = world(read_first=False).serve(clients, 1200)
    print(soon, late, idle, idle_before)
    assert soon < late - 2e-3
    assert idle <= idle_before + 1e-6


def test_a_request_behind_the_last_one_does_not_wait_for_the_pass_that_was_in_vain(world):
    soon, _ = world().serve(1, 600)
    late, _ = world(read_first=False).serve(1, 600)
    print(soon, late)
    assert soon < late - 1e-3


QUICK = {"loop": 0.8e-3, "prefill": -3.5e-3}
"""A prefill that works while it is launched, and is done half a millisecond later."""


def test_a_first_token_that_comes_during_a_launch_is_read_before_it(world):
    found = []
    for read_first in (True, False):
        here = world(read_first, **QUICK)
        here.launch = 1.5e-3
        found.append((*here.serve(1, 600), len(here.ended) / here.host.now))
    (soon, idle, served), (late, idle_before, served_before) = found
    print(found)
    # vLLM reads behind the pass that was in vain, and behind a launch. One that comes later costs the request, once.
    assert soon < late - 2 * here.launch - 2e-3
    assert served > 0.99 * served_before
    assert idle < idle_before + 0.1e-3


@pytest.mark.parametrize("prefill", [2e-3, 30e-3])
def test_the_device_does_not_wait_behind_a_first_token_that_takes_longer_than_a_launch(world, prefill):
    waits = [world(read_first, prefill=prefill).serve(1, 600)[1] for read_first in (True, False)]
    assert waits[0] <= waits[1] + 1e-6


def test_how_long_first_tokens_take_is_known_by_the_length_of_their_prompts_and_followed(world):
    here = world(**QUICK)
    here.launch = 1.5e-3
    here.serve(1, 600)
    here.answered = lambda name: None

    def rest():
        while here.core.scheduler.has_requests() or here.core.batch_queue:
            here.turn()

    def alone(prompt, prefill):
        """Whether the first token of a request that is alone is read before another step is launched."""
        rest()
        here.device.prefill, before = prefill, len(here.core.log)
        here.ask(f"{before}.0", prompt)
        while here.core.log[before:].count("read") < 1 or here.core.log[before:].count("launch") < 2:
            here.turn()
        return here.core.log[before : before + 3] == ["launch", "read", "launch"]

    quick, slow = QUICK["prefill"], 30e-3
    assert alone(20, quick)
    assert [alone(60, slow) for _ in range(3)] == [False] * 3
    assert [alone(60, quick) for _ in range(3)] == [False, True, True]
    assert [alone(20, slow) for _ in range(4)] == [True, False, False, False]
    assert here.reader._first.keys() == {number.bit_length() for number in (20, 60)}  # and of no other steps


def test_a_request_that_waits_for_a_place_costs_the_device_nothing(world):
    """Twelve clients of an engine that runs eight requests: when one ends, a prefill is launched, which takes the host
    longer than other launches, so that it has to begin sooner."""
    waits = []
    for read_first in (True, False):
        here = world(read_first, prefill=0.0)
        here.slow, here.ask = 4e-3, lambda name, ask=here.ask: ask(name, most=150)
        here.serve(12, 600)
        here.device.idle, steps = 0.0, here.steps
        here.serve(0, steps + 1500)
        waits.append(here.device.idle / (here.steps - steps))
    print(waits)
    assert waits[0] <= waits[1] + 20e-6


def test_steps_are_launched_as_late_as_the_host_can_be_done_before_the_tokens(world):
    from selfspec_cli.vllm_plugin.v2.step_order import SLACK

    here = world()
    here.serve(2, 600)
    print(here.spare[-40:])
    ready = [wait for launched, wait in here.spare[-200:] if launched == "decode"]
    # What Linux adds to a pause, and what the host does with the tokens before.
    assert SLACK - 150e-6 < min(ready) and sorted(ready)[len(ready) // 2] < SLACK + 100e-6


@pytest.mark.parametrize(("every", "late"), [(50, 10e-3), (7, 1.5e-3), (2, 0.3e-3)])
def test_a_host_that_stumbles_costs_the_device_no_more_than_in_vllms_order(world, every, late):
    found = []
    for read_first in (True, False):
        here = world(read_first=read_first)
        here.hiccup = every, late
        found.append(here.serve(3, 1500)[1])
    assert found[0] < found[1] + 0.02 * sum(SHORT.values())


def test_a_device_that_becomes_faster_is_followed(world):
    here = world()
    here.serve(3, 600)
    here.device.verify = 2.5e-3
    _, idle = here.serve(0, here.steps + 400)
    assert idle < 0.1e-3
    here.device.verify = 4e-3
    here.serve(0, here.steps + 100)
    assert here.reader._orders[2].wait == pytest.approx(4.8e-3 - 1.8e-3 - 0.4e-3, abs=0.2e-3)


def test_a_request_that_comes_before_the_launch_is_launched_at_once(world):
    here = world()
    here.serve(2, 600)
    gaps = here.joined[-20:]
    assert sum(gap < 0.3e-3 for gap in gaps) > len(gaps) / 2  # the others came while a step was launched or read


def test_nothing_is_awaited_behind_a_step_without_drafts_and_with_a_grammar(world):
    here = world()
    here.serve(2, 600)
    future, scheduled, _ = here.core.batch_queue[-1]
    here.reader._exact = here.host.now

    def ask():
        return here.reader._until(here.core.scheduler, future, scheduled)

    assert here.host.now < ask() < here.host.now + 5e-3
    scheduled.has_structured_output_requests = True
    assert ask() < 0
    scheduled.has_structured_output_requests, scheduled.num_spec_tokens_to_schedule = False, 0
    assert ask() < 0


def test_a_wait_is_lines_once(world, caplog):
    with caplog.at_level("INFO", "vllm.selfspec"):
        world().serve(3, 1200)
    lines = [line for line in caplog.messages if "after the tokens of the last but one" in line]
    assert lines and len(lines) == len({line.split(",")[0] for line in lines})
