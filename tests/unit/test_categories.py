"""What is measured of each category of prompts: figures, a table by category, and the figure of the page."""

import csv
import io
import json
from dataclasses import replace

import pytest
from points import against, baseline

from selfspec_cli.config.schema import ConfigError
from selfspec_cli.record import statistics, tables
from selfspec_cli.record.statistics import RequestTimes
from selfspec_cli.report import figures, make, table
from selfspec_cli.report.table import Format


def request(category, seconds, steps):
    """A request whose outputs are evenly spread; steps: tokens of each."""
    times = tuple(seconds * (place + 1) / len(steps) for place in range(len(steps)))
    return category, RequestTimes(0.0, times, sum(steps)), steps


def runs(factor, steps):
    """Three runs of one question of maths and two of translation, which takes twice as long."""
    return [
        [request("math", part / factor, steps), *[request("translation", 2 * part / factor, steps)] * 2]
        for part in (1.0, 1.1, 0.9)
    ]


def test_a_category_has_the_speed_of_its_requests_and_what_its_steps_kept():
    found = statistics.by_category(runs(1.0, [1, 3, 1, 2]))
    assert [*found] == ["math", "translation", "all"]
    assert [one["requests"] for one in found.values()] == [3, 6, 9]
    assert found["math"]["tok_s"] == pytest.approx([7, 7 / 1.1, 7 / 0.9])
    assert found["all"]["tok_s"] == pytest.approx([21 / 5, 21 / 5.5, 21 / 4.5])
    assert (found["math"]["steps"], found["math"]["accepted_at"]) == (9, [6, 3])  # the first output is no step
    unknown = statistics.by_category([[("", RequestTimes(0.0, (1.0, 2.0), 4), ())]])
    assert [*unknown] == ["none", "all"] and "steps" not in unknown["none"]


@pytest.fixture
def folder():
    """A baseline and two arms by category, and a third arm of a workload without any."""
    plain = baseline()
    plain = replace(plain, engine=plain.engine | {"categories": statistics.by_category(runs(1.0, [1] * 7))})
    twice = against(plain, "1")
    twice = replace(twice, engine=twice.engine | {"categories": statistics.by_category(runs(2.0, [1, 3, 3]))})
    slower = against(plain, "2", arm=twice.arm | {"k": 3})
    slower = replace(slower, engine=slower.engine | {"categories": statistics.by_category(runs(0.5, [1, 2, 2, 2]))})
    return make.of_points([plain, twice, slower, against(plain, "3", arm=twice.arm | {"k": 2})])


def test_rows_are_compared_with_the_same_category_of_the_baseline(folder):
    rows = {(row["point"][:1], row["category"]): row for row in tables.category_rows(folder.points)}
    assert len(rows) == 9
    ours = rows["1", "math"]
    assert ours["speedup"] == pytest.approx(2.0) and ours["low"] < 2.0 < ours["high"]
    assert ours["tok_step"] == pytest.approx(3.0) and ours["accepted"] == [1.0, 1.0]
    assert rows["2", "translation"]["speedup"] == pytest.approx(0.5)
    assert (rows["0", "all"]["speedup"], rows["0", "all"]["tok_step"]) == (None, 1.0)


def test_the_report_by_category_has_a_line_for_each_and_one_for_all(folder):
    ((_, head, body, notes),) = table.matrices(folder)
    assert [line[0] for line in body] == ["math", "translation", "all"]
    assert head[:4] == ["category", "requests", "plain tok/s", "A speedup"]
    assert body[0][3].startswith("2.00x (") and body[0][4:6] == ["3.00", "100% 100%"]
    assert body[1][6].startswith("0.50x (")
    assert [note[:2] for note in notes] == ["A:", "B:"]
    assert "| translation" in table.by_category(folder, Format.md)
    lines = list(csv.DictReader(io.StringIO(table.by_category(folder, Format.csv))))
    assert len(lines) == 9 and {line["arm"] for line in lines} > {"baseline"}
    assert len(json.loads(table.by_category(folder, Format.json))) == 9
    with pytest.raises(ConfigError, match="no point has categories"):
        table.matrices(make.of_points([baseline()]))


@pytest.mark.slow
def test_the_page_draws_each_category_with_its_interval(folder):
    (figure,) = [one for one in figures.of_sources(folder) if one.name == "categories"]
    (panel,) = figure.panels
    first = panel.data[0]
    assert (first["series"], first["category"], first["speedup"], first["accepted"]) == (
        panel.data[2]["series"],
        "math",
        2.0,
        1.0,
    )
    assert first["low"] < first["high"] and len(panel.data) == 6 and len(panel.colours) == 2
    json.dumps(figure.spec())
