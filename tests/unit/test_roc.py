import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_early_exit_replay import COSTS, make

from selfspec_cli.config.schema import RunConfig
from selfspec_cli.early_exit import roc as curves
from selfspec_cli.early_exit.gates import GATES, features
from selfspec_cli.report import make as report
from selfspec_cli.stages import roc
from selfspec_cli.stages.exits import Exit


@pytest.mark.parametrize("gate", features())
@pytest.mark.parametrize("at_stake", [False, True])
def test_the_area_is_the_chance_that_an_accepted_token_scores_higher(gate, at_stake):
    """Against its definition (Mann and Whitney), over all pairs."""
    log = make(40)
    mask = log.was_at_stake if at_stake else log.was_drafted
    score = curves.scores(log, gate)
    score, taken = (score if at_stake else score.cummin(1).values)[mask], log.was_accepted[mask]
    pairs = score[taken].unsqueeze(1) - score[~taken].unsqueeze(0)
    want = float(((pairs > 0).float() + 0.5 * (pairs == 0).float()).mean())
    assert curves.auc(log, gate, at_stake=at_stake) == pytest.approx(want, abs=1e-5)


def test_a_gate_that_tells_nothing_and_one_that_tells_all():
    log = make(60)
    log.statistics[:, :, log.features.index("entropy")] = torch.where(log.was_accepted, 0.1, 3.0)
    assert curves.auc(log, "none") == 0.5
    assert curves.auc(log, "entropy") == 1.0  # low entropy is open


def test_one_fate_has_no_area():
    log = make(10)
    all_right = replace(log, accepted=log.drafted)
    assert curves.auc(all_right, "maxp") is None


def judged(seed=0):
    return roc.judge(Exit(RunConfig(layer=3, k=5), make(400, seed), COSTS))


def test_every_gate_has_a_row_and_a_setting():
    found = judged()
    rows = roc.table(found)
    assert [row.gate for row in rows] == [gate for gate in GATES if gate != "auto"]  # it is none in a replay
    for row in rows:
        assert row.best_fixed_speedup == rows[0].expected_speedup
        assert (row.threshold is None) == (row.gate == "none")
        assert row.expected_speedup <= found.oracle.speedup + 1e-9
    assert found.exit.best.speedup == max(row.expected_speedup for row in rows)


@pytest.mark.slow
def test_files_and_what_reads_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = judged()
    result = roc.RocResult(roc.table(found), [found])
    files = roc.write(result, tmp_path / "roc")
    drawn = report.roc_figures(tmp_path / "roc")
    assert [Path(file).stat().st_size > 10_000 for file in drawn.values()] == [True, True]
    panels = json.loads(Path(files["curves"]).read_text())["panels"]
    for panel in panels:
        assert [curve["false"][0] for curve in panel["curves"]] == [0.0] * len(panel["curves"])
        assert {(curve["false"][-1], curve["true"][-1]) for curve in panel["curves"]} == {(1.0, 1.0)}
        assert max(len(curve["true"]) for curve in panel["curves"]) <= 150
        first, at_stake = panel["curves"][0], panel["of"] == roc.ASKED[True]
        assert first["auc"] == curves.auc(found.judged, first["gate"], at_stake=at_stake)
    with open(files["table"], encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    assert [row["gate"] for row in table] == [gate for gate in GATES if gate != "auto"]
    assert table[0]["threshold"] == ""
    words = result.choice()["overrides"]
    assert words[0] == "layer=3"
    assert any(word.startswith("gate=") for word in words)


def test_exits_that_differ_in_their_drafts_alone_are_told_apart():
    found = judged()
    fp8 = replace(found.exit.cfg, draft_weights="fp8")
    other = replace(found, exit=replace(found.exit, cfg=fp8))
    result = roc.RocResult([*roc.table(found), *roc.table(other)], [found, other])
    assert {row.head for row in result.rows} == {"lens", "lens-fp8"}
    assert "draft_weights=fp8" in replace(result, exits=[other]).choice()["overrides"]
    assert "head=lens" in result.choice()["overrides"]
