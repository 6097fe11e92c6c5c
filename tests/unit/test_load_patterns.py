"""Load patterns: when requests of an open loop arrive, who asks in a closed one, and what a further pattern needs."""

import ast
import statistics
from collections import Counter
from dataclasses import dataclass, make_dataclass, replace
from itertools import islice, pairwise
from pathlib import Path

import pytest
from scipy.stats import kstest

from selfspec_cli import load_patterns
from selfspec_cli.config.keys import Keys
from selfspec_cli.config.schema import LoadConfig, RunConfig
from selfspec_cli.early_exit.knobs import knob
from selfspec_cli.engine import clients
from selfspec_cli.load_patterns.base import LoadPattern, Schedule
from selfspec_cli.load_patterns.poisson import moments, poisson
from selfspec_cli.record import tables


def test_gaps_of_a_poisson_process_are_exponential_with_its_rate():
    moments = list(islice(poisson(4.0, seed=1), 4000))
    gaps = [later - earlier for earlier, later in pairwise(moments)]
    assert statistics.mean(gaps) == pytest.approx(0.25, rel=0.05)
    assert kstest(gaps, "expon", args=(0, 0.25)).pvalue > 0.01
    assert kstest(gaps, "uniform", args=(0, 0.5)).pvalue < 1e-6  # the test can tell


@pytest.mark.parametrize("burst", [1, 8, 64])
def test_bursts_keep_the_mean_rate(burst):
    count = 400 * burst
    moments = list(islice(poisson(5.0, seed=3, burst=burst), count))
    assert set(Counter(moments).values()) == {burst}
    assert count / moments[-1] == pytest.approx(5.0, rel=0.15)
    assert moments == sorted(moments)


def test_the_same_seed_has_the_same_arrivals_and_another_one_has_others():
    assert moments(3.0, 7, requests=50) == moments(3.0, 7, requests=50)
    assert moments(3.0, 7, requests=50) != moments(3.0, 8, requests=50)


def test_a_schedule_ends_by_number_or_by_time():
    assert len(moments(10.0, 0, requests=33)) == 33
    by_time = moments(10.0, 0, seconds=20.0)
    assert by_time[-1] < 20.0
    assert 140 < len(by_time) < 260
    assert by_time == moments(10.0, 0, requests=len(by_time))


def test_a_short_run_has_at_least_one_burst():
    assert len(moments(0.001, 0, seconds=0.1, burst=4)) == 4


# ---- which pattern, and what its rows say ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "name", "words"),
    [
        ({"clients": 1}, "closed", "1 client"),
        ({"clients": 8, "low_clients": 2, "period": 4.0}, "closed", "8 and 2 clients, alternating every 2 s"),
        ({"rate": 2.5}, "poisson", "2.5 requests/s"),
        ({"share": 0.5, "clients": 4, "burst": 8}, "poisson", "50% of the baseline's saturation in bursts of 8"),
    ],
)
def test_the_settings_say_the_pattern_and_so_do_the_columns_of_its_rows(given, name, words):
    load = LoadConfig(**given)
    assert (load.kind, load.pattern.name, load_patterns.problem(load)) == (name, name, None)
    row = tables.planned(RunConfig(method="baseline", load=load), "a key")
    found = load_patterns.pattern_of(row)
    assert found is not None and found.name == name
    assert load_patterns.label(row) == words


def test_what_is_asked_is_compared_and_a_rate_is_not_where_it_follows_from_a_share():
    def asked(**given):
        return load_patterns.comparable(load_patterns.columns(LoadConfig(**given)) | {"frontend": None})

    different = [
        asked(clients=8),
        asked(clients=9),
        asked(clients=8, low_clients=2),
        asked(rate=2.0),
        asked(share=0.5),
        asked(clients=8, low_clients=2, period=4.0),
        asked(rate=2.0, burst=4),
    ]
    assert len(set(different)) == len(different)
    share = load_patterns.columns(LoadConfig(share=0.5)) | {"frontend": None}
    assert load_patterns.comparable(share | {"rate": 3.1}) == load_patterns.comparable(share | {"rate": 3.2})


@pytest.mark.parametrize(
    ("given", "schedule"),
    [
        ({"clients": 8}, Schedule(8)),
        ({"clients": 8, "low_clients": 2, "period": 4.0}, Schedule(8, ((0.0, 8), (2.0, 2)), 4.0)),
    ],
)
def test_who_asks_in_a_closed_loop(given, schedule):
    load = LoadConfig(**given)
    assert load.pattern.schedule(load, 1, None, 10.0) == schedule


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"clients": 2, "arrivals": (1.0,)},
        {"clients": 4, "levels": ((1.0, 4),)},
        {"clients": 4, "levels": ((0, 1), (1, 2)), "period": 2.0},
    ],
)
def test_a_schedule_that_cannot_be_kept_is_refused(given):
    with pytest.raises(ValueError, match=r"schedule|for ever"):
        Schedule(**given)


@pytest.mark.parametrize(
    ("gone", "client", "wait"),
    [(0.0, 7, 0.0), (1.9, 7, 0.0), (2.0, 1, 0.0), (2.0, 2, 2.0), (3.5, 7, 0.5), (4.0, 7, 0.0), (7.0, 2, 1.0)],
)
def test_a_client_waits_until_it_is_among_those_that_may_ask(gone, client, wait):
    assert pause(((0.0, 8), (2.0, 2)), 4.0)(client, gone) == pytest.approx(wait)


def test_levels_that_do_not_begin_again_last():
    wait = pause(((0.0, 1), (1.0, 3), (5.0, 4)), None)
    assert [wait(client, 0.25) for client in range(4)] == [0.0, 0.75, 0.75, 4.75]
    assert [wait(client, 9.0) for client in range(4)] == [0.0] * 4
    assert pause((), None)(5, 1.0) == 0.0


def pause(levels, period):
    """`_pause` of the clients' file, which can be imported in a process of its own only."""
    source = Path(clients.__file__).with_name("locustfile.py").read_text(encoding="utf-8")
    tree = ast.parse(source)
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "_pause"]
    names = {"JOB": {"levels": levels, "period": period}}
    exec(compile(tree, "locustfile.py", "exec"), names)
    return names["_pause"]


@dataclass
class RampSettings:
    """How long it takes."""

    ramp: float | None = knob(None, help="seconds until all clients ask", unit="s", above=0, unset="at once")


class Ramp(LoadPattern):
    """A pattern that a package may add: no list and no column knows it."""

    name, help, settings, rank = "ramp", "clients begin one after the other", RampSettings, 1

    def asked(self, load):
        return load.ramp is not None

    def schedule(self, load, seed, requests, seconds):
        return Schedule(load.clients, tuple((load.ramp * n / load.clients, n + 1) for n in range(load.clients)))


def test_a_further_pattern_needs_no_column_of_its_own(monkeypatch):
    monkeypatch.setattr(load_patterns.PATTERNS, "_loaded", ({**load_patterns.PATTERNS, "ramp": Ramp()}, {}))
    ramped = make_dataclass("Ramped", [], bases=(LoadConfig, RampSettings))
    monkeypatch.setattr(LoadConfig, "ramp", None, raising=False)  # as where the package is installed
    slow, quick, all_at_once = (ramped(clients=4, **more) for more in ({"ramp": 8.0}, {"ramp": 2.0}, {}))
    assert (slow.kind, all_at_once.kind) == ("ramp", "closed")
    columns = load_patterns.columns(slow)
    assert (columns["arrivals"], columns["clients"]) == ("ramp (ramp=8)", 4)
    row = replace(tables.planned(RunConfig(method="baseline", load=LoadConfig(clients=4)), "a key"), **columns)
    assert load_patterns.pattern_of(row).name == "ramp" and load_patterns.label(row) == "ramp (ramp=8)"
    keys = [Keys().settings(replace(RunConfig(method="baseline"), load=load)) for load in (slow, quick, all_at_once)]
    assert len(set(keys)) == 3
    assert keys[2] == Keys().settings(RunConfig(method="baseline", load=LoadConfig(clients=4)))
    assert slow.pattern.schedule(slow, 0, None, 9.0).levels == ((0.0, 1), (2.0, 2), (4.0, 3), (6.0, 4))
    both = ramped(ramp=2.0, rate=2.0)
    assert "ask for the patterns poisson and ramp: give those of one" in load_patterns.problem(both)
