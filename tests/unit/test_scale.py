"""The simulation of a fleet: exact where the answer is known, and near what was measured."""

from pathlib import Path

import pytest
from scripts import importable

SCALE = Path(__file__).parents[2] / "experiments" / "scale"


@pytest.fixture(scope="module")
def fleet():
    with importable(SCALE) as module:
        yield module("fleet")


def flat(fleet, first=100.0, token=1.0, stall=0.0):
    """A server as fast under any load."""
    return fleet.Server("flat", ((1.0, first, token), (1000.0, first, token)), stall)


def test_a_request_alone_takes_its_first_token_and_the_others(fleet):
    (one,) = fleet.simulate([flat(fleet)], [5.0], fleet.round_robin())
    assert one.first == pytest.approx(0.1)
    assert one.ended == pytest.approx(0.1 + 0.127)
    assert one.token == pytest.approx(0.001)


def test_two_requests_share_a_server_whose_tokens_take_twice_as_long(fleet):
    server = fleet.Server("shared", ((1.0, 1e-6, 1.0), (2.0, 1e-6, 2.0)))
    first, second = fleet.simulate([server], [0.0, 0.0635], fleet.round_robin())
    assert first.ended == pytest.approx(0.0635 + 0.127, rel=1e-3)  # half alone, half shared
    assert second.ended == pytest.approx(0.127 + 0.0635, rel=1e-3)


def test_a_step_with_a_prefill_holds_up_those_that_run_once(fleet):
    alone = fleet.simulate([flat(fleet)], [0.0], fleet.round_robin())[0].ended
    held = fleet.simulate([flat(fleet, stall=10.0)], [0.0, 0.15, 0.1505], fleet.round_robin())
    assert held[0].ended == pytest.approx(alone + 0.01, abs=1e-4)  # the last two share a step


def test_curves_are_interpolated_and_grow_in_proportion_beyond_the_last_level(fleet):
    server = fleet.Server("curve", ((1.0, 10.0, 1.0), (100.0, 40.0, 4.0)))
    assert server.token(10) == pytest.approx(0.002)
    assert server.token(200) == pytest.approx(0.008)
    assert server.first(9) == pytest.approx(0.020)


def test_least_time_prefers_the_faster_server_until_it_is_loaded(fleet):
    slow, fast = flat(fleet, token=2.0), fleet.Server("fast", ((1.0, 100.0, 1.0), (4.0, 100.0, 4.0)))
    slow_one, fast_one = fleet.Replica(slow), fleet.Replica(fast)
    choose = fleet.least_time()
    assert choose([slow_one, fast_one], None) == 1
    for request in range(3):
        fast_one.begin(request)
    assert choose([slow_one, fast_one], None) == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [(["--token", "0.5"], "--token 0.5: no number of servers"), (["--peak", "0"], "--peak 0: allowed")],
)
def test_limits_that_no_fleet_keeps_are_bad_input(fleet, monkeypatch, capsys, words, said):
    monkeypatch.setattr("sys.argv", ["fleet.py", "day", *words])
    monkeypatch.setattr(fleet, "keeps", lambda servers, *_: pytest.fail(f"{len(servers)} servers were tried"))
    with pytest.raises(SystemExit) as ended:
        fleet.main()
    assert ended.value.code == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_the_rate_of_a_day_is_greatest_in_the_afternoon(fleet):
    rates = [fleet.day_rate(hour, 400.0) for hour in range(24)]
    assert max(rates) == pytest.approx(400.0) == rates[16]
    assert min(rates) == pytest.approx(100.0) == rates[4]
    arrivals = fleet.poisson(lambda time: 50.0, 100.0, 200.0, 1)
    assert len(arrivals) == pytest.approx(10000, rel=0.05)


def test_a_run_without_the_curves_is_named_with_those_that_have_them(fleet, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["fleet.py", "check", "--run", "serving/load_h200_rust_lon.json"])
    with pytest.raises(SystemExit) as ended:
        fleet.main()
    assert ended.value.code == 2
    assert f"did you mean '{fleet.RUN}'?" in capsys.readouterr().err


@pytest.mark.slow
def test_open_loops_that_were_not_fitted_are_within_ten_per_cent(fleet):
    with importable(SCALE.parents[1] / "docs" / "generate") as module:
        rows = fleet.check(module("figure_cells").data_of(fleet.RUN))
    predicted = [row for row in rows if not row["fitted"]]
    assert len(predicted) == 4
    assert all(abs(row["difference"]) <= fleet.TOLERANCE for row in predicted), predicted
