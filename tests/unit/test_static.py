"""A report as text: what a pull request, a paper, a table program and a program get."""

import csv
import io
import json

import pytest
from commands import call
from points import ARM, against, baseline, failed

from selfspec_cli.record import columns, folder, tables


@pytest.fixture(autouse=True)
def results(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base = baseline()
    for made in (base, against(base), failed("2", "a | b", number=2), against(base, "3", arm=ARM | {"model": "m_1"})):
        folder.save("results", made)


def text(form, *more):
    result = call("report", "--format", form, *more)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_markdown_is_a_table_for_a_pull_request():
    made = text("md")
    assert made.startswith("Fastest") or "tables, each with" in made.splitlines()[0]
    (row,) = [line for line in made.splitlines() if line.startswith("| E=4") and "150.0" in line][:1]
    head = next(line for line in made.splitlines() if line.startswith("| arm"))
    assert row.count("|") == head.count("|")
    assert "out of" not in made and "failed: a | b" in made
    assert "selfspec 0.1.0" in made


def test_csv_is_the_record_and_json_has_null_for_what_was_not_measured():
    points, _ = folder.read("results")
    assert text("csv") == columns.text(columns.Summary, [tables.row(point) for point in points])
    assert len(list(csv.reader(io.StringIO(text("csv"))))) == 5
    made = json.loads(text("json"))
    assert [row["ppl"] for row in made["rows"]] == [None] * 4
    assert not any("power_w" in row for row in made["rows"])
    assert made["found"] and made["provenance"][0]["git revision"] == "a" * 10


def test_only_rows_that_are_asked_for_with_the_baseline_that_they_were_compared_with():
    made = json.loads(text("json", "--where", "model=m", "--where", "speedup>1"))
    assert [row["arm"] for row in made["rows"]] == ["baseline", "layer_skip"]
    result = call("report", "--where", "gate=maxp")
    assert result.exit_code == 2 and "none of the 4 points is so" in result.stderr
    assert call("report", "--format", "pdf").exit_code == 2
