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


def test_steps_are_launched_as_late_as_the_host_can_be_done_before_the_tokens(world):
    from selfspec_cli.vllm_plugin.v2.reading import SLACK

    here = world()
    here.serve(2, 600)
    print(here.spare[-40:])
    ready = [wait for launched, wait in here.spare[-200:] if launched == "decode"]
    # What Linux adds to a pause, and what the host does with the tokens before.
    assert SLACK - 150e-6 < min(ready) and sorted(ready)[len(ready) // 2] < SLACK + 100e-6


@pytest.mark.parametrize("every, late", [(50, 10e-3), (7, 1.5e-3), (2, 0.3e-3)])
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
    ask = lambda: here.reader._until(here.core.scheduler, future, scheduled)
    assert here.host.now < ask() < here.host.now + 5e-3
    scheduled.has_structured_output_requests = True
    assert ask() < 0
    scheduled.has_structured_output_requests, scheduled.num_spec_tokens_to_schedule = False, 0
    assert ask() < 0


def test_a_wait_is_told_once(world, caplog):
    with caplog.at_level("INFO", "vllm.selfspec"):
        world().serve(3, 1200)
    told = [line for line in caplog.messages if "after the tokens of the last but one" in line]
    assert told and len(told) == len(set(line.split(",")[0] for line in told))
