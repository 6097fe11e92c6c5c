"""What a load test's columns and figures are made of: goodput, categories, and rows of its points."""

import json
from dataclasses import replace

import pytest
from points import ARM, BASELINE, against, point

from selfspec_cli.config.compose import compose_runs
from selfspec_cli.config.keys import Keys
from selfspec_cli.record import tables
from selfspec_cli.record.latency import Limits, RequestTimes, goodput
from selfspec_cli.record.point import Measurement, Repeat, from_json, to_json
from selfspec_cli.report import figures, sources
from selfspec_cli.report.rows import group_title

CLOSED = {"batch": None, "arrivals": "closed", "clients": 8, "rate": None, "load_share": None, "burst": None}


def request(sent, first, last, tokens=5, outputs=3):
    """A request with its first output after `first` seconds and its last after `last`."""
    between = [first + (last - first) * part / (outputs - 1) for part in range(outputs)]
    return RequestTimes(sent, tuple(sent + moment for moment in between), tokens)


def test_goodput_counts_requests_within_every_limit_and_no_others():
    # TTFT 100, 300, 100 ms; TPOT 100, 100, 300 ms; end to end 500, 700, 1300 ms
    some = [request(0, 0.1, 0.5), request(0, 0.3, 0.7), request(0, 0.1, 1.3)]
    assert goodput(some, 2.0, Limits(ttft=200)) == 1.0
    assert goodput(some, 2.0, Limits(tpot=200)) == 1.0
    assert goodput(some, 2.0, Limits(ttft=200, tpot=200)) == 0.5
    assert goodput(some, 2.0, Limits(ttft=1000, tpot=1000)) == 1.5
    assert goodput([RequestTimes(0, (0.1,), 1)], 1.0, Limits(tpot=0.001)) == 1.0  # one token has no TPOT


def load_point(tok_s, *, arm=None, key="1", base=None, clients=8, engine=None, number=0):
    """A point of a load test with three runs of four requests; base: what it is compared with."""
    repeats = []
    for factor in (1.0, 1.1, 0.9):
        seconds = 20 / (tok_s * factor)
        requests = tuple(request(seconds * part / 4, seconds / 10, seconds / 4) for part in range(4))
        repeats.append(Repeat(seconds, requests))
    columns = (arm or BASELINE) | CLOSED | {"clients": clients, "tpot_limit_ms": 40.0}
    facts = {"failed_requests": 2, "rss_mib": 900.0} | (engine or {})
    found = Measurement(tuple(repeats), ("a", "b"), facts, seconds=3.0)
    return (
        point(key, columns, found, number=number)
        if base is None
        else replace(against(base, key, arm=columns), repeats=found.repeats, engine=facts, number=number)
    )


def test_a_row_of_a_load_test_says_what_was_asked_and_what_was_found():
    made = tables.row(load_point(100.0))
    assert (made.arrivals, made.clients, made.batch) == ("closed", 8, None)
    assert made.failed_requests == 2
    assert made.req_s == pytest.approx(20.0)
    assert made.goodput == pytest.approx(20.0)  # of 12 requests all have a TPOT below 40 ms
    assert group_title(made).startswith("m, headline: 32 tokens in, 4 out, 8 clients")
    assert tables.row(from_json(to_json(load_point(100.0)))).clients == 8


def test_rows_of_other_commands_have_no_columns_of_a_load_test():
    made = tables.row(point())
    assert (made.arrivals, made.req_s, made.goodput) == (None,) * 3


def test_a_config_is_a_load_test_only_where_something_says_how_much_to_ask():
    plain, timed, closed, rate = compose_runs(None, ["method=baseline", "workload.num_prompts=8"]) + [
        compose_runs(None, ["method=baseline", "workload.num_prompts=8", *words])[0]
        for words in (["load.seconds=5"], ["load.clients=4"], ["load.rate=2", "load.burst=8"])
    ]
    assert [cfg.load.kind for cfg in (plain, timed, closed, rate)] == ["", "", "closed", "poisson"]
    # A setting that a bench does not look at changes no key, so what was measured before is found again.
    assert Keys().settings(plain) == Keys().settings(timed)
    assert len({Keys().settings(cfg) for cfg in (plain, closed, rate)}) == 3
    columns = tables.identity(rate)
    assert (columns["arrivals"], columns["rate"], columns["burst"], columns["batch"]) == ("bursty", 2.0, 8, None)


@pytest.mark.slow
def test_figures_of_load_by_clients_and_by_category():
    of = {"code": {"requests": 5, "tpot_ms": 10.0}, "chat": {"requests": 5, "tpot_ms": 8.0}}
    faster = {"code": {"requests": 5, "tpot_ms": 5.0}, "chat": {"requests": 5, "tpot_ms": 8.0}}
    few = load_point(100.0, key="a", engine={"categories": of})
    many = load_point(300.0, key="b", clients=32, number=1)
    arm = load_point(150.0, arm=ARM, key="c", base=few, engine={"categories": faster})
    made = {one.name: one for one in figures.of_sources(sources.of_points([few, many, arm]))}
    (by_category,) = made["categories"].panels
    assert {one["category"]: one["speedup"] for one in by_category.data} == {"code": 2.0, "chat": 1.0}
    json.dumps(made["categories"].spec())
