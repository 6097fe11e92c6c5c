"""Load patterns: when requests of an open loop arrive, who asks in a closed one, and what a further pattern needs."""

import statistics
from collections import Counter
from dataclasses import dataclass, make_dataclass, replace
from itertools import islice, pairwise

import pytest
from scipy.stats import kstest

from selfspec_cli import load_patterns
from selfspec_cli.config.keys import Keys
from selfspec_cli.config.schema import LoadConfig, RunConfig
from selfspec_cli.early_exit.knobs import knob
from selfspec_cli.load_patterns.base import LoadPattern
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


def test_a_run_ends_by_number_or_by_time_and_its_seed_says_when_requests_arrive():
    assert len(moments(10.0, 0, 1, 33, None)) == 33
    by_time = moments(10.0, 0, 1, None, 20.0)
    assert by_time[-1] < 20.0
    assert 140 < len(by_time) < 260
    assert by_time == moments(10.0, 0, 1, len(by_time), None) != moments(10.0, 1, 1, len(by_time), None)
    assert len(moments(0.001, 0, 4, None, 0.1)) == 4  # at least one burst


# ---- which pattern, and what its rows say ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "name", "words"),
    [
        ({"clients": 1}, "closed", "1 client"),
        ({"clients": 8}, "closed", "8 clients"),
        ({"rate": 2.5}, "poisson", "2.5 requests/s"),
        ({"share": 0.5}, "poisson", "50% of the baseline's saturation"),
        ({"share": 0.5, "clients": 4, "burst": 8}, "poisson", "50% of the baseline's saturation in bursts of 8"),
    ],
)
def test_the_settings_say_the_pattern_and_so_do_the_columns_of_its_rows(given, name, words):
    load = LoadConfig(**given)
    assert (load.kind, load.pattern.name, load_patterns.problem(load)) == (name, name, None)
    row = tables.planned(RunConfig(method="baseline", load=load), "a key")
    assert load_patterns.label(row) == words


def test_what_is_asked_is_compared_and_a_rate_is_not_where_it_follows_from_a_share():
    def asked(**given):
        return load_patterns.comparable(load_patterns.columns(LoadConfig(**given)))

    different = [
        asked(clients=8),
        asked(clients=9),
        asked(rate=2.0),
        asked(share=0.5),
        asked(rate=2.0, burst=4),
    ]
    assert len(set(different)) == len(different)
    share = load_patterns.columns(LoadConfig(share=0.5))
    assert load_patterns.comparable(share | {"rate": 3.1}) == load_patterns.comparable(share | {"rate": 3.2})


@dataclass
class RampSettings:
    """How long it takes."""

    ramp: float | None = knob(None, help="seconds until all clients ask", unit="s", above=0, unset="at once")


class Ramp(LoadPattern):
    """A pattern that a package may add: no list and no column knows it."""

    name, help, settings, rank = "ramp", "clients begin one after the other", RampSettings, 1

    def asked(self, load):
        return load.ramp is not None

    def arrivals(self, load, seed, requests, seconds):
        return [load.ramp * n / load.clients for n in range(load.clients)]


def test_a_further_pattern_needs_no_column_of_its_own(monkeypatch):
    monkeypatch.setattr(load_patterns.PATTERNS, "_loaded", ({**load_patterns.PATTERNS, "ramp": Ramp()}, {}))
    ramped = make_dataclass("Ramped", [], bases=(LoadConfig, RampSettings))
    monkeypatch.setattr(LoadConfig, "ramp", None, raising=False)  # as where the package is installed
    slow, quick, all_at_once = (ramped(clients=4, **more) for more in ({"ramp": 8.0}, {"ramp": 2.0}, {}))
    assert (slow.kind, all_at_once.kind) == ("ramp", "closed")
    columns = load_patterns.columns(slow)
    assert (columns["arrivals"], columns["clients"]) == ("ramp (ramp=8)", 4)
    row = replace(tables.planned(RunConfig(method="baseline", load=LoadConfig(clients=4)), "a key"), **columns)
    assert load_patterns.label(row) == "ramp (ramp=8)"
    keys = [Keys().settings(replace(RunConfig(method="baseline"), load=load)) for load in (slow, quick, all_at_once)]
    assert len(set(keys)) == 3
    assert keys[2] == Keys().settings(RunConfig(method="baseline", load=LoadConfig(clients=4)))
    assert slow.pattern.arrivals(slow, 0, None, 9.0) == [0.0, 2.0, 4.0, 6.0]
    both = ramped(ramp=2.0, rate=2.0)
    assert "ask for the patterns poisson and ramp: give those of one" in load_patterns.problem(both)
