"""Tables, headlines and the page of a report; targets stand in experiment files, and decide nothing."""

import base64
import gzip
import json
import re
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from points import BASELINE, against, baseline, failed, point
from rich.console import Console

from selfspec_cli.config.choices import experiment_files
from selfspec_cli.config.schema import ConfigError
from selfspec_cli.record import folder, tables
from selfspec_cli.record.columns import Record
from selfspec_cli.record.targets import Target, experiments_of, less_is_better, targets_of
from selfspec_cli.report import figures, make, page, rows, sources, table
from selfspec_cli.report.table import wish

BASE = Record(
    run_id="r",
    time="2026-11-21T00:00:00+0000",
    **BASELINE | {"output_len": 128},
    tok_s_median=100.0,
    tok_s_min=90.0,
    tok_s_max=105.0,
    speedup=1.0,
    device="a machine",
    key="0" * 12,
    point="base",
)
MEASURED = {
    "tok_s_median": 150.0,
    "tok_s_min": 140.0,
    "tok_s_max": 160.0,
    "speedup": 1.5,
    "speedup_low": 1.41,
    "speedup_high": 1.62,
    "accept_rate": 0.625,
    "baseline": "base",
}
VARH = {"arm": "layer_skip", "E": 4, "k": 5, "head": "lens", "vocab": "full", "gate": "varH", "threshold": 5.0}
ARM = replace(BASE, **VARH, **MEASURED, identical=31, outputs=32, key="1" * 12, point="arm")
FAILED = replace(
    ARM, threshold=6.0, status="failed: <no> memory", key="2" * 12, point="failed", **dict.fromkeys(MEASURED)
)


def arm(point, speedup, low, high, **more):
    """Another row of the arm, by a key of its own."""
    speeds = {"speedup": speedup, "speedup_low": low, "speedup_high": high}
    return replace(ARM, point=point, key=point, **speeds, **more)


WISH = Target(
    "m4_varh",
    {"arm": "layer_skip", "gate": "varH", "threshold": 5.0},
    {"speedup": (2.05, 2.05), "accept_rate": (0.5, 0.5)},
    "a plan",
)


def printed(rows, targets=()):
    file = StringIO()
    table.show(rows, Console(file=file), targets)
    return file.getvalue()


def test_the_table_has_the_figures_and_the_target_that_an_experiment_states():
    assert "target" not in printed([BASE, ARM])
    text = printed([BASE, ARM], [WISH])
    (line,) = [line for line in text.splitlines() if "varH ≤ 5" in line and "E=4" in line and "140" in line]
    for figure_ in ("150.0 (140–160)", "1.50x (1.41x to 1.62x)", "62%", "31/32", "speedup ≥ 2.05x, accept_rate ≥ 50%"):
        assert figure_ in line
    assert "Fastest verified arm: 1.50x (1.41x to 1.62x)" in text


def test_how_many_outputs_plain_decoding_repeats_stands_beside_those_of_an_arm():
    base = replace(BASE, identical=30, outputs=32)
    text = printed([base, ARM])
    (line,) = [line for line in text.splitlines() if line.strip().startswith("baseline")]
    assert "30/32" in line
    assert "31 of 32 outputs identical; plain decoding with itself: 30 of 32" in text
    assert "with itself" not in printed([BASE, ARM])


def test_a_failed_arm_is_named_with_its_reason():
    assert "varH ≤ 6: failed: <no> memory" in printed([BASE, FAILED])


def shown(row):
    return dict(zip(table.COLUMNS, table.cells(row, table.COLUMNS), strict=True))


def test_what_was_not_measured_is_blank_and_not_zero():
    bare = shown(replace(ARM, accept_rate=None, identical=None, ppl=None, tok_s_min=None))
    assert (bare["accept"], bare["same"], bare["PPL"], bare["tok/s"]) == ("", "", "", "150.0")
    assert {bare[name] for name in ("ΔPPL of sampled", "ΔPPL of greedy", "ΔPPL", "scores", "verdict")} == {""}
    zero = shown(replace(ARM, accept_rate=0.0, identical=0))
    assert (zero["accept"], zero["same"]) == ("0%", "0/32")


def test_quality_stands_in_the_table_with_its_intervals():
    sampled = {"delta_ppl_of_sampled": 0.031, "delta_ppl_of_sampled_low": -0.02, "delta_ppl_of_sampled_high": 0.08}
    cells = shown(replace(ARM, **sampled, scores="t acc 0.500 ± 0.050 (drafted)", verdict="lossless"))
    assert cells["ΔPPL of sampled"] == "+0.03 (-0.02 to +0.08)"
    assert (cells["scores"], cells["verdict"]) == ("t acc 0.500 ± 0.050 (drafted)", "lossless")


def test_the_last_measurement_of_a_key_wins_and_a_failure_never_hides_one():
    newer, broken = replace(ARM, speedup=1.6), replace(ARM, status="failed: x")
    assert rows.latest([ARM, newer]) == [newer]
    assert rows.latest([ARM, broken]) == [ARM]
    assert rows.latest([broken, ARM]) == [ARM]


def test_rows_of_other_workloads_and_machines_stand_apart():
    other = [
        replace(BASE, point=f"b{n}", key=f"{n}" * 12, **change)
        for n, change in enumerate(
            [{"batch": 4}, {"device": "another"}, {"model": "n"}, {"model_fingerprint": "refitted"}], start=3
        )
    ]
    assert len(rows.groups([ARM, BASE, *other])) == 5
    (alone,) = rows.groups([ARM, BASE])
    assert [row.arm for row in alone.rows] == ["baseline", "layer_skip"]
    assert alone.title == "m, headline: 32 tokens in, 128 out, batch 1, greedy"


def test_an_arm_stands_beside_the_baseline_that_its_speedup_was_computed_from():
    """`sweep tau_v=4,5,6`, later `tau_v=7` on a machine that has become slower: 211 of then is more than 189 of now."""
    second = replace(BASE, run_id="s", time="2026-11-22T00:00:00+0000", tok_s_median=80.0, point="base2")
    late = arm("late", 1.625, 1.6, 1.65, run_id="s", threshold=7.0, tok_s_median=130.0, baseline="base2")
    shown = [BASE, ARM, second, late]
    first, other = rows.groups(shown)
    assert (first.rows, other.rows) == ([BASE, ARM], [second, late])
    assert [FAILED in group.rows for group in rows.groups([*shown, FAILED])] == [False, True]  # beside the newest
    assert first.title.endswith("baseline of 2026-11-21 00:00")
    assert "so arms of different tables are not compared" in rows.overview([first, other])
    text = printed(shown)
    assert text.index("100.0 (90") < text.index("150.0 (140") < text.index("80.0 (90") < text.index("130.0 (140")
    assert "fastest" not in rows.overview([first, other])


def test_a_baseline_without_arms_of_its_own_is_shown_once():
    newer = replace(BASE, tok_s_median=80.0, point="base2")
    assert [group.rows for group in rows.groups([BASE, ARM, newer])] == [[BASE, ARM], [newer]]
    assert [group.rows for group in rows.groups([BASE, newer])] == [[newer]]


def test_a_failure_without_a_baseline_is_shown():
    (only,) = rows.groups([FAILED])
    assert only.rows == [FAILED]


SET = arm("set", 1.9, 1.8, 2.0, acceptance_length=3.0, identical=None, outputs=None)


def test_acceptance_that_was_set_stands_apart_from_real():
    elsewhere = replace(BASE, batch=4, key="8" * 12, point="b4")
    real, set_ = rows.groups([ARM, BASE, SET, elsewhere])[:2]
    assert (real.rows, set_.rows) == ([BASE, ARM], [BASE, SET])
    assert set_.title == f"{real.title}, acceptance set to 3"
    assert len(rows.groups([BASE, SET])) == len(rows.groups([BASE])) == 1
    assert "acceptance" not in printed([BASE, ARM])


@pytest.mark.parametrize(
    ("busy", "doubt"), [(None, ""), (0.71, ""), (0.27, "multiprocessors were busy 27% of the time")]
)
def test_the_headline_says_where_the_gpu_had_little_to_do(busy, doubt):
    found = rows.headline([replace(BASE, sm_util=busy), replace(ARM, sm_util=0.1)])
    assert found.startswith("Fastest verified arm: 1.50x") and doubt in found
    assert ("the host" in found) == bool(doubt)


@pytest.mark.parametrize(
    ("own", "others", "mark"), [(None, None, ""), (0.9, 0.05, ""), (0.1, 0.4, ""), (0.5, 0.38, "38% !")]
)
def test_an_arm_that_was_timed_on_a_busy_machine_is_marked(own, others, mark):
    base, arm = replace(BASE, cpu_own=own, cpu_others=others), replace(ARM, cpu_own=0.9, cpu_others=0.02)
    text = printed([base, arm])
    assert ("others" in text.split("\n")[1].split()) == bool(mark) and mark in text
    said = "other programs had up to 38% of the processor while 1 of 2 arms were timed"
    assert (said in rows.headline([base, arm, FAILED])) == bool(mark)
    assert (said.replace("1 of 2 arms", "1 of 1 arms") in rows.headline([base])) == bool(mark)


NEAR = arm("near", 1.55, 1.45, 1.7, threshold=4.0)
SLOW = arm("slow", 1.1, 0.95, 1.3, threshold=9.0)
RIVAL = replace(arm("rival", 2.0, 1.9, 2.1), arm="vllm", speculative="ngram")


BARE = [replace(row, speedup_low=None, speedup_high=None) for row in (ARM, SLOW)]


@pytest.mark.parametrize(
    ("arms", "words"),
    [
        ([ARM, SLOW], "Fastest verified arm: 1.50x"),
        ([SET, ARM], "1.62x) the baseline (E=4 k=5 · lens · varH ≤ 5, 62%"),  # real acceptance goes first
        ([SET], "2.00x) the baseline (E=4 k=5 · lens · varH ≤ 5 · acceptance set to 3"),
        ([ARM, NEAR, SLOW], "No arm is clearly the fastest: 1.55x (1.45x to 1.70x)"),
        ([ARM, NEAR, SLOW], "one other arm have intervals that overlap"),
        ([SLOW], "its interval holds 1, so it may be no faster than the baseline"),
        ([arm("slower", 0.9, 0.88, 0.92)], "its whole interval is below 1, so it is slower than the baseline"),
        ([ARM, replace(ARM, arm="skip", speedup=9.0)], "Fastest verified arm: 1.50x"),
        ([ARM, RIVAL], "Fastest verified arm: 2.00x (1.90x to 2.10x) the baseline (vLLM ngram k=5"),
        ([replace(ARM, arm="skip"), FAILED], "No verified arm"),
        (BARE, "Greatest speedup measured: 1.50x the baseline"),
        (BARE, "no interval, because repeats were not kept."),
    ],
)
def test_the_headline_says_which_arm_is_the_fastest_as_far_as_intervals_tell(arms, words):
    headline = rows.headline([BASE, *arms])
    assert words in headline
    assert not ("whole interval" in headline and "holds 1" in headline)


@pytest.mark.parametrize("width", [60, 80, 100, 140, 200])
def test_a_terminal_gets_whole_columns_and_the_names_of_those_that_do_not_fit(width):
    measured = replace(ARM, mean_accepted_len=3.1, drafted_per_round=4.0, ttft_ms=100.0, tpot_ms=1.0, itl_ms=2.0)
    other = replace(measured, threshold=6.0, key="3" * 12)
    file = StringIO()
    table.show([BASE, measured, other], Console(file=file, force_terminal=True, color_system=None, width=width))
    text = file.getvalue()
    lines = text.splitlines()
    assert "…" not in text
    assert all(len(line.rstrip()) <= width for line in lines)
    header = next(line for line in lines if line.lstrip().startswith("arm"))
    assert {"tok/s", "speedup"} <= set(header.split())
    if width >= 80:
        assert any(re.search(r"varH ≤ 5 .*1\.50x \(1\.41x to 1\.62x\)", line) for line in lines)
    left_out = re.search(r"no room here for: (.*);", text.replace("\n", " "))
    shown_or_named = header + (left_out[1] if left_out else "")
    assert all(name in shown_or_named for name in ("accept", "tok/step", "drafts", "TTFT", "TPOT", "ITL", "same"))
    assert (left_out is None) is (width >= 140)


@pytest.fixture
def results(tmp_path):
    base = baseline()
    for made in (base, against(base), failed("2", "<no> memory", number=2)):
        folder.save(tmp_path / "in", made)
    return tmp_path / "in"


@pytest.mark.slow
def test_the_stage_writes_a_page_that_makes_no_request_and_the_figures_that_are_asked_for(results, tmp_path):
    (results / "summary.csv").write_text("garbage\n" * 400)  # nothing reads it
    made, file, pictures = make.run(results, tmp_path / "out")
    assert (file, pictures) == (tmp_path / "out" / "report.html", [])
    assert (len(made.rows), made.warnings) == (3, [])
    text = file.read_text()
    assert "&lt;no&gt; memory" not in text  # it is data: packed, and set as text by the browser
    visible = re.sub(r'(?s)<script type="text/plain".*?</script>', "", text)
    assert not re.search(r"""(src|href)=["'](?!data:|#)|@import|url\(|fetch\(|https?://""", visible)
    assert len(text) < page.LIMIT
    (packed,) = re.findall(r'id="packed-data">([^<]+)<', text)
    data = json.loads(gzip.decompress(base64.b64decode(packed)))
    assert data["table"]["points"] == [row.point for row in made.rows]
    files = make.run(results, tmp_path / "out", files=True)[2]
    assert {file.suffix for file in files} == {".svg", ".png"}
    assert all(file.stat().st_size > 3000 for file in files)


@pytest.mark.slow
def test_the_page_escapes(tmp_path):
    folder.save(tmp_path, replace(baseline(), device="<img src=x onerror=alert(1)>"))
    text = make.run(tmp_path, tmp_path)[1].read_text()
    assert "<img" not in text and "&lt;img src=x" in text


def test_a_row_opens_everything_that_is_kept_of_it(results):
    found = sources.read(results)
    shown = page.details(found)

    def section(made, title):
        (parts,) = [parts for name, *parts in made if name == title]
        return [shown["pool"][part] for part in parts]

    arm = shown["rows"][1]
    assert section(arm, "Command") == ["selfspec sweep"]
    assert section(arm, "Configuration") == [[["k", "5"]]]
    assert section(arm, "Provenance")[0][0] == ["point", f"runs/{found.points[1].id}.json"]
    assert section(arm, "Compared with")[0][0] == ["baseline", found.points[0].id]
    speeds = "Tokens a second of each repeat"
    assert section(arm, speeds) == ["150.0, 160.0, 140.0"]
    assert section(shown["rows"][2], speeds) == ["not kept"]  # it failed


@pytest.mark.slow
def test_a_figure_of_very_many_panels_says_what_it_leaves_out(results, monkeypatch):
    found = sources.read(results)
    (whole, *_) = figures.of_sources(found)
    many = replace(
        whole, panels=[replace(whole.panels[0], name=str(n), points=whole.panels[0].points[:1] * n) for n in range(5)]
    )
    few = page.limited(many, 2)
    assert [panel.name for panel in few.panels] == ["3", "4"] and "2 of 5 panels" in few.about
    assert page.limited(whole, 5) is whole
    monkeypatch.setattr(page, "MOST_PANELS", (5, 2))
    assert "2 of 5 panels" not in page.html(found, [many])
    monkeypatch.setattr(page, "LIMIT", 1)
    assert "2 of 5 panels" in page.html(found, [many])


def test_no_points_say_how_to_make_some(tmp_path):
    with pytest.raises(ConfigError, match="selfspec sweep"):
        make.run(tmp_path, tmp_path)


def test_provenance_is_every_points_own():
    """A later run, of another version, does not lend its provenance to the points of the first."""
    newer = {"versions": {"selfspec": "0.2.0"}, "git": {"revision": "b" * 40, "dirty": True}}
    points = [baseline(), against(baseline()), failed("1", run_id="20261122-000000-bbbb", **newer)]
    first, second = table.provenance(points)
    assert (first["versions"], first["git revision"], first["date"]) == ("selfspec 0.1.0", "a" * 10, "2026-11-21")
    assert first["runs"] == "20261121-000000-aaaa (selfspec sweep)"
    assert (second["versions"], second["git revision"]) == ("selfspec 0.2.0", "b" * 10 + " with changes")
    (bare,) = table.provenance([point(versions={}, git=None, command=None)])
    assert bare.keys() == {"machine", "date", "points", "runs"}


PUBLISHED = Path(__file__).parents[2] / "results" / "published"


@pytest.mark.parametrize("place", sources.folders(PUBLISHED), ids=lambda place: str(place.relative_to(PUBLISHED)))
def test_published_speedups_are_over_the_published_baselines(place):
    points, warnings = folder.read(place)
    assert warnings == [] and points
    shown = [tables.row(point) for point in points]
    by_point = {row.point: row for row in shown}
    for row in shown:
        if row.baseline is not None:
            assert row.speedup == pytest.approx(row.tok_s_median / by_point[row.baseline].tok_s_median, rel=1e-4)


@pytest.mark.slow
def test_what_roc_left_is_in_the_page(results):
    place = results / "roc" / "m"
    place.mkdir(parents=True)
    curve = {"gate": "margin", "auc": 0.81, "false": [0, 0.2, 1], "true": [0, 0.7, 1]}
    (place / "curves.json").write_text(json.dumps({"panels": [{"title": "E=3", "of": "all", "curves": [curve]}]}))
    made = {figure.name: figure for figure in figures.of_sources(sources.read(results))}
    assert [row["true"] for row in made["roc"].panels[0].data] == [0, 0.7, 1]
    (place / "curves.json").write_text("{")
    torn = sources.read(results)
    assert "curves.json" in torn.warnings[0] and torn.curves == {}


FITTED = {"draft_weights": "int4", "draft_weights_file": "copies.safetensors", "read_first": False}
DRAWN = {"draft_sample_method": "probabilistic"}
ACCEPTED = {"acceptance_length": 3.0}


@pytest.mark.parametrize(
    ("change", "label"),
    [
        ({}, "E=4 k=5 · lens · varH ≤ 5"),
        ({"gate": "margin", "threshold": 0.5}, "E=4 k=5 · lens · margin ≥ 0.5"),
        ({"gate": "entropy", "threshold": 0.5}, "E=4 k=5 · lens · entropy ≤ 0.5"),
        ({"gate": "survival", "threshold": 0.5}, "E=4 k=5 · lens · survival ≥ 0.5"),
        ({"draft_weights": "fp8", "vocab": "4096"}, "E=4 k=5 · lens V'=4096 · fp8 draft · varH ≤ 5"),
        (FITTED, "E=4 k=5 · lens · int4 draft of copies.safetensors · varH ≤ 5 · launched first"),
        ({"length_table": "2:8*1.4 8:6*1.6"}, "E=4 k=5, by load 2:8 8:6 · lens · varH ≤ 5"),
        ({"length_table": "2:4"}, "E=4 k=5, by load 2:4 · lens · varH ≤ 5"),
        (DRAWN, "E=4 k=5 · lens · varH ≤ 5 · probabilistic drafts"),
        (ACCEPTED, "E=4 k=5 · lens · varH ≤ 5 · acceptance set to 3"),
        ({"arm": "draft_model"} | DRAWN, "vLLM draft_model of 4 layers k=5 · probabilistic drafts"),
        ({"arm": "draft_model"} | ACCEPTED, "vLLM draft_model of 4 layers k=5 · acceptance set to 3"),
        ({"arm": "ngram"} | ACCEPTED, "vLLM n-gram k=5 · acceptance set to 3"),
        ({"arm": "vllm", "speculative": "suffix"} | ACCEPTED, "vLLM suffix k=5 · acceptance set to 3"),
        ({"arm": "draft_model", "k": None}, "vLLM draft_model of 4 layers"),  # as of a line through several lengths
    ],
)
def test_a_label_names_what_is_not_the_default(change, label):
    assert rows.label(replace(ARM, **change)) == label


MINE = """
overrides: [gate=varH]
targets:
  - for: {arm: layer_skip, gate: varH}
    tok_s: 820
    baseline_tok_s: 400
    delta_ppl: [0.18, 1.5]
    source: a paper
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """The file of an experiment with targets."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "experiments" / "mine.yaml"
    file.parent.mkdir()
    file.write_text(MINE)
    return file


def by(experiment, key="1", **more):
    return point(key, command=["selfspec", "sweep", f"experiment={experiment}"], **more)


def test_a_target_is_a_ratio_where_the_baseline_of_its_source_is_known(mine):
    others = [baseline(), point(command=None), by("deleted_since")]
    (target,) = targets_of([by("mine"), by("mine", "2"), *others])
    assert target.values == {"speedup": (2.05, 2.05), "delta_ppl": (0.18, 1.5)}
    assert (target.experiment, target.source) == ("mine", "a paper")
    assert experiments_of(by("m0_baseline,mine")) == ["m0_baseline", "mine"]


def test_the_sprints_targets_are_in_its_experiments_and_ask_no_arm_for_what_it_cannot_have():
    known = [target for name in experiment_files() for target in targets_of([by(name)])]
    names = ["m0_baseline", "m1_skip", "m2_lsq", "m3_maxp", "m4_varh", "m_qwen"]
    assert sorted({one.experiment for one in known}) == names
    speedups = sorted((one.experiment, round(one.values["speedup"][0], 3)) for one in known if "speedup" in one.values)
    assert speedups == [("m2_lsq", 1.525), ("m3_maxp", 1.8), ("m4_varh", 2.05), ("m_qwen", 1.8), ("m_qwen", 2.05)]
    assert all(one.source for one in known)
    assert {one.arm.get("arm") for one in known if "accept_rate" in one.values} == {"layer_skip"}  # others do not draft
    assert not any("speedup" in one.values for one in known if one.arm.get("arm") == "baseline"), "compared with itself"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("overrides: []\ntargets: 5", "must be a list of mappings"),
        ("overrides: []\ntargets: [{for: 5}]", "must map columns"),
        ("overrides: []\ntargets: [{for: {gaet: varH}}]", "did you mean 'gate'"),
        ("overrides: []\ntargets: [{accept_rat: 0.4}]", "did you mean 'accept_rate'"),
        ("overrides: []\ntargets: [{accept_rate: many}]", "accept_rate='many'"),
        ("overrides: []\ntarget: []", "did you mean 'targets'"),
    ],
)
def test_a_target_that_cannot_be_understood_is_bad_input(mine, text, message):
    mine.write_text(text)
    with pytest.raises(ConfigError, match=message):
        targets_of([by("mine")])


def test_money_failures_and_perplexity_are_better_where_they_are_less():
    assert all(map(less_is_better, ("failed_requests", "ppl_of_greedy", "delta_ppl_high", "tpot_p99_ms")))
    assert not any(map(less_is_better, ("speedup", "goodput", "k", "load_share", "window")))


def test_what_is_reached_depends_on_which_way_is_better():
    target = Target("e", {"arm": "layer_skip"}, {"speedup": (2, 2), "ttft_ms": (120, 120)})
    row = tables.row(point())
    row.speedup, row.ttft_ms = 2.1, 130.0
    assert (target.reached(row, "speedup"), target.reached(row, "ttft_ms")) == (True, False)
    row.ttft_ms = None
    assert target.reached(row, "ttft_ms") is None
    row.acceptance_length = 3.0
    assert not target.is_for(row)
    assert (wish("speedup", 2, 2), wish("ttft_ms", 120, 120)) == ("speedup ≥ 2.00x", "ttft_ms ≤ 120")
    assert wish("delta_ppl", 0.18, 1.5) == "delta_ppl +0.18 to +1.50"


def test_the_page_says_what_was_reached_and_has_no_targets_without_an_experiment(mine):
    rows = page.targets(sources.of_points([by("mine")]))
    assert [(one["target"], one["measured"], one["reached"]) for one in rows] == [
        ("speedup ≥ 2.05x", "not measured", ""),
        ("delta_ppl +0.18 to +1.50", "not measured", ""),
    ]
    assert page.targets(sources.of_points([baseline()])) == []
