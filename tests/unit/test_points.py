"""Points as rows, intervals, load tests, and findings about quality: perplexities, files, and columns of rows."""

import csv
import json
import math
from dataclasses import fields, replace

import numpy
import pytest
from points import ARM, BASELINE, against, baseline, drafts, measured, point, repeat

from selfspec_cli.config.compose import compose_runs
from selfspec_cli.config.keys import Keys
from selfspec_cli.config.schema import GateConfig, Method, RunConfig, WorkloadConfig
from selfspec_cli.early_exit.counters import DraftCounters
from selfspec_cli.record import columns, folder, quality, tables
from selfspec_cli.record.point import Measurement, Repeat, compare, from_json, output_digests, to_json
from selfspec_cli.record.quality import EVAL, GENERATED, TEXT, Finding
from selfspec_cli.record.statistics import RequestTimes, goodput, overlap, speedup_interval, windows
from selfspec_cli.report.figures import under_load
from selfspec_cli.report.rows import group_title
from selfspec_cli.texts.library import rolling

OWN = DraftCounters(5).snapshot() | {"drafted": 40, "rounds": 10, "steps": 40, "active_histogram": [0, 40]}


@pytest.mark.parametrize("text", ["[]", "{}", '{"format": 99}', '{"format": 1}', "no", '{"format": 1, "repeats": [1]}'])
def test_what_is_no_point_is_refused(text):
    with pytest.raises(ValueError):  # noqa: PT011 (JSON's own error among them)
        from_json(text)


def test_outputs_are_compared_by_their_digests():
    assert output_digests([[1, 2], [12], [1, 2]])[0] == output_digests([[1, 2]])[0] != output_digests([[12]])[0]
    base = baseline()
    same = against(base).compared_with
    assert (same.identical, same.outputs) == (2, 2)
    other = against(replace(base, outputs=("aa", "xx"))).compared_with
    assert (other.identical, other.outputs) == (1, 2)
    assert against(base, arm={**ARM, "acceptance_length": 3.0}).compared_with.identical is None
    # Sampled outputs are other samples than the baseline's, so a row does not count them.
    sampled = tables.row(against(base, arm={**ARM, "temperature": 0.8}))
    assert (sampled.identical, sampled.outputs) == (None, None)
    assert sampled.speedup == same.speedup


def test_a_row_is_made_of_the_raw_values():
    row = tables.row(against(baseline(), "1", 150.0, 160.0, 140.0))
    assert (row.tok_s_median, row.tok_s_min, row.tok_s_max) == pytest.approx((150, 140, 160))
    assert row.speedup == pytest.approx(1.5)
    interval = speedup_interval((150.0, 160.0, 140.0), (100.0, 105.0, 90.0))
    assert (row.speedup_low, row.speedup_high) == pytest.approx(interval)
    assert row.ttft_ms == pytest.approx(1000 / 150, rel=1e-3)  # the first of four tokens
    assert (row.tpot_ms, row.itl_ms) == pytest.approx((1000 / 150, 1000 / 150), rel=1e-3)
    assert row.e2e_ms == pytest.approx(4000 / 150, rel=1e-3)
    assert (row.baseline, row.kv_blocks) == (baseline().id, 7)
    assert tables.row(baseline()).speedup == 1
    assert tables.row(baseline()).speedup_low is None  # it is what speedups are over


def test_the_accept_rate_says_which_it_is():
    """40 tokens were drafted; verify passes looked at 50 places, as they do on CUDA, and 30 tokens were accepted."""
    made = replace(against(baseline()), repeats=(repeat(150.0, drafts(), OWN),))
    row, accept = tables.row(made), tables.accept_row(made)
    assert row.accept_rate == 0.75
    assert (row.mean_accepted_len, row.drafted_per_round) == (4.0, 4.0)
    assert (accept.drafted, accept.places, accept.accepted, accept.accepted_at) == (40, 50, 30, "10 8 6 4 2")
    assert (accept.gate, accept.threshold, accept.point) == ("varH", 5.0, made.id)
    theirs = replace(made, repeats=(repeat(150.0, drafts()),))  # vLLM's own drafter keeps no counters of its own
    assert tables.row(theirs).accept_rate == 0.6
    assert tables.accept_row(baseline()) is None


def test_drafts_that_no_pass_looked_at_are_in_no_round():
    """On the CPU the last drafts of a request are never verified: 9 rounds of 4 were drafted, 8 verified."""
    counts = drafts(rounds=8, places=32, accepted=8, at=(8, 0, 0, 0))
    made = replace(against(baseline()), repeats=(repeat(150.0, counts, OWN | {"drafted": 36}),))
    row = tables.row(made)
    assert row.accept_rate == 8 / 36
    assert row.drafted_per_round == 4.0


def test_outputs_are_compared_where_both_sides_have_one():
    """One client asks few of the prompts before its time is over, and a slower server fewer."""
    base = replace(baseline(), outputs=("a", "b", "", ""))
    found = compare(measured(100.0, outputs=("a", "x", "c", "")), base, reused=False, real_text=True)
    assert (found.identical, found.outputs) == (1, 2)
    for outputs in (("", "", "c", "d"), (), ("a", "b")):
        found = compare(measured(100.0, outputs=outputs), base, reused=False, real_text=True)
        assert (found.identical, found.outputs) == (None, None)


def test_the_row_of_a_baseline_has_how_many_of_its_outputs_it_repeats():
    base = replace(baseline(), outputs=("a", "b", "c", ""))
    assert (tables.row(base).identical, tables.row(base).outputs) == (None, None)
    for facts in ({"as_itself": 2}, {"unlike_answers": 1}):  # in another batch order; in the runs of a load test
        found = tables.row(replace(base, engine=facts))
        assert (found.identical, found.outputs, found.delta_ppl) == (2, 3, None)
    warm = replace(base, engine={"as_itself": 2}, arm=base.arm | {"temperature": 1.0})
    assert tables.row(warm).identical is None
    arm = replace(against(base), engine={"unlike_answers": 1})
    assert (tables.row(arm).identical, tables.row(arm).outputs) != (1, 2)  # an arm's are compared with the baseline's


def test_a_column_is_of_one_table_and_key_and_point_join_them():
    kinds = {name: kind for name, kind in columns.TABLES.items() if kind is not columns.AcceptRow}
    own = [column for kind in kinds.values() for column in columns.header(kind) if column not in ("key", "point")]
    assert len(own) == len(set(own))
    assert {*own, "key", "point"} == {field.name for field in fields(columns.Record)}
    assert sorted(columns.header(columns.Record)) == sorted(columns.KINDS)
    for kind in columns.TABLES.values():
        assert "key" in columns.header(kind) and columns.header(kind)[-1] == "point"
    assert len(columns.header(columns.Summary)) <= 48  # what everybody reads
    meanings = columns.meanings(columns.Record)
    assert all(meanings[name] for name in ("delta_ppl_low", "clients", "sm_util"))
    wrapped = meanings["goodput"]
    assert wrapped.startswith("requests a second") and wrapped.endswith("median of the runs")
    assert len(columns.KINDS) <= 90


@pytest.mark.parametrize("where", ["arm", "quality", "figures"])
def test_a_column_that_was_removed_is_read_away(where):
    """`verification` was a column, and old points name it in their arm: without this none of them could be read."""
    old = against(baseline())
    dead = {"verification": "full", "trunk_share": 0.5}
    changed = replace(old, **{where: (getattr(old, where) or {}) | dead})
    row = tables.row(from_json(to_json(changed)) if where != "quality" else changed)
    assert (row.arm, row.key) == ("layer_skip", old.key) and not hasattr(row, "verification")
    assert tables.of_arm(ARM | dead).gate == ARM["gate"]


@pytest.mark.parametrize(
    ("same", "greedy", "expected"),
    [(True, None, 0.0), (True, 0.2, 0.0), (False, 0.2, 0.2), (False, None, None)],
)
def test_an_arm_that_verifies_has_a_delta_of_perplexity(same, greedy, expected):
    """0 by identity, else that of its greedy generations, else nothing: it was not measured."""
    arm = against(baseline())
    compared = replace(arm.compared_with, outputs=8, identical=8 if same else 7)
    row = tables.row(replace(arm, compared_with=compared, quality={"delta_ppl_of_greedy": greedy}))
    assert row.delta_ppl == expected
    assert tables.row(baseline()).delta_ppl is None


def test_a_point_has_a_line_only_in_tables_of_which_it_has_a_value():
    row = tables.row(replace(against(baseline()), quality={"verdict": "lossless", "ppl": 5.0}))
    held = [
        name for name, kind in columns.TABLES.items() if kind is not columns.AcceptRow and columns.has_line(kind, row)
    ]
    assert held == ["summary.csv", "details.csv", "quality.csv"]
    assert f"\n{row.key},lossless,," in columns.text(columns.Quality, [row])
    assert columns.text(columns.Loads, [row]).count("\n") == 1
    loaded = tables.row(point(arm=ARM | {"arrivals": "poisson", "rate": 2.5}))
    assert f"\n{loaded.key},poisson,,2.5,,," in columns.text(columns.Loads, [row, loaded])
    assert columns.plain(row)["verdict"] == "lossless"
    assert "clients" not in columns.plain(row) and columns.plain(row)["threshold"] is not None


def test_identity_says_only_what_the_arm_has():
    def columns(cfg):
        found = tables.identity(cfg, layer=8)
        return [found.get(name) for name in ("E", "k", "head", "gate", "threshold")]

    cfg = RunConfig(gate=GateConfig(kind="varH"), threshold=4.0, k=5)
    assert columns(cfg) == [8, 5, "lens", "varH", 4.0]
    assert columns(replace(cfg, method=Method.skip, layer=3)) == [3, None, "lens", None, None]
    assert columns(replace(cfg, method=Method.baseline)) == [None] * 5


def test_points_from_before_the_column_name_the_file_of_their_copies():
    before = point(config={"draft_weights_path": "fits/copies.safetensors"})
    assert tables.row(before).draft_weights_file == "copies.safetensors"
    chosen = replace(before, config={"method": "layer_skip", "length_table": "1:5 9:0", "bandit": True})
    assert tables.row(chosen).length_table == "1:5 9:0"
    assert tables.row(point()).draft_weights_file is None
    assert tables.row(point(arm={**ARM, "draft_weights_file": None}, config=before.config)).draft_weights_file is None


# ---- points of load tests --------------------------------------------------------------------------------------------


def request(sent, first, last, tokens=5, outputs=3):
    """A request with its first output after `first` seconds and its last after `last`."""
    between = [first + (last - first) * part / (outputs - 1) for part in range(outputs)]
    return RequestTimes(sent, tuple(sent + moment for moment in between), tokens)


def test_goodput_counts_requests_within_every_limit_and_no_others():
    # TTFT 100, 300, 100 ms; TPOT 100, 100, 300 ms; end to end 500, 700, 1300 ms
    some = [request(0, 0.1, 0.5), request(0, 0.3, 0.7), request(0, 0.1, 1.3)]
    limits = ((200, None), (None, 200), (200, 200), (1000, 1000))
    assert [goodput(some, 2.0, *pair) for pair in limits] == [1.0, 1.0, 0.5, 1.5]
    assert goodput([RequestTimes(0, (0.1,), 1)], 1.0, tpot_limit=0.001) == 1.0  # one token has no TPOT


def test_minutes_have_the_tokens_that_arrived_and_the_requests_that_ended_in_them():
    some = [request(0.0, 10.0, 30.0, tokens=3), request(50.0, 9.0, 11.0, tokens=30), request(150.0, 1.0, 9.0)]
    first, second, third = windows(some, 185.0)
    # Of the second request the first output (at 59 s) fell into the first minute, with a third of its 30 tokens.
    assert first["tok_s"] == pytest.approx((3 + 10) / 60) and second["tok_s"] == pytest.approx(20 / 60)
    assert second["tpot"] == pytest.approx(2000 / 29) and third["ttft"] == pytest.approx(1000.0)
    assert windows(some, 59.0) == [] and "ttft" not in windows(some, 245.0)[3]


def test_a_long_load_test_is_drawn_minute_by_minute():
    long = tuple(request(second, 0.1, 0.5) for second in range(0, 200, 2))
    asked = {"batch": None, "arrivals": "closed", "clients": 8}
    made = point(arm=BASELINE | asked, measurement=Measurement((Repeat(200.5, long),)))
    (drawn,) = under_load.over_time([made, point()])
    assert [panel.name for panel in drawn.panels] == ["tokens a second", "TTFT p99, ms", "TPOT p99, ms"]
    assert [row["minute"] for row in drawn.panels[0].data] == [1, 2, 3]
    assert drawn.panels[0].points == (made.id,) and json.dumps(drawn.spec())


def test_a_row_of_a_load_test_says_what_was_asked_and_what_was_found():
    runs = (Repeat(seconds, (request(0, seconds / 10, seconds / 4),) * 4) for seconds in (0.2, 0.2 / 1.1, 0.2 / 0.9))
    asked = {"batch": None, "arrivals": "closed", "clients": 8, "tpot_limit_ms": 40.0}
    made = point(arm=BASELINE | asked, measurement=Measurement(tuple(runs), engine={"failed_requests": 2}))
    for row in (tables.row(made), tables.row(from_json(to_json(made)))):
        assert (row.arrivals, row.clients, row.batch, row.failed_requests) == ("closed", 8, None, 2)
        assert (row.req_s, row.goodput) == pytest.approx((20.0, 20.0))  # all requests have a TPOT below 40 ms
        assert group_title(row).startswith("m, headline: 32 tokens in, 4 out, 8 clients")
    other = tables.row(point())
    assert (other.arrivals, other.req_s, other.goodput) == (None,) * 3


def test_a_config_is_a_load_test_only_where_something_says_how_much_to_ask():
    plain, timed, closed, rate = (
        compose_runs(None, ["method=baseline", "workload.num_prompts=8", *words])[0]
        for words in ([], ["load.seconds=5"], ["load.clients=4"], ["load.rate=2", "load.burst=8"])
    )
    assert [cfg.load.kind for cfg in (plain, timed, closed, rate)] == ["", "", "closed", "poisson"]
    # A setting that a bench does not look at changes no key, so what was measured before is found again.
    assert Keys().settings(plain) == Keys().settings(timed)
    assert len({Keys().settings(cfg) for cfg in (plain, closed, rate)}) == 3
    columns = tables.identity(rate)
    assert (columns["arrivals"], columns["rate"], columns["burst"], columns["batch"]) == ("bursty", 2.0, 8, None)


# ---- intervals of speedups ------------------------------------------------------------------------------------------


BASE = [100.0, 104.0, 96.0, 101.0, 99.0]


def test_the_interval_holds_the_ratio_of_the_medians_and_varies_with_both_sides():
    ours = [150.0, 156.0, 144.0, 151.0, 149.0]
    low, high = speedup_interval(ours, BASE)
    assert min(ours) / max(BASE) <= low < 1.5 < high <= max(ours) / min(BASE)
    low, high = speedup_interval([150.0] * 5, BASE)
    assert high - low > 0.02  # the baseline varies
    assert speedup_interval([150.0] * 5, [100.0] * 5) == (1.5, 1.5)


def test_what_slows_both_sides_of_a_pair_is_no_uncertainty():
    drift = [1.0, 0.5, 0.8, 1.2, 0.6]
    ours, theirs = [150 * d for d in drift], [100 * d for d in drift]
    paired, apart = speedup_interval(ours, theirs, paired=True), speedup_interval(ours, theirs)
    assert paired == pytest.approx((1.5, 1.5))
    assert apart[1] - apart[0] > 0.5


@pytest.mark.parametrize(("ours", "theirs"), [([1.0], BASE), (BASE, [1.0]), (BASE, []), ([], [])])
def test_one_repeat_says_nothing_about_its_spread(ours, theirs):
    assert speedup_interval(ours, theirs) is None


def test_intervals_overlap_where_they_share_a_value():
    assert overlap((1.0, 1.5), (1.5, 2.0)) and overlap((1.0, 3.0), (1.5, 2.0))
    assert not overlap((1.0, 1.4), (1.5, 2.0))


NATS, TOKENS = [10.0, 30.0, 24.0, 50.0], [10, 20, 16, 25]
SCORES = {
    "scores": {"nats": [11.0, 31.5, 24.5, 52.0], "tokens": TOKENS},
    "baseline": {"nats": NATS, "tokens": TOKENS},
}
ARM_KEY = "a" * 12


def finding(kind=TEXT, found=None, run="20261122-000000-aaaa", **more):
    found = found or {"documents": list("abcd"), **SCORES}
    protocol = {"corpus": "stdlib", "window": 512, "stride": 256, "part": None}
    named = (kind, more.pop("arm_key", ARM_KEY), run, "2026-11-22T00:00:00+0000", "a machine")
    return Finding(*named, {"arm": "skip"}, "b" * 12, protocol, found, **more)


def test_a_perplexity_is_of_all_tokens_and_its_interval_over_documents():
    scores = finding().scores(baseline=True)
    assert scores.perplexity == pytest.approx(math.exp(sum(NATS) / sum(TOKENS)))
    low, high = scores.interval()
    assert math.exp(1.0) <= low < scores.perplexity < high <= math.exp(2.0)  # the least and the most of one document
    draw = numpy.random.default_rng(1).integers(0, 4, (4000, 4))  # the same by hand
    drawn = numpy.exp(numpy.array(NATS)[draw].sum(1) / numpy.array(TOKENS)[draw].sum(1))
    assert [low, high] == pytest.approx(list(numpy.percentile(drawn, [2.5, 97.5])), rel=0.03)


def test_a_difference_is_paired_by_document():
    """The sides differ by 0.02 to 0.1 nats a token in every document, and by far less than documents do."""
    ours, theirs = finding().scores(), finding().scores(baseline=True)
    low, high = ours.interval(theirs)
    assert 0 < low < ours.perplexity - theirs.perplexity < high
    assert high - low < 0.3 * (theirs.interval()[1] - theirs.interval()[0])
    assert theirs.interval(theirs) == (0.0, 0.0)


SHAPES = [(30, 8, 4), (30, 8, 7), (8, 8, 1), (9, 8, 3), (2, 8, 4), (31, 5, 1)]


@pytest.mark.parametrize(("length", "window", "stride"), SHAPES)
def test_rolling_windows_score_every_token_but_the_first_once(length, window, stride):
    places = list(rolling(length, window, stride))
    assert [at for _, scored, end in places for at in range(scored, end)] == list(range(1, length))
    for number, (start, scored, end) in enumerate(places):
        assert end - start <= window
        assert scored > start
        assert scored - start >= (window - stride if number and end - start == window else 1)


def test_the_widest_stride_is_the_rule_of_lm_eval():
    get = pytest.importorskip("lm_eval.utils").get_rolling_token_windows
    ids = list(range(100, 131))
    ours = [(ids[start : end - 1], ids[scored:end]) for start, scored, end in rolling(len(ids), 9, 8)]
    assert ours == list(get(ids[1:], ids[0], 8, 1))
    ours = [(ids[start : end - 1], ids[scored:end]) for start, scored, end in rolling(len(ids), 9, 3)]
    assert ours == list(get(ids[1:], ids[0], 8, 6))


@pytest.mark.parametrize("stride", [0, 8])
def test_a_stride_that_skips_or_repeats_is_refused(stride):
    with pytest.raises(ValueError, match="from 1 to window - 1 = 7"):
        list(rolling(30, 8, stride))


def test_a_finding_is_kept_and_its_newest_is_a_column(tmp_path):
    folder.save_finding(tmp_path, finding())
    newer = finding(
        found={"documents": ["a"], "scores": {"nats": [3.0], "tokens": [3]}, "baseline": None},
        run="20261122-000001-aaaa",
    )
    folder.save_finding(tmp_path, newer)
    (tmp_path / "quality" / "other.json").write_text("[]")
    book = quality.read(tmp_path)
    assert book.findings == {(TEXT, ARM_KEY): newer}
    columns = book.columns(ARM_KEY, "")
    assert columns["ppl"] == pytest.approx(math.e)
    assert (columns["ppl_low"], columns["delta_ppl"]) == (None, None)  # one document, and no baseline
    assert columns["ppl_protocol"] == "corpus=stdlib window=512 stride=256"
    assert book.columns("c" * 12, "") == book.columns(None, "") == {}


def test_rows_carry_what_was_found_of_their_arm(tmp_path):
    base = replace(baseline(), arm_key="b" * 12)
    folder.save(tmp_path, base)
    folder.save(tmp_path, against(base, arm_key=ARM_KEY))
    folder.save(tmp_path, against(base, "2", number=2, run_id="20261122-000000-bbbb"))  # from before arms had keys
    generated = SCORES | {"identical": 3, "outputs": 4}
    folder.save_finding(tmp_path, finding(GENERATED, {"greedy": generated, "sampled": generated}))
    score = {"task": "t", "metric": "acc", "value": 0.5, "stderr": 0.05, "samples": 100, "same": 100, "drafted": True}
    folder.save_finding(tmp_path, finding(EVAL, {"scores": [score, score | {"drafted": False, "stderr": None}]}))
    (tmp_path / "verify").mkdir()
    verdict = {"verdict": "pass", "key": base.key, "cases": ["a", "b"], "time": "2026-11-22T00:00:00+0000"}
    planted = {"verdict": "fault", "planted": "kv_slot", "time": "2026-11-22T00:00:01+0000"}
    for name, document in {"old": {"verdict": "fault", "time": "2026"}, "x": {"planted": "all"}, "p": planted}.items():
        (tmp_path / "verify" / f"{base.key}-{name}.json").write_text(json.dumps(verdict | document))
    rows = [tables.row(one) for one in folder.read(tmp_path)[0]]
    assert [row.verdict for row in rows] == ["pass", None, None]
    assert rows[1].scores == "t acc 0.500 ± 0.050 (drafted); t acc 0.500"
    assert rows[1].delta_ppl_of_greedy_low < rows[1].delta_ppl_of_greedy < rows[1].delta_ppl_of_greedy_high
    assert rows[1].delta_ppl_of_sampled == rows[1].delta_ppl_of_greedy
    assert (rows[2].scores, rows[2].delta_ppl_of_greedy) == (None, None)
    folder.export(tmp_path)
    found = {row["point"]: row for row in csv.DictReader((tmp_path / "quality.csv").open())}
    assert [*found] == [row.point for row in rows[:2]]  # nothing is known of the third
    assert found[rows[1].point]["key"] == rows[1].key and found[rows[1].point]["scores"].startswith("t acc 0.500")
    assert found[rows[1].point]["verdict"] == ""  # not measured, and so not 0


def test_what_is_found_later_is_no_part_of_a_points_file(tmp_path):
    judged = replace(point(), arm_key=ARM_KEY, quality={"verdict": "pass"})
    folder.save(tmp_path, judged)
    assert "pass" not in next((tmp_path / "runs").glob("*.json")).read_text()
    assert folder.read(tmp_path)[0] == [replace(judged, quality={})]


def test_an_arm_is_the_same_whatever_its_workload():
    keys = Keys()
    cfg = RunConfig(gate=GateConfig(kind="varH"), threshold=4.0, layer=3, k=4)
    engine = replace(cfg.engine, enforce_eager=True, max_num_seqs=4)
    same = replace(cfg, workload=WorkloadConfig(batch=4), seed=3, repeats=9, perplexity_tokens=0, engine=engine)
    assert keys.arm(cfg) == keys.arm(same)
    assert keys.run(cfg) != keys.run(same)
    others = [
        replace(cfg, threshold=5.0),
        replace(cfg, layer=4),
        replace(cfg, k=5),
        replace(cfg, method=Method.skip),
        replace(cfg, model=replace(cfg.model, dtype="bfloat16")),
    ]
    assert len({keys.arm(one) for one in [cfg, *others]}) == 6
