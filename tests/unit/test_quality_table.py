"""experiments/quality_table.py: the arms of one folder, matched by what they are called."""

import importlib
import json
import sys
from pathlib import Path

import pytest

from selfspec_cli.record import quality
from selfspec_cli.record.quality import EVAL, Finding

SCORE = {"task": "t", "metric": "acc", "value": 0.5, "stderr": None, "samples": 4, "drafted": True, "same": 4}
ARM = {"arm": "layer_skip", "E": 4, "k": 4, "gate": "none"}


@pytest.fixture
def cells(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "experiments"))
    yield importlib.import_module("quality_table").cells
    sys.modules.pop("quality_table")


@pytest.fixture
def results(tmp_path):
    """Findings of an arm and of its baseline, as one machine found them."""
    for arm, key in ((ARM, "a" * 12), ({"arm": "baseline"}, "b" * 12)):
        named = (EVAL, key, "20261122-000000-aaaa", "2026-11-22T00:00:00+0000", "a machine")
        baseline = None if arm["arm"] == "baseline" else "b" * 12
        quality.save(tmp_path, Finding(*named, arm, baseline, {}, {"scores": [SCORE]}))
    return tmp_path


def verdict(results, arm, **more):
    """What `selfspec verify` found on another machine, where the same arm has another key."""
    folder = results / quality.VERDICTS
    folder.mkdir(exist_ok=True)
    document = {"verdict": "lossless", "arm_key": "c" * 12, "time": "2026-11-22", "cases": [], **more}
    (folder / f"{len(list(folder.iterdir()))}.json").write_text(json.dumps(document | ({"arm": arm} if arm else {})))


def test_a_verdict_is_told_of_the_arm_that_it_names_and_of_no_other(cells, results):
    verdict(results, ARM)
    verdict(results, {**ARM, "gate": "maxp"}, verdict="fault", arm_key="d" * 12)
    verdict(results, None, verdict="not shown", arm_key="e" * 12)  # of before verdicts named their arm
    lines = cells(results)
    assert [(line[0], line[-1]) for line in lines] == [("baseline", ""), ("layer_skip E=4 k=4 gate=none", "lossless")]
    assert all("t acc 0.500" in line[-2] for line in lines)
