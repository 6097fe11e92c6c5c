"""experiments/serving/load_on_gpu.py: what both sides are compared by, and where their servers run."""

from pathlib import Path

import pytest
from points import measured, point
from scripts import importable

from selfspec_cli.config.schema import LoadConfig
from selfspec_cli.record.latency import RequestTimes
from selfspec_cli.record.point import Measurement, Repeat

FOLDER = Path(__file__).parents[2] / "experiments" / "serving"


@pytest.fixture(scope="module")
def script():
    with importable(FOLDER) as module:
        yield module("load_on_gpu")


def answers(arrivals, seconds, tokens=100):
    """A point of which each request takes so many seconds; its tokens come one by one."""
    times = tuple(
        RequestTimes(sent, tuple(sent + seconds * (number + 1) / tokens for number in range(tokens)), tokens)
        for sent in arrivals
    )
    return point(measurement=Measurement((Repeat(max(one.events[-1] for one in times), times),)))


BURSTS = [0.0] * 8 + [5.0] * 8  # of ten seconds


def test_in_an_open_loop_the_side_that_is_done_sooner_is_the_faster_one(script):
    load = LoadConfig(rate=1.6, burst=8, seconds=10.0, repeats=1)
    fast, slow = answers(BURSTS, 1.0), answers(BURSTS, 4.0)
    assert script.steady(fast, 10.0) < script.steady(slow, 10.0)  # what is right for closed loops is wrong here
    rows = {"bursts": {script.PLAIN: script.figures(slow, load), script.DRAFTING: script.figures(fast, load)}}
    assert rows["bursts"][script.DRAFTING]["tok_s"] == pytest.approx(1600 / 6)
    assert rows["bursts"][script.PLAIN]["tok_s"] == pytest.approx(1600 / 9)
    level = script.Level("bursts", "bursts", load, 0.98)
    assert script.compared(level, rows)["throughput"] == pytest.approx(1.5)


def test_a_closed_loop_is_compared_by_what_came_while_all_clients_asked(script):
    load = LoadConfig(clients=1, seconds=10.0, repeats=1)
    asked = answers([0.0, 4.0, 8.0], 4.0)  # the last one ends two seconds after the time
    found = script.figures(asked, load)
    assert found["tok_s"] == pytest.approx(25.0, rel=0.01) and found["tok_s"] == script.steady(asked, 10.0)
    assert found["tok_s_median"] == pytest.approx(25.0)
    assert script.figures(point(measurement=measured(100.0)), load)["tok_s"] == 0.0  # all of it in the first tenth


def test_requests_that_began_with_all_others_are_told_from_those_that_came_one_by_one(script):
    load = LoadConfig(clients=2, seconds=10.0, repeats=1)
    rows = {}
    for side, later in (
        (script.PLAIN, 0.5),
        (script.DRAFTING, 0.25),
    ):  # of a second a request, 2 s for those that begin
        slow, quick = answers([0.0, 0.0], 2.0), answers([2.0, 4.0, 6.0], later)
        times = slow.repeats[0].requests + quick.repeats[0].requests
        rows[side] = script.figures(point(measurement=Measurement((Repeat(10.0, times),))), load)
        assert rows[side]["settled"]["requests"] == 3
        assert rows[side]["settled"]["ttft_p99_ms"] == pytest.approx(10 * later)  # a hundredth of a request
        assert rows[side]["ttft_p99_ms"] > 15
    found = script.compared(script.Level("closed", "closed 2", load, 1.0), {"closed 2": rows})
    assert found["settled_ttft_p99"] == found["settled_tpot_p99"] == pytest.approx(0.5)
    assert found["ttft_p99"] == pytest.approx(1.0, abs=0.01)


def test_loops_of_few_clients_last_longer(script, tmp_path):
    words = ["--out", str(tmp_path / "load.json"), "--clients", "8,32", "--seconds", "10", "--few-seconds", "30"]
    closed = [level.load for level in script.levels(script.arguments(words)) if level.group == "closed"]
    assert [(load.clients, load.seconds) for load in closed] == [(8, 30.0), (32, 10.0)]


def test_what_is_wanted_of_closed_loops_is_the_widened_models_unless_it_is_said(script, tmp_path):
    words = ["--out", str(tmp_path / "load.json"), "--clients", "8,48", "--groups", "closed"]
    assert [level.wanted for level in script.levels(script.arguments(words)) if level.group == "closed"] == [1.8, 0.98]
    said = script.arguments([*words, "--wanted", "0.97"])
    assert [level.wanted for level in script.levels(said) if level.group == "closed"] == [0.97, 0.97]
    said = script.arguments([*words, "--wanted", "1.7,1.4"])
    assert [level.wanted for level in script.levels(said) if level.group == "closed"] == [1.7, 1.4]


@pytest.mark.parametrize(
    ("words", "plain", "drafting"),
    [([], None, None), (["--gpus", "2"], "0", "1"), (["--gpus", "2", "--swap"], "1", "0")],
)
def test_each_server_has_its_gpu_and_says_where_its_start_spends_its_time(script, tmp_path, words, plain, drafting):
    given = script.arguments(["--out", str(tmp_path / "load.json"), *words])
    for name, card in ((script.PLAIN, plain), (script.DRAFTING, drafting)):
        found = script.environment(given, name, tmp_path)
        assert found.get("CUDA_VISIBLE_DEVICES") == card
        assert found["VLLM_LOGGING_LEVEL"] == "INFO"
        assert ("VLLM_PLUGINS" in found) == (name == script.PLAIN)


@pytest.mark.parametrize(("words", "frontend"), [([], "python"), (["--rust-frontend"], "rust")])
def test_all_servers_are_behind_one_front_end_and_rows_say_which(script, tmp_path, words, frontend):
    given = script.arguments(["--out", str(tmp_path / "load.json"), "--table", "1:4", *words])
    cfg = script.config(given, "1:4")
    assert cfg.load.frontend == frontend
    session = script.Session(given, cfg, {}, {"rows": {"closed 256": {script.PLAIN: {"req_s": 100.0}}}}, 0.0, None)
    loads = [session.load_of(level) for level in script.levels(given)]
    assert {load.frontend for load in loads} == {frontend}
    assert {load.rate for load in loads} == {None, 30.0, 60.0, 90.0}


def test_the_table_that_is_made_leaves_out_what_makes_the_slowest_requests_slower(script, tmp_path):
    given = script.arguments(["--out", str(tmp_path / "load.json"), "--lengths-at", "32,256"])
    found = {32: {0: (100, 4.0), 1: (150, 3.0), 2: (180, 2.5), 4: (190, 3.0)},
             256: {0: (100, 10.0), 1: (114, 9.8), 2: (115, 10.9), 4: (90, 16.0)}}  # fmt: skip
    rows = {f"lengths {number} k={k}": {script.DRAFTING: {"tok_s": tok_s, "tpot_p99_ms": tpot, "tokens_a_round": k + 1}}
            for number, arms in found.items() for k, (tok_s, tpot) in arms.items()}  # fmt: skip
    assert script.made_table(rows, given) == "1:4*1.632 91:1*0.754"
    del rows["lengths 256 k=4"]
    assert script.made_table(rows, given) is None


def test_one_gpu_cannot_be_swapped(script, tmp_path, capsys):
    with pytest.raises(SystemExit):
        script.arguments(["--out", str(tmp_path / "load.json"), "--swap"])
    assert "it needs --gpus 2" in capsys.readouterr().err


def test_a_second_plain_server_says_how_much_servers_differ(script, tmp_path):
    words = ["--out", str(tmp_path / "load.json"), "--clients", "1", "--groups", "closed", "--control", "--turns", "3"]
    given = script.arguments(words)
    chosen = list(script.planned(given))
    assert [level.name for level in chosen] == ["closed 1", "closed 1 (2)", "closed 1 (3)"]
    sides = {script.PLAIN: 100.0, script.DRAFTING: 99.0, script.CONTROL: 90.0}
    assert all(level.sides == tuple(sides) for level in chosen)
    rows = {
        level.name: {side: {"tok_s": speed + turn} for side, speed in sides.items()}
        for turn, level in enumerate(chosen)
    }
    found = {level.name: script.compared(level, rows) for level in chosen}
    summed = script.over_turns(found)["closed 1"]
    assert summed["turns"] == 3
    assert summed["throughput"] == {"median": 0.99, "low": 0.99, "high": 0.99, "all": [0.99, 0.99, 0.99]}
    assert summed["control"] == {"median": 0.901, "low": 0.9, "high": 0.902, "all": [0.9, 0.901, 0.902]}


def test_levels_come_in_the_order_of_their_groups_and_few_clients_in_both_orders_of_steps(script, tmp_path):
    words = ["--out", str(tmp_path / "load.json"), "--clients", "1,8,32", "--orders", "8", "--table", "1:4"]
    given = script.arguments([*words, "--groups", "off by table,closed,random"])
    both = (script.PLAIN, script.DRAFTING)
    assert [(level.name, level.sides) for level in script.planned(given)] == [
        ("off by table 1", both), ("off by table 32", both), ("closed 1", (*both, script.LAUNCHED)),
        ("closed 8", (*both, script.LAUNCHED)), ("closed 32", both), ("random 1", both), ("random 32", both),
    ]  # fmt: skip
    names = [level.name for level in script.planned(script.arguments([*words, "--groups", "off"]))]
    assert names[:3] == ["off by table 1", "off by request 1", "off by context 1"]


@pytest.mark.parametrize("swap", [False, True])
def test_both_plain_servers_are_without_the_plugin_and_on_one_card(script, tmp_path, swap):
    words = ["--out", str(tmp_path / "load.json"), "--gpus", "2", *(["--swap"] if swap else [])]
    found = {name: script.environment(script.arguments(words), name, tmp_path)
             for name in (script.PLAIN, script.DRAFTING, script.CONTROL)}  # fmt: skip
    assert {name: one["CUDA_VISIBLE_DEVICES"] for name, one in found.items()} == {
        script.PLAIN: "01"[swap], script.CONTROL: "01"[swap], script.DRAFTING: "10"[swap]}  # fmt: skip
    assert [name for name, one in found.items() if one.get("VLLM_PLUGINS") == ""] == [script.PLAIN, script.CONTROL]


def test_a_level_has_as_many_turns_as_its_group_says_and_is_asked_once_a_turn(script, tmp_path):
    words = ["--out", str(tmp_path / "load.json"), "--clients", "1,128", "--table", "1:4 46:2", "--turns", "2"]
    given = script.arguments([*words, "--groups", "closed:1,closed 128:3,varying"])
    fixed = [f"{script.VARYING} k={k}" for k in (2, 4)]
    assert [level.name for level in script.planned(given)] == [
        "closed 1", "closed 128", script.VARYING, *fixed,
        "closed 128 (2)", *(f"{name} (2)" for name in (script.VARYING, *fixed)), "closed 128 (3)"]  # fmt: skip


def test_the_table_is_compared_with_the_length_that_is_the_best_over_all_turns(script, tmp_path):
    words = ["--out", str(tmp_path / "load.json"), "--clients", "128", "--table", "1:4 46:2", "--turns", "3"]
    given = script.arguments([*words, "--groups", "varying", "--between", "8,128"])
    varying, two, four = list(script.planned(given))[:3]
    assert (varying.load.clients, varying.load.low_clients, varying.sides) == (128, 8, (script.PLAIN, script.DRAFTING))
    assert [(level.table, level.length, level.sides) for level in (two, four)] == [
        ("1:2", None, (script.DRAFTING,)), ("1:4", None, (script.DRAFTING,))]  # fmt: skip
    speeds = {varying.name: (102.0, 103.0, 101.0), two.name: (100.0, 100.0, 100.0), four.name: (120.0, 90.0, 95.0)}
    rows = {script.named(name, turn + 1): {script.DRAFTING: {"tok_s": speed}}
            for name, found in speeds.items() for turn, speed in enumerate(found)}  # fmt: skip
    summed = script.over_fixed(rows)
    assert (
        summed["best"] == two.name
        and summed["fixed"] == {two.name: 100.0, four.name: 95.0}
        and summed["table"] == 102.0
    )
    assert summed["over_the_best"] == {"median": 1.02, "low": 1.01, "high": 1.03, "all": [1.02, 1.03, 1.01]}
    assert script.over_fixed({varying.name: rows[varying.name]}) == {} == script.over_fixed({})


def test_servers_that_are_pinned_share_their_cores_and_leave_others_to_the_clients(script, monkeypatch):
    given = {}
    monkeypatch.setattr(script.os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr(script.os, "sched_setaffinity", lambda thread, cores: given.setdefault(thread, cores))
    me = script.os.getpid()
    servers = [type("Server", (), {"processes": lambda self, name=name: [(me, name, [])]})()
               for name in ("VLLM::EngineCor", "vllm")]  # fmt: skip
    known = script.cores()
    assert sorted(known) == list(range(16))
    parts = script.pin(servers[:1])
    assert parts == {"front": known[:2], "engine": known[2:6], "clients": known[6:]}
    assert given[me] == parts["engine"] and given[0] == parts["clients"]
    given.clear()
    script.pin(servers[1:])
    assert given[me] == parts["front"]
    monkeypatch.setattr(script.os, "sched_getaffinity", lambda _: {0, 1})
    with pytest.raises(SystemExit, match="2 cores; more than 6 are needed"):
        script.pin(servers)


def test_a_group_may_say_how_long_its_runs_are_and_a_level_goes_before_its_group(script, tmp_path):
    words = ["--out", str(tmp_path / "load.json"), "--clients", "8,32,128", "--table", "1:4", "--seconds", "10"]
    given = script.arguments([*words, "--groups", "closed 128:2@100,closed@25,off by table 32,bursts:2@2.5"])
    assert [(level.name, level.load.seconds) for level in script.planned(given)] == [
        ("closed 128", 100.0), ("closed 8", 25.0), ("closed 32", 25.0), ("off by table 32", 10.0),
        ("bursts of 64", 2.5), ("closed 128 (2)", 100.0), ("bursts of 64 (2)", 2.5)]  # fmt: skip


def test_a_group_that_cannot_be_read_is_named(script, tmp_path, capsys):
    with pytest.raises(SystemExit):
        script.arguments(["--out", str(tmp_path / "load.json"), "--groups", "closed@long"])
    assert "'closed@long': NAME, NAME:TURNS" in capsys.readouterr().err


def test_several_api_servers_are_those_in_python(script, tmp_path, capsys):
    with pytest.raises(SystemExit):
        script.arguments(["--out", str(tmp_path / "load.json"), "--api-servers", "2", "--rust-frontend"])
    assert "of which --rust-frontend takes the place" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "word", "said"),
    [
        ("--groups", "closd", "did you mean 'closed'?"),
        ("--groups", "closed,closed 12:3", "did you mean 'closed 128'?"),
        ("--clients", "8,x", "whole numbers"),
        ("--lengths-at", "x", "whole numbers"),
        ("--between", "32", "--between"),
        ("--wanted", "fast", "numbers"),
        ("--table", "1:x", "--table"),
    ],
)
def test_a_word_that_names_nothing_is_refused_before_a_server_starts(script, tmp_path, capsys, option, word, said):
    with pytest.raises(SystemExit) as ended:
        script.arguments(["--out", str(tmp_path / "load.json"), option, word])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_levels_may_be_named_by_their_group_its_first_word_or_alone(script, tmp_path):
    words = "off,off by table 1,closed:2@20,closed 8@5,clients come and go"
    given = script.arguments(["--out", str(tmp_path / "load.json"), "--clients", "1,8", "--groups", words])
    names = {level.name for level in script.planned(given)}
    assert {"off by table 1", "off by request 1", "closed 1 (2)", "closed 8", script.VARYING} <= names
