"""Load tests without a server: when requests arrive, what the command line says, and the greatest load within limits of
latency: a verdict, the bisection, and a search on simulated servers."""

import itertools
import json
import random
import statistics
from collections import Counter
from dataclasses import asdict, dataclass, field, make_dataclass, replace
from itertools import islice, pairwise
from types import SimpleNamespace

import numpy
import pytest
from commands import call, jsonl, refused
from points import point
from scipy.stats import kstest

from selfspec_cli import load_patterns
from selfspec_cli.config.compose import compose_runs
from selfspec_cli.config.keys import Keys
from selfspec_cli.config.schema import ConfigError, LoadConfig, RunConfig
from selfspec_cli.early_exit.knobs import knob
from selfspec_cli.load_patterns.base import LoadPattern
from selfspec_cli.load_patterns.poisson import moments, poisson
from selfspec_cli.load_patterns.trace import Request, asked_requests, is_trace
from selfspec_cli.record import tables
from selfspec_cli.record.point import Measurement, Repeat
from selfspec_cli.record.statistics import RequestTimes, ttft
from selfspec_cli.record.tables import asked as in_words
from selfspec_cli.record.tables import searched
from selfspec_cli.stages import load as stage
from selfspec_cli.stages import preflight
from selfspec_cli.stages.load import Search, Verdict, as_searches, greatest, judge, of_requests, parse


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


# ---- traces ----------------------------------------------------------------------------------------------------------


MOONCAKE = [
    {"timestamp": 27000, "input_length": 700, "output_length": 4, "hash_ids": [0, 1]},
    {"timestamp": 27000, "input_length": 1100, "output_length": 900, "hash_ids": [0, 2, 3]},
    {"timestamp": 27100, "input_length": 20, "output_length": 6, "hash_ids": [4]},
    {"timestamp": 57000, "input_length": 20, "output_length": 2, "hash_ids": [5]},
]
BURSTGPT = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
5.5,,1,ChatGPT,472,18,490,API log
7.0,a,2,GPT-4,30,0,30,Conversation log
9.5,a,2,GPT-4,1087,230,1317,Conversation log
"""


@pytest.fixture
def mooncake(tmp_path):
    return jsonl(tmp_path / "conversation_trace.jsonl", MOONCAKE)


def times(load):
    return [round(request.at, 6) for request in asked_requests(load)]


def test_both_forms_are_read_and_failed_requests_are_left_out(mooncake, tmp_path):
    first, second, *_ = asked_requests(LoadConfig(trace=mooncake))
    assert (first, second) == (Request(0.0, 700, 4, (0, 1)), Request(0.0, 1100, 900, (0, 2, 3)))
    file = tmp_path / "BurstGPT_3.csv"
    file.write_text(BURSTGPT)
    assert is_trace(str(file)) and is_trace(mooncake)
    assert asked_requests(LoadConfig(trace=str(file))) == [Request(0.0, 472, 18), Request(4.0, 1087, 230)]


def test_a_run_is_limited_by_number_or_time_and_a_rate_keeps_the_proportions(mooncake):
    assert times(LoadConfig(trace=mooncake)) == [0, 0, 0.1]  # of 30 s
    assert times(LoadConfig(trace=mooncake, seconds=31.0)) == [0, 0, 0.1, 30.0]
    assert times(LoadConfig(trace=mooncake, requests=3)) == [0, 0, 0.1]
    assert times(LoadConfig(trace=mooncake, requests=4, rate=0.2)) == [0, 0, 0.05, 15.0]
    assert times(LoadConfig(trace=mooncake, seconds=1.5, rate=2.0)) == [0, 0, 1.0]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([MOONCAKE[2], MOONCAKE[0]], "row 2 is earlier than the one before it"),
        ([MOONCAKE[0] | {"output_length": 0}], "no request of this trace has a prompt and an answer"),
        ([MOONCAKE[0] | {"input_length": "many"}], "cannot be read as timestamp, input_length and output_length"),
    ],
)
def test_a_trace_that_cannot_be_replayed_is_named(tmp_path, rows, said):
    with pytest.raises(ConfigError, match=said):
        asked_requests(LoadConfig(trace=jsonl(tmp_path / "t.jsonl", rows)))


def test_other_files_are_no_traces(tmp_path):
    for name, text in (
        ("a.jsonl", '{"prompt": "a"}'),
        ("b.csv", "a,b\n1,2\n"),
        ("c.jsonl", "no json"),
        ("d.jsonl", ""),
    ):
        (tmp_path / name).write_text(text)
        assert not is_trace(str(tmp_path / name))
    assert not is_trace("heldout") and not is_trace(str(tmp_path / "nowhere.jsonl"))


def test_equal_ids_are_equal_blocks_and_lengths_are_the_traces():
    asked = [Request(0, 1300, 1, (7, 8, 9)), Request(0, 700, 1, (7, 3)), Request(0, 600, 1), Request(0, 600, 1)]
    first, second, third, fourth = of_requests(asked, lambda text: [*map(ord, text)], seed=0, most=1200)
    assert [len(one) for one in (first, second, third, fourth)] == [1200, 700, 600, 600]
    assert first[:512] == second[:512] and first[512:700] != second[512:700]
    assert len({tuple(one[:512]) for one in (first, third, fourth)}) == 3
    assert of_requests(asked, lambda text: [*map(ord, text)], seed=0, most=1200)[0] == first


def load_of(*words):
    (cfg,) = compose_runs(None, ["workload=trace", "method=baseline", *words])
    return stage.asked(cfg)


def test_a_trace_is_a_load_of_its_own_name_and_key(mooncake):
    plain, fast = load_of(f"workload.path={mooncake}"), load_of(f"workload.path={mooncake}", "load.rate=2")
    closed = load_of(f"workload.path={mooncake}", "load.clients=2")
    assert (plain.load.kind, fast.load.kind, closed.load.kind) == ("trace", "trace", "closed")
    assert in_words(tables.planned(plain, "key")) == "trace conversation_trace.jsonl"
    assert in_words(tables.planned(fast, "key")) == "trace conversation_trace.jsonl (2 requests/s)"
    assert len({Keys().settings(cfg) for cfg in (plain, fast, closed)}) == 3
    preflight.check_prompts(plain)
    with pytest.raises(ConfigError, match="this is a trace of requests; replay it with selfspec load"):
        preflight.check_prompts(compose_runs(None, ["workload=trace", f"workload.path={mooncake}"])[0])


def test_prompts_are_token_ids_that_fit_the_model(mooncake, monkeypatch):
    tokens = SimpleNamespace(max_model_len=1000, encode=lambda text: [*map(ord, text)])
    monkeypatch.setattr(stage, "ModelTokens", lambda cfg: tokens)
    words = [f"workload.path={mooncake}", "workload.output_len=100"]
    found = stage.of_model(load_of(*words, "workload.input_len=900"))
    assert [(len(body["prompt"]), body["max_tokens"]) for body in found.bodies] == [(700, 4), (900, 100), (20, 6)]
    assert found.cut == 1
    with pytest.raises(ConfigError, match="together they must fit the model's 1000 tokens"):
        stage.of_model(load_of(*words, "workload.input_len=901"))


@pytest.mark.parametrize("word", ["load.share=0.5", "load.burst=8"])
def test_settings_that_contradict_a_trace_are_named(mooncake, tmp_path, word):
    words = ["workload=trace", f"workload.path={mooncake}", word, f"results_dir={tmp_path}/r"]
    assert f"{word} with the trace" in refused("load", *words, *(["load.rate=2"] if "burst" in word else []))


# ---- the command line ------------------------------------------------------------------------------------------------


def test_nothing_said_is_a_closed_loop_of_eight(tmp_path):
    result = call("load", f"results_dir={tmp_path}/r", "--dry-run")
    assert "8 clients" in result.stdout


# ---- the greatest load within limits of latency ----------------------------------------------------------------------


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


def search(limits, repeats=20, seconds=100.0):
    """What `Search` finds of the simulated servers: (point of the clients, point of the rate, the simulation)."""
    simulated, server = Simulated(), SimpleNamespace(url="http://one")
    cfg = RunConfig(method="baseline", load=LoadConfig(repeats=repeats, seconds=seconds))
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


def test_a_verdict_can_be_written_where_scipy_returns_values_of_numpys(monkeypatch):
    interval = SimpleNamespace(low=numpy.float64(0.95), high=numpy.float64(1.0))
    monkeypatch.setattr("scipy.stats.binomtest", lambda *_: SimpleNamespace(proportion_ci=lambda _: interval))
    verdict = judge(parse(["ttft_p90=200"]), [answered(0.0, 0.1)], 0)
    assert verdict.sure and json.loads(json.dumps(asdict(verdict))) == {"kept": True, "sure": True}


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 8, 100, 1000])
def test_a_bisection_ends_between_two_neighbours_or_five_per_cent(limit):
    asked = []
    low, high = greatest(lambda load: asked.append(load) or load <= limit, 8.0, whole=True)
    assert low <= limit < high and (high - low == 1 or high <= 1.05 * low)
    assert len(asked) == len(set(asked)) <= 25 and all(load == int(load) for load in asked)
    low, high = greatest(lambda load: load <= limit / 300, 1.0, whole=False)  # a rate begins anywhere
    assert low <= limit / 300 < high <= 1.06 * low


def test_where_no_load_or_every_load_keeps_the_limits_it_is_said():
    assert greatest(lambda load: False, 1.0, whole=True) == (None, 1.0)
    low, high = greatest(lambda load: False, 1.0, whole=False)
    assert low is None and 0 < high < 0.01
    low, high = greatest(lambda load: True, 8.0, whole=True)
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
    clients, rate, _ = search(["ttft_p99=300", "tpot_p95=10"], repeats=1, seconds=20.0)
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


def test_two_slos_are_two_searches_and_no_load_is_asked_twice_of_a_server_without_need():
    strict = search(["ttft_p95=300", "tpot_p95=6"])
    loose = search(["ttft_p95=300", "tpot_p95=10"])
    *points, simulated = search(["ttft_p95=300", "tpot_p95=6,10"])
    assert [one.engine["slo"]["limits"][1] for one in points] == [f"TPOT p95 ≤ {ms} ms" for ms in (6, 6, 10, 10)]
    found = [tables.row(one).clients for one in points[::2]]
    assert found == [tables.row(one[0]).clients for one in (strict, loose)] and found[0] < found[1]
    assert len(simulated.loads) < len(strict[-1].loads) + len(loose[-1].loads) - 8
    again = [load for load in set(simulated.loads) if simulated.loads.count(load) > 1]
    assert all(simulated.runs[simulated.loads.index(load)] < 20 for load in again)  # it had not been asked to the end


def test_another_server_or_another_workload_is_asked_for_itself():
    simulated, limits = Simulated(), ["ttft_p95=300"]
    found = Search(simulated)
    cfg = RunConfig(method="baseline", load=LoadConfig(repeats=1, seconds=100.0))
    longer = replace(cfg, workload=replace(cfg.workload, output_len=cfg.workload.output_len + 1))
    one, other = SimpleNamespace(url="http://one"), SimpleNamespace(url="http://one")
    asked = []
    for server, of in ((one, cfg), (one, longer), (other, cfg), (other, cfg)):
        found(as_searches([of], limits)[0], server, lambda *words: None)
        asked.append(len(simulated.loads))
    assert asked[2] == 3 * asked[0] and asked[3] == asked[2]


def test_limits_of_unlike_numbers_of_values_are_refused():
    with pytest.raises(ConfigError, match="--slo ttft_p99=1,2: 2 values; another limit has 3"):
        as_searches([RunConfig()], ["ttft_p99=1,2", "tpot_p99=1,2,3"])
    with pytest.raises(ConfigError, match="--slo ttft_p99=: the limit is a number"):
        as_searches([RunConfig()], ["ttft_p99=1,", "tpot_p99=1,2"])


def test_a_search_is_no_point_of_one_client():
    (plain,) = compose_runs(None, ["method=baseline", "load.clients=1", "load.ttft_limit=200"])
    clients, _ = as_searches([replace(plain, load=LoadConfig())], ["ttft_p99=200"])
    assert replace(clients.load, slo=None, clients=1) == plain.load
    assert Keys().settings(replace(clients, load=replace(clients.load, clients=1))) != Keys().settings(plain)
    assert as_searches([plain], []) == [plain]
