"""The greatest load within limits of latency: a verdict, the bisection, and a search on simulated servers."""

import itertools
import random
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest
from points import point

from selfspec_cli.config.compose import compose_runs
from selfspec_cli.config.keys import Keys
from selfspec_cli.config.schema import LoadConfig, RunConfig
from selfspec_cli.load_patterns.poisson import poisson
from selfspec_cli.record import tables
from selfspec_cli.record.point import Measurement, Repeat
from selfspec_cli.record.statistics import RequestTimes, ttft
from selfspec_cli.record.tables import searched
from selfspec_cli.stages.slo import Search, Verdict, as_searches, greatest, judge, parse

SERVICE = 0.1  # seconds that the queue's server takes for a request


def answered(arrival, first, each=0.001, tokens=5):
    """A request with its first output after `first` seconds and one more token every `each` seconds."""
    return RequestTimes(arrival, tuple(arrival + first + each * place for place in range(tokens)), tokens)


def queue(rate, seed, seconds):
    """One request at a time: the first output comes when the wait and the service are over."""
    free, requests = 0.0, []
    arrivals = itertools.takewhile(lambda moment: moment < seconds, poisson(rate, seed))
    for moment in arrivals if rate * seconds > 10 else [0.0]:
        free = max(free, moment) + SERVICE
        requests.append(answered(moment, free - moment))
    return requests


def crowd(clients, seed, seconds):
    """A closed loop in which a token takes 2 ms and 0.2 ms more for each client, give or take 2 %."""
    draw = random.Random(seed)
    return [answered(0.0, 0.01, (0.002 + 0.0002 * clients) * draw.uniform(0.98, 1.02)) for _ in range(clients * 20)]


@dataclass
class Simulated:
    """In place of a `Loader`: runs of a simulated server until they are decided."""

    loads: list = field(default_factory=list)
    runs: list = field(default_factory=list)

    def __call__(self, cfg, server, progress, decided):
        load, made = cfg.load, []
        for seed in range(load.repeats):
            asked = crowd(load.clients, seed, load.seconds) if load.clients else queue(load.rate, seed, load.seconds)
            made.append(SimpleNamespace(times=lambda asked=asked: asked, failed=[]))
            if decided(made):
                break
        self.loads.append(load.clients or load.rate)
        self.runs.append(len(made))
        return Measurement(
            tuple(Repeat(load.seconds, tuple(run.times())) for run in made), engine={"failed_requests": 0}
        )


def search(limits, repeats=20, **more):
    """What `Search` finds of the simulated servers: (point of the clients, point of the rate, the simulation)."""
    simulated, server = Simulated(), SimpleNamespace(url="http://one")
    cfg = RunConfig(method="baseline", load=LoadConfig(repeats=repeats, seconds=100.0, **more))
    found = Search(simulated)
    points = []
    for one in as_searches([cfg], limits):
        measured = found(one, server, lambda *words: None)
        arm = tables.identity(one)
        points.append(replace(point(arm=arm), engine=measured.engine, repeats=measured.repeats))
    return *points, simulated


def test_a_load_is_judged_by_the_share_of_requests_and_how_sure_it_is():
    (p90,) = parse(["ttft_p90=200"])
    fast, slow = answered(0.0, 0.1), answered(0.0, 0.3)
    assert judge([p90], [fast] * 100, 0) == Verdict(True, True)
    assert judge([p90], [fast] * 10, 0) == Verdict(True, False)  # ten requests do not show 90 %
    assert judge([p90], [fast] * 92 + [slow] * 8, 0) == Verdict(True, False)
    assert judge([p90], [fast] * 88 + [slow] * 12, 0) == Verdict(False, False)
    assert judge([p90], [fast] * 70 + [slow] * 30, 0) == Verdict(False, True)
    assert judge([p90], [fast] * 70, 30) == Verdict(False, True)  # what failed is within no limit
    both = [p90, *parse(["tpot_p50=0.5"])]
    assert judge(both, [fast] * 100, 0) == Verdict(False, True)  # 1 ms a token
    assert judge(parse(["tpot_p99=1"]), [RequestTimes(0.0, (0.1,), 1)], 0) == Verdict(True, True)  # no TPOT to break


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 8, 100, 1000])
def test_a_bisection_of_whole_numbers_ends_between_two_neighbours_or_five_per_cent(limit):
    asked = []
    low, high = greatest(lambda load: asked.append(load) or load <= limit, 1.0, whole=True)
    assert low <= limit < high and (high - low == 1 or high <= 1.05 * low)
    assert len(asked) == len(set(asked)) <= 25 and all(load == int(load) for load in asked)


@pytest.mark.parametrize("limit", [0.003, 0.4, 1.0, 17.3, 900.0])
def test_a_bisection_of_rates_begins_anywhere(limit):
    low, high = greatest(lambda load: load <= limit, 1.0, whole=False)
    assert low <= limit < high <= 1.06 * low


def test_where_no_load_or_every_load_keeps_the_limits_it_is_said():
    assert greatest(lambda load: False, 1.0, whole=True) == (None, 1.0)
    low, high = greatest(lambda load: False, 1.0, whole=False)
    assert low is None and 0 < high < 0.01
    low, high = greatest(lambda load: True, 1.0, whole=True)
    assert low > 1000 and high is None


def test_the_greatest_load_of_simulated_servers_is_found():
    clients, rate, simulated = search(["ttft_p95=300", "tpot_p95=10"])
    # A token takes at most 10 ms for 95 % of requests up to (10 / 1.018 - 2) / 0.2 clients.
    assert tables.row(clients).clients in (38, 39, 40)
    assert clients.engine["slo"]["broken_at"] <= 1.05 * tables.row(clients).clients + 1
    # Of the queue a long simulation tells how many requests wait too long.
    found = tables.row(rate)
    assert found.arrivals == "poisson" and found.goodput == pytest.approx(found.rate, rel=0.1)

    def share(load):
        requests = queue(load, 99, 20_000.0)
        return sum(ttft(one) <= 0.3 for one in requests) / len(requests)

    assert share(0.93 * found.rate) >= 0.95 > share(1.07 * rate.engine["slo"]["broken_at"])
    assert max(simulated.runs) > 1 and min(simulated.runs) == 1  # a load near the limit is asked more often
    words = searched(rate, found)
    assert words.startswith(f"{found.rate:.3g} requests/s keep TTFT p95 ≤ 300 ms, TPOT p95 ≤ 10 ms, and at ")
    assert "goodput" in words and searched(point(), found) is None


def test_a_search_of_few_requests_says_that_it_is_not_sure_and_one_without_a_load_says_so():
    clients, rate, _ = search(["ttft_p99=300"], repeats=1)
    assert not rate.engine["slo"]["sure"] and "too few requests to be sure" in searched(rate, tables.row(rate))
    clients, rate, simulated = search(["ttft_p50=5"])
    row = tables.row(clients)
    assert row.clients == 1 and searched(clients, row) == (
        "no load that was tried keeps TTFT p50 ≤ 5 ms (the least: 1 client)"
    )
    assert rate.engine["slo"]["kept"] is False and min(simulated.loads) == rate.engine["rate"]


def test_goodput_counts_by_the_strictest_limit_of_each_value_unless_another_is_given():
    cfg = RunConfig(load=LoadConfig(tpot_limit=90.0))
    for one in as_searches([cfg], ["ttft_p99=400", "ttft_p50=200", "tpot_p99=70", "e2e_p99=700"]):
        assert (one.load.ttft_limit, one.load.tpot_limit) == (200.0, 90.0)


def test_a_search_is_no_point_of_one_client():
    (plain,) = compose_runs(None, ["method=baseline", "load.clients=1", "load.ttft_limit=200"])
    clients, _ = as_searches([replace(plain, load=LoadConfig())], ["ttft_p99=200"])
    assert replace(clients.load, slo=None) == plain.load and Keys().settings(clients) != Keys().settings(plain)
    assert as_searches([plain], []) == [plain]


def test_without_limits_a_load_is_measured_as_it_is():
    asked = []
    search = Search(lambda *words: asked.append(words) or "measured")
    assert search(RunConfig(load=LoadConfig(clients=3)), "server", "progress") == "measured"
    assert asked[0][0].load.clients == 3 and len(asked) == 1
