"""Conditions on rows, `selfspec runs`, which lists, shows and deletes points by them, and `selfspec report` as text."""

import csv
import io
import json

import pytest
from commands import call, document
from points import ARM, against, baseline, failed

from selfspec_cli.config.schema import ConfigError
from selfspec_cli.record import columns, folder, tables
from selfspec_cli.record.columns import chosen


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base = baseline()
    slow = against(base, "3", 80.0, 81.0, 82.0, number=3)
    for made in (base, against(base), failed("2", "out of memory", number=2), slow):
        folder.save("results", made)
    return tmp_path / "results"


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        (["gate=varH"], "123"),
        (["gate=varH,none", "speedup>=1"], "1"),
        (["arm!=layer_skip"], "0"),
        (["status~MEMORY"], "2"),
        (["gate="], "0"),
        (["read_first="], "0123"),
        (["machine~machine", "time>2027"], ""),
        ([], "0123"),
    ],
)
def test_conditions(place, words, keys):
    rows = [tables.row(made) for made in folder.read(place)[0]]
    assert "".join(sorted(row.key[0] for row in chosen(rows, words))) == keys


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("gaet=varH", "did you mean 'gate'"),
        ("speedup>fast", "speedup is a number"),
        ("varH", "cannot read"),
        ("read_first=maybe", "true or false"),
    ],
)
def test_conditions_that_mean_nothing(word, message):
    with pytest.raises(ConfigError, match=message):
        chosen([], [word])


def test_list_and_show(place):
    listed = call("runs", "list", "gate=varH", "speedup>1")
    assert "1 point(s)" in listed.stdout and "varH ≤ 5" in listed.stdout and "1.50x" in listed.stdout
    shown = call("runs", "show", "1111")
    assert shown.exit_code == 0, shown.output
    for text in ("selfspec sweep", "speedup", 'tok_s": 150.0', "git", "revision"):
        assert text in shown.stdout
    (one,) = document(call("runs", "show", "1111", "--json"))["points"]
    assert one["row"]["speedup"] == 1.5 and len(one["repeats"]) == 3


def test_a_name_that_is_not_unique_or_not_there_is_bad_input(place):
    for words, message in ((["4444"], "no point's id begins"), ([""], "not unique")):
        result = call("runs", "show", *words)
        assert (result.exit_code, message in result.stderr) == (2, True)
    for command in (("runs", "list"), ("report",), ("runs", "export")):
        missing = call(*command, "results_dir=resultz")
        assert (missing.exit_code, "there is no such folder; did you mean results?" in missing.stderr) == (2, True)
    (place.parent / "empty").mkdir()
    assert "holds no runs/" in call("runs", "list", "results_dir=empty").stderr


def test_two_points_are_compared_by_the_beginnings_of_their_ids(place):
    result = call("report", "--compare", "1111", "3333")
    assert "slower" in result.stdout and "No setting, version or machine differs" in result.stdout
    assert "no arm in common" in call("report", "--compare", "1111", "2222").stderr  # that one failed


def test_delete_asks_first_and_makes_the_tables_again(place):
    assert document(call("runs", "delete", "status~memory", "--dry-run", "--json"))["deleted"][0].startswith("2222")
    refused = call("runs", "delete", "status~memory")
    assert refused.exit_code == 2 and "--yes" in refused.stderr
    assert len(list((place / "runs").glob("*.json"))) == 4
    done = call("runs", "delete", "status~memory", "--yes")
    assert done.exit_code == 0, done.output
    assert len(list((place / "runs").glob("*.json"))) == 3
    assert "memory" not in (place / "summary.csv").read_text()
    assert document(call("runs", "delete", "0000", "--yes", "--json"))["deleted"][0].startswith("0000")
    points, _ = folder.read(place)
    assert points[0].compared_with.speedup == 1.5  # what was compared with it keeps its figures
    assert "nothing was named" in call("runs", "delete", "--yes", "results_dir=results").stderr


# ---- a report as text ------------------------------------------------------------------------------------------------


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base = baseline()
    for made in (base, against(base), failed("2", "a | b", number=2), against(base, "3", arm=ARM | {"model": "m_1"})):
        folder.save("results", made)


def text(form, *more):
    result = call("report", "--format", form, *more)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_markdown_is_a_table_for_a_pull_request(results):
    made = text("md")
    assert made.startswith("Fastest") or "tables, each with" in made.splitlines()[0]
    (row,) = [line for line in made.splitlines() if line.startswith("| E=4") and "150.0" in line][:1]
    head = next(line for line in made.splitlines() if line.startswith("| arm"))
    assert row.count("|") == head.count("|")
    assert "out of" not in made and "failed: a | b" in made
    assert "selfspec 0.1.0" in made


def test_csv_is_the_record_and_json_has_null_for_what_was_not_measured(results):
    points, _ = folder.read("results")
    assert text("csv") == columns.text(columns.Summary, [tables.row(point) for point in points])
    assert len(list(csv.reader(io.StringIO(text("csv"))))) == 5
    made = json.loads(text("json"))
    assert [row["ppl"] for row in made["rows"]] == [None] * 4
    assert not any("power_w" in row for row in made["rows"])
    assert made["found"] and made["provenance"][0]["git revision"] == "a" * 10


def test_only_rows_that_are_asked_for_with_the_baseline_that_they_were_compared_with(results):
    made = json.loads(text("json", "--where", "model=m", "--where", "speedup>1"))
    assert [row["arm"] for row in made["rows"]] == ["baseline", "layer_skip"]
    result = call("report", "--where", "gate=maxp")
    assert result.exit_code == 2 and "none of the 4 points is so" in result.stderr
    assert call("report", "--format", "pdf").exit_code == 2
