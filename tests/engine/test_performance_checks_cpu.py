"""The performance check of the CPU that is shipped, on the embedded model; and faults that cost speed, each of which
turns it red. One engine that drafts serves all of it."""

import shutil
from pathlib import Path

import pytest
from planted_checks import checks, of_counts, red

from selfspec_cli.config import tuned
from selfspec_cli.config.compose import compose_runs
from selfspec_cli.config.paths import data_dir
from selfspec_cli.record import folder

FILE = Path(__file__).parents[2] / "experiments" / "checks" / "cpu_micro.yaml"
SHORT = ["repeats=3", "warmup=1"]
CAUGHT = {"lost_draft": {"mean_accepted_len"}, "slower_step": {"closed_rows"}, "eager_step": {"eager_steps"}}
"""Fault -> what has to be red whatever the clock says."""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    results = tmp_path_factory.mktemp("checks")
    with checks(FILE, results, SHORT) as made:
        made.results = results
        made.clean = made()
        yield made


def test_the_shipped_check_is_green_but_for_what_a_clock_measures(run, report):
    outcomes = of_counts(run.clean)
    assert set(outcomes.values()) == {"green", "not applicable"}, outcomes
    points, _ = folder.read(run.results, set(run.clean["points"]))
    drafting = [point for point in points if point.compared_with is not None]
    assert len(drafting) == 2 and all(point.engine["invariants"]["measured"] for point in drafting)
    drafted = [repeat.verified for point in drafting for repeat in point.repeats]
    assert all(0 < one.accepted < one.places for one in drafted)
    timed = [f"{one['value']:.2f}" for one in run.clean["results"] if one["asked"].startswith("efficiency")]
    report(f"efficiency against the cost model: {', '.join(timed)} (not asserted)")


@pytest.mark.parametrize("fault", CAUGHT)
def test_a_planted_fault_turns_it_red(run, fault):
    found = run(fault, first=1)
    assert found["outcome"] == "red" and found["planted"] == fault
    assert CAUGHT[fault] <= red(found), found["results"]
    # Greedy outputs stay the model's own, so these faults cost speed alone.
    assert "identical_share" not in red(found)


def test_a_stale_tuned_file_turns_it_red(run, tmp_path, monkeypatch):
    """A file of `selfspec tune` from a day on which another threshold was right."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(data_dir() / "conf", tmp_path / "conf")
    (cfg,) = compose_runs(None, ["model=reference", "layer=3", "k=4"], sweep=False)
    file = tmp_path / "tuned.yaml"
    text = FILE.read_text(encoding="utf-8")
    file.write_text(text.replace("arm: [layer=3, k=4, gate=margin, threshold=0.2]", "arm: [tuned=reference]"))
    assert file.read_text() != text
    tuned.write(tmp_path / "conf", cfg, ["layer=3", "k=4", "gate=margin", "threshold=0.95"], "a test")
    assert "mean_accepted_len" not in red(run.clean)
    assert "mean_accepted_len" in red(run(other=file, first=1))
