"""When tokens are read and steps launched, in virtual time: vLLM's engine core over a device that works while the host
waits."""

import pytest
from v2_device import Device, World

from selfspec_cli.vllm_plugin.v2.widths import planner_of

pytest.importorskip("vllm")
pytestmark = pytest.mark.contract

LONG = {"verify": 4e-3, "loop": 3e-3, "prefill": 2e-3}
"""Seconds of a device whose draft loop is longer than what the host does between two steps."""
SHORT = LONG | {"loop": 0.8e-3}
"""Whose loop is shorter."""


@pytest.fixture
def world(make, monkeypatch):
    def made(read_first=True, **times):
        scheduler = make()
        planner_of(scheduler).read_first = read_first
        return World(scheduler, monkeypatch, Device(**LONG | times))

    return made


@pytest.mark.parametrize("clients", [2, 3, 6])
def test_a_new_request_joins_the_next_step_and_the_device_waits_no_longer(world, clients):
    soon, idle = world().serve(clients, 1200)
    late, idle_before = world(read_first=False).serve(clients, 1200)
    print(soon, late, idle, idle_before)
    assert soon < late - 2e-3
    assert idle <= idle_before + 20e-6


@pytest.mark.parametrize("clients", [2, 6])
def test_behind_a_short_loop_the_device_waits_no_longer_than_in_vllms_order(world, clients):
    waits = [world(read_first, **SHORT).serve(clients, 1200)[1] for read_first in (True, False)]
    print(waits)
    assert waits[0] <= waits[1] + 1e-6


@pytest.mark.parametrize("times", [LONG, SHORT], ids=["long", "short"])
def test_a_request_behind_the_last_one_does_not_wait_for_the_pass_that_was_in_vain(world, times):
    soon, _ = world(**times).serve(1, 600)
    late, _ = world(read_first=False, **times).serve(1, 600)
    print(soon, late)
    assert soon < late - 1e-3


@pytest.mark.parametrize("prefill", [2e-3, 30e-3])
def test_the_device_does_not_wait_behind_a_first_token_that_takes_long(world, prefill):
    waits = [world(read_first, **SHORT | {"prefill": prefill}).serve(1, 600)[1] for read_first in (True, False)]
    assert waits[0] <= waits[1] + 1e-6


@pytest.mark.parametrize(("every", "late"), [(50, 10e-3), (7, 1.5e-3), (2, 0.3e-3)])
def test_a_host_that_stumbles_costs_the_device_no_more_than_in_vllms_order(world, every, late):
    found = []
    for read_first in (True, False):
        here = world(read_first=read_first)
        here.hiccup = every, late
        found.append(here.serve(3, 1500)[1])
    assert found[0] < found[1] + 0.02 * sum(LONG.values())
