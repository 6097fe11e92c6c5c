"""Performance checks: files, verdicts, repeats, the record and its rules, and what the command and the page show."""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import points
import pytest
from commands import call, document, refused

from selfspec_cli.commands import check as command
from selfspec_cli.config.compose import compose_runs
from selfspec_cli.config.keys import Keys
from selfspec_cli.early_exit.contexts import context_of
from selfspec_cli.early_exit.counters import INVARIANTS
from selfspec_cli.record import folder, tables
from selfspec_cli.record.point import Measurement
from selfspec_cli.report import make
from selfspec_cli.stages import check
from selfspec_cli.stages.check import ABSENT, GREEN, RED, UNSURE, Bound, Case, Result, judged, outcome_of, worst

SHIPPED = sorted((Path(__file__).parents[2] / "experiments" / "checks").glob("*.yaml"))
BYTES = {"full": 100.0, "draft": 10.0, "full_kv_token": 0.0, "draft_kv_token": 0.0}
MICRO = """
title: a test
runs: 3
settings: [model=reference, workload.num_prompts=1, repeats=3, results_dir=FOLDER]
cases:
  - {name: one, arm: [layer=3, k=4], reach: {speedup: 1.5}}
"""


@pytest.fixture
def written(tmp_path):
    """Writes a check file that names the results folder tmp_path/results."""

    def write(text=MICRO, name="micro.yaml"):
        file = tmp_path / name
        file.write_text(text.replace("FOLDER", str(tmp_path / "results")))
        return file

    return write


# ---- verdicts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("measure", "low", "high", "outcome"),
    [
        ("speedup", 2.0, 2.2, GREEN),
        ("speedup", 1.7, 1.99, RED),
        ("speedup", 1.9, 2.1, UNSURE),
        ("tpot_p99_ms", 1.9, 2.0, GREEN),
        ("tpot_p99_ms", 2.1, 2.4, RED),
        ("start_seconds", 1.9, 2.1, UNSURE),
    ],
)
def test_the_whole_interval_decides(measure, low, high, outcome):
    assert outcome_of(Bound(measure, 2.0), low, high) == outcome


def test_the_worst_outcome_is_the_verdict():
    assert worst([GREEN, ABSENT]) == GREEN
    assert worst([GREEN, UNSURE]) == UNSURE
    assert worst([UNSURE, RED, GREEN]) == RED


def arm(*tok_s, base=None, accepted=30, invariants=None, **more):
    """A point of an arm beside its baseline: ten rounds a repeat, five drafts each."""
    base = base or points.baseline()
    found = points.against(base, "1", *tok_s, **more)
    repeats = tuple(replace(one, verified=points.drafts(accepted=accepted)) for one in found.repeats)
    engine = {"step_bytes": BYTES} | ({} if invariants is None else {"invariants": invariants})
    return base, replace(found, repeats=repeats, engine=engine)


def checked(case, *pairs):
    known = {point.id: point for pair in pairs for point in pair}
    return {one.asked.partition(" ")[0]: one for one in judged(case, [own for _, own in pairs], known)}


def test_a_slower_kernel_is_red_by_speed_and_by_efficiency():
    asked = Case("g", (), (Bound("speedup", 1.4), Bound("efficiency", 0.5), Bound("mean_accepted_len", 4.0)), ())
    fast = checked(asked, arm(150.0, 152.0, 148.0, base=points.baseline("0", 100.0, 101.0, 99.0)))
    assert {check.outcome for check in fast.values()} == {GREEN}
    # 4 tokens a round for 100 + 5 * 10 bytes where a plain step reads 100: 2.67 times as fast.
    assert fast["efficiency"].value == pytest.approx(1.5 / (4 * 100 / 150))
    slow = checked(asked, arm(110.0, 112.0, 108.0, base=points.baseline("0", 100.0, 101.0, 99.0)))
    assert slow["speedup"].outcome == slow["efficiency"].outcome == RED
    assert slow["mean_accepted_len"].outcome == GREEN


@pytest.mark.parametrize("words", [{}, {"draft_window": 512}, {"draft_context": "blocks:512"}])
def test_efficiency_counts_what_drafts_attend_to(words):
    _, drafting = arm(150.0, arm={**points.ARM, "input_len": 4000, "output_len": 192, "batch": 2, **words})
    read = BYTES | {"full_kv_token": 0.1, "draft_kv_token": 0.1}
    row = tables.row(replace(drafting, engine={"step_bytes": read}))
    attended = context_of(row).attended(4096)
    assert attended == 4096 if not words else 512 <= attended < 600
    plain, draft = 100 + 2 * 4096 * 0.1, 10 + 2 * attended * 0.1
    assert row.predicted == pytest.approx(4 * plain / (plain + 5 * draft))


def test_ratios_to_the_baseline_and_what_has_one_value():
    asked = Case("g", (), (Bound("tpot_ms", 0.9, True), Bound("start_seconds", 1.25, True)), ())
    one = arm(
        150.0, 151.0, 149.0, base=points.baseline("0", 100.0, 101.0, 99.0, start_seconds=10.0), start_seconds=11.0
    )
    found = checked(asked, one)
    assert found["tpot_ms"].outcome == GREEN and found["tpot_ms"].value == pytest.approx(2 / 3, abs=0.02)
    # One start says nothing of how much starts differ; two do.
    assert (found["start_seconds"].outcome, found["start_seconds"].value) == (UNSURE, 1.1)
    assert checked(asked, one, one)["start_seconds"].outcome == GREEN
    # A second start finds what the first compiled: each is set beside the baseline's of its own run.
    later = arm(150.0, base=points.baseline("3", 100.0, start_seconds=2.0), start_seconds=3.0)
    both = checked(asked, one, later)["start_seconds"]
    assert (both.outcome, both.value, both.low, both.high) == (UNSURE, pytest.approx(1.3), 1.1, 1.5)


@pytest.mark.parametrize("name", INVARIANTS)
def test_an_invariant_is_counted_or_said_not_to_apply(name):
    asked = Case("g", (), (), (name,))
    for found, outcome in (
        ({"measured": {name: 0}, "not_applicable": {}}, GREEN),
        ({"measured": {name: 2}, "not_applicable": {}}, RED),
        ({"measured": {}, "not_applicable": {name: "a reason"}}, ABSENT),
        ({"measured": {}, "not_applicable": {}}, UNSURE),
        (None, UNSURE),
    ):
        assert checked(asked, arm(invariants=found))[name].outcome == outcome


def test_a_point_that_failed_is_red_with_its_reason():
    (check,) = judged(Case("g", (), (Bound("speedup", 1.0),), ()), [points.failed()], {})
    assert check.outcome == RED and check.note == "out of memory"


# ---- files ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_file_is_understood(path):
    file = check.read(path)
    assert file.title
    keys = {Keys().run(compose_runs(None, [*one.words], sweep=False)[0]) for one in file.cases}
    assert len(keys) == len(file.cases)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("speedup: 1.5", "speedupp: 1.5", "did you mean speedup"),
        ("speedup: 1.5", "speedup: fast", "write a number"),
        ("speedup: 1.5", "tpot_ms: {of_base: 1}", "of_baseline"),
        ("reach: {speedup: 1.5}", "reach: {}", "asks for nothing"),
        ("runs: 3", "repeat: 3", "repeat"),
        ("reach: {speedup: 1.5}", "invariants: [eager_step]", "did you mean eager_steps"),
        ("runs: 3", "runs: 0", "1 to 20"),
        ("arm: [layer=3, k=4]", "arm: layer=3", "list of words"),
    ],
)
def test_a_mistake_is_named(written, old, new, words):
    assert old in MICRO
    assert words in refused("check", str(written(MICRO.replace(old, new))), "--dry-run").replace("'", "")


def test_a_file_that_is_not_there_names_its_neighbours(written):
    written()
    assert "micro.yaml" in refused("check", str(written().with_name("mikro.yaml")))


# ---- runs, the record and its rules --------------------------------------------------------------------------------


class Bench:
    """In place of an engine and of what measures it: tokens a second of the arm's repeats, run after run."""

    def __init__(self, *runs):
        self.runs, self.opened = list(runs), 0

    def open(self, cfg, **more):
        self.opened += 1
        return nullcontext(SimpleNamespace(set_gate=lambda *_: None, call=lambda *_: None))

    def __call__(self, cfg, engine, progress):
        speeds = (100.0, 100.0, 100.0) if cfg.method == "baseline" else self.runs.pop(0)
        if speeds is INTERRUPT:
            raise KeyboardInterrupt
        return Measurement(tuple(map(points.repeat, speeds)), (), {}, seconds=1.0)


def measured(path, *runs, **more):
    file, bench = check.read(path), Bench(*runs)
    cfgs = [compose_runs(None, [*one.words], sweep=False)[0] for one in file.cases]
    return check.run(file, cfgs, open_engine=bench.open, bench=bench, **more), bench


INTERRUPT = ()
CLEAR, BETWEEN, SLOW = (160.0, 161.0, 162.0), (140.0, 160.0, 170.0), (130.0, 131.0, 132.0)


def test_it_repeats_what_it_cannot_tell_and_does_not_guess(written):
    found, bench = measured(written(), CLEAR)
    assert (found["outcome"], found["runs"], bench.opened) == (GREEN, 1, 2)
    found, _ = measured(written(), BETWEEN, CLEAR, CLEAR)
    assert (found["outcome"], found["runs"]) == (GREEN, 2)
    found, _ = measured(written(), BETWEEN, BETWEEN, BETWEEN)
    assert (found["outcome"], found["runs"]) == (UNSURE, 3)
    found, _ = measured(written(), SLOW)
    assert (found["outcome"], found["runs"]) == (RED, 1)


def test_an_interrupt_keeps_the_verdict_of_the_runs_before(written, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        measured(written(), BETWEEN, INTERRUPT)
    (line,) = check.history(tmp_path / "results")
    assert (line["outcome"], line["runs"], len(line["points"])) == (UNSURE, 1, 2)
    with pytest.raises(KeyboardInterrupt):
        measured(written(), INTERRUPT)
    assert len(check.history(tmp_path / "results")) == 1  # nothing was judged


def test_its_points_are_ordinary_points_and_its_lines_are_only_added_to(written, tmp_path):
    first, _ = measured(written(), CLEAR)
    second, _ = measured(written(), SLOW)
    results = tmp_path / "results"
    kept, _ = folder.read(results)
    assert [point.id for point in kept] == [*first["points"], *second["points"]] and len(kept) == 4
    lines = check.history(results)
    assert [line["outcome"] for line in lines] == [GREEN, RED]
    assert lines[0] == {name: value for name, value in first.items() if name != "file"}
    with (results / check.HISTORY).open("a") as file:
        file.write('{"outcome": "gre')  # a process that was killed
    assert len(check.history(results)) == 2


def test_words_that_are_typed_make_it_another_file(written):
    file = check.read(written())
    changed = check.with_words(file, ["results_dir=elsewhere", "layer=6"])
    words = changed.cases[0].words
    assert words[-2:] == ("results_dir=elsewhere", "layer=6") and "layer=3" not in words
    assert changed.digest != file.digest == check.with_words(file, ["results_dir=elsewhere"]).digest
    assert check.read(written(MICRO.replace("1.5", "1.0"))).digest != file.digest


def test_the_faults_that_can_be_planted_are_those_of_the_repository(written):
    from selfspec_faults import speed

    assert set(check.PLANTED) == set(speed.ON_CUDA)
    for more in ([], ["--dry-run"]):
        said = refused("check", str(written()), "--plant", "lost_drft", *more)
        assert "allowed: lost_draft, " in said and "did you mean 'lost_draft'?" in said


def test_of_an_installed_package_without_the_repository_no_fault_is_planted(written, monkeypatch, tmp_path):
    monkeypatch.setattr("selfspec_cli.commands.check.FAULTS_FOLDER", tmp_path / "none")
    assert "come with the repository" in refused("check", str(written()), "--plant", "lost_draft", "--dry-run")
    monkeypatch.setattr("selfspec_cli.stages.verify.run.FAULTS_FOLDER", tmp_path / "none")
    for fault, code in (("kv_slot", 2), ("all", 2), ("accept_one_more", 0)):
        result = call("verify", "model=reference", "layer=3", "--plant", fault, "--dry-run")
        assert (result.exit_code, "comes with the repository" in result.stderr) == (code, code == 2), result.stderr


# ---- what is shown -------------------------------------------------------------------------------------------------


DOCUMENT = {
    "check": "micro",
    "title": "t",
    "outcome": UNSURE,
    "runs": 3,
    "seconds": 1.5,
    "points": ["a"],
    "file": "checks.jsonl",
    "time": "2026-11-25T00:00:00+0000",
    "results": [
        vars(one)
        for one in (
            Result("one", "speedup at least 2", UNSURE, 2.0, 1.9, 2.1),
            Result("one", "eager_steps none", GREEN, 0.0),
            Result("one", "allocations none", ABSENT, note="on the CPU"),
            Result("two", "speedup at least 1", RED, 0.5, 0.4, 0.6),
        )
    ],
}


def test_junit_has_a_test_case_for_each_result():
    suite = ElementTree.fromstring(command.as_junit(DOCUMENT))
    counts = [suite.get(name) for name in ("tests", "failures", "errors", "skipped")]
    assert counts == ["4", "1", "1", "1"]
    cases = {(case.get("classname"), case.get("name")): [child.tag for child in case] for case in suite}
    assert cases["one", "eager_steps none"] == [] and cases["two", "speedup at least 1"] == ["failure"]
    assert "2 (1.9 to 2.1)" in suite.find("testcase/error").get("message")


def test_the_last_line_has_the_word_of_the_verdict(capsys):
    command.show(DOCUMENT)
    shown = capsys.readouterr().out
    assert "not measurable: one, speedup at least 2 (after 3 runs)" in shown
    assert "not applicable, because on the CPU: allocations" in shown


def test_a_dry_run_says_what_is_asked_for_and_starts_nothing(written):
    found = document(call("check", str(written()), "--dry-run", "--json"))
    assert found["one"] == ["speedup at least 1.5"]
    assert not (written().parent / "results" / check.HISTORY).exists()


def test_the_page_has_the_history(written, tmp_path):
    measured(written(), CLEAR)
    measured(written(), SLOW)
    page = make.run(tmp_path / "results", tmp_path)[1].read_text()
    assert "Performance checks" in page and "one: speedup at least 1.5, 1.31" in page
    lines = json.loads(json.dumps(check.history(tmp_path / "results")))
    assert page.count(lines[0]["place"]["code"]) >= 2
