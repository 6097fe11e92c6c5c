"""experiments/two_checkouts.py --steps: where the time of a run goes, by when its steps were launched and read."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from scripts import importable


@pytest.fixture(scope="module")
def script():
    with importable(Path(__file__).parents[2] / "experiments") as module:
        yield module("two_checkouts")


@pytest.fixture
def engine(script, monkeypatch):
    """A worker whose steps are kept, and a clock that stands still but where something takes time."""
    pytest.importorskip("torch")
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(script, "time", SimpleNamespace(perf_counter=lambda: clock.now))

    def execute_model(scheduled):
        clock.now += 2.0

    def sample_tokens(grammar):
        clock.now += 1.0
        return SimpleNamespace(get_output=lambda: clock)

    worker = SimpleNamespace(
        model_runner=SimpleNamespace(execute_model=execute_model, sample_tokens=sample_tokens), clock=clock
    )
    script.record_steps(worker)
    return worker


def launch(engine, rows, new=0):
    engine.model_runner.execute_model(
        SimpleNamespace(num_scheduled_tokens=dict.fromkeys(range(rows), 5), scheduled_new_reqs=[None] * new)
    )
    return engine.model_runner.sample_tokens(None).get_output


def test_steps_whose_tokens_are_read_before_the_next_launch(script, engine):
    launch(engine, 2, new=2)()
    for _ in range(3):
        engine.clock.now += 0.5  # from the tokens to the launch
        launch(engine, 2)()
    launch(engine, 1)()
    found = script.in_steps(engine)
    assert found["steps"] == 5
    assert found["with_new"] == 1
    assert found["full"] == 3
    assert found["read_first"] == 1
    assert found["host_to_forward"] == pytest.approx(2500)
    assert found["host_launch"] == pytest.approx(3000)


def test_steps_that_are_launched_before_the_tokens_are_read(script, engine):
    read = launch(engine, 1, new=1)
    for number in range(4):
        following = launch(engine, 2, new=number == 0)
        read()
        read = following
    found = script.in_steps(engine)
    assert found["with_new"] == 2
    assert found["full"] == 3
    assert found["read_first"] == 0
    assert "host_to_forward" not in found
    assert script.in_steps(engine)["steps"] == 0  # of the run behind it


def test_a_step_without_requests_is_none(script, engine):
    engine.model_runner.execute_model(SimpleNamespace(num_scheduled_tokens={}))
    assert script.in_steps(engine)["steps"] == 0


def test_medians_of_the_runs_of_an_engine(script):
    runs = [{"steps": 40, "read_first": None}, {"steps": 42, "read_first": 0.5}, {"steps": 47, "read_first": 1.0}]
    assert script.middle(runs) == {"steps": 42, "read_first": 0.75}
