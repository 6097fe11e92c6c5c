"""Two sets of points side by side, conditions on rows, `selfspec runs`, and `selfspec report` as text."""

import csv
import io
import json
from dataclasses import replace

import pytest
from commands import call, document, done, refused
from points import ARM, against, baseline, failed, point
from refusals import said

from selfspec_cli.config.schema import ConfigError, RunConfig, to_plain
from selfspec_cli.record import columns, folder, statistics, tables
from selfspec_cli.record.columns import chosen
from selfspec_cli.record.statistics import RequestTimes
from selfspec_cli.report import compare, figures, sources, table
from selfspec_cli.report.table import Format

LATER = "20261122-000000-bbbb"
NEW = {"git": {"revision": "b" * 40, "dirty": False}, "versions": {"selfspec": "0.2.0"}}


@pytest.fixture
def results(tmp_path, monkeypatch):
    """A folder in which one revision measured an arm at 150 tok/s, and a later one at 200."""
    monkeypatch.chdir(tmp_path)
    old, new = baseline(), baseline(run_id=LATER, device="another", config={"k": 5, "dtype": "half"}, **NEW)
    arm = against(new, "1", 200.0, 201.0, 199.0, device="another", config={"k": 5, "dtype": "half"}, **NEW)
    for made in (old, against(old), failed("2"), new, arm):
        folder.save("results", made)
    return tmp_path / "results"


def test_revisions_and_machines_of_one_folder(results):
    for words in (("aaaa", "bbbb"), ("a machine", "another"), ("20261121-000000-aaaa", LATER)):
        made = compare.compare(words, results)
        verdicts = {pair.a.arm: (pair.verdict, pair.of_speedups) for pair in made.pairs}
        assert verdicts == {"baseline": ("within noise", ""), "layer_skip": ("faster", "greater")}
        assert made.differing["dtype"] == ([None], ["half"])
        assert made.differing["version of selfspec"] == (["0.1.0"], ["0.2.0"])
        assert made.differing["git revision"] == (["a" * 10], ["b" * 10])
        assert "k" not in made.differing
        assert made.alone == ([], [])
    assert "1 faster, 1 within noise" in made.found
    folder.save("results", against(baseline(run_id=LATER), "9", arm=ARM | {"E": 8}, git=NEW["git"]))
    assert compare.compare(("aaaa", "bbbb"), results).alone == ([], ["E=8 k=5 · lens · varH ≤ 5"])
    assert "does not hold how runs differ" in made.found


def test_folders(results, tmp_path):
    folder.save("other", baseline())
    folder.save("other", against(baseline(), "1", 150.0, 151.0, 149.0))
    made = compare.compare(("other", "results"), results, ["device=a machine"])
    assert [pair.verdict for pair in made.pairs] == ["within noise", "within noise"]
    assert made.differing == {}


def rows(*points):
    """Points with their rows, as one side of a comparison."""
    return [(point, tables.row(point)) for point in points]


def between(one, other):
    """One point against another."""
    return compare.between(("a", "b"), rows(one), rows(other))


def test_several_runs_of_both_sides_are_compared_by_their_medians():
    def side(speeds):
        runs = {f"2026112{n}-000000-aaaa": speed for n, speed in enumerate(speeds)}
        return rows(*(against(baseline(), "1", speed, speed + 1, speed + 2, run_id=run) for run, speed in runs.items()))

    # Within a run repeats agree to 1 %, but runs differ by a third: what seems a difference is none.
    (pair,) = compare.between(("a", "b"), side([100, 140]), side([110, 150])).pairs
    assert (pair.verdict, pair.runs) == ("within noise", (2, 2))
    (one,) = compare.between(("a", "b"), side([100]), side([110])).pairs
    assert (one.verdict, one.runs) == ("faster", (1, 1))


def test_what_is_one_value_here_and_another_there_is_compared():
    """Batch 1 against batch 4: no arm is equal, but the arms are the same apart from it."""
    many = against(baseline(), "5", 300.0, 301.0, 302.0, arm=ARM | {"batch": 4})
    one = against(baseline())
    assert [pair.arm for pair in between(one, many).pairs] == ["E=4 k=5 · lens · varH ≤ 5 (batch differ)"]
    other = against(baseline(), "5", arm=ARM | {"batch": 4, "gate": "maxp"})
    assert "(gate, batch differ)" in between(one, other).pairs[0].arm


def test_without_repeats_nothing_is_called_a_difference():
    bare = point("1", figures={"tok_s_median": 100.0}, repeats=())
    made = between(bare, bare)
    assert made.pairs[0].verdict == "not known"
    assert "nothing says how much is noise" in made.found


def test_words_that_name_nothing(results):
    assert "did you mean 'another'" in said(ConfigError, compare.compare, ("anothre", "aaaa"), results)
    (results.parent / "empty").mkdir()
    assert "holds no points" in said(ConfigError, compare.compare, ("empty", "aaaa"), results)
    assert "no arm in common" in said(ConfigError, compare.compare, ("aaaa", "bbbb"), results, ["E=8"])


def test_a_folder_that_is_missing_is_named_as_such(results):
    """It said "allowed: " and nothing, or asked for one of many run ids."""
    for place in ("results", "nowhere"):
        found = refused("report", "--compare", "results", "missing", f"results_dir={place}")
        assert "there is no folder missing" in found or "missing: there is no such folder" in found
        assert not found.endswith("allowed:")
    assert refused("report", "--compare", "results", "some/missing").endswith("some/missing: there is no such folder")


def test_settings_newer_than_a_point_have_their_defaults():
    """Against an archive of last week 29 settings were "not set", and no arm was the same."""
    now = to_plain(RunConfig())
    old = {name: value for name, value in now.items() if name not in ("free_drafts", "draft_context", "load")}
    old["model"] = {name: value for name, value in now["model"].items() if name != "hf_overrides"}
    gone = {"verification": "full", "adaptive_thing": False}
    before = against(baseline(), config=old | {"adaptive_thing": False}, arm=ARM | gone)
    after = against(baseline(), config=now, arm=ARM | {"draft_weights": "shared", "repeats": 9})
    made = between(before, after)
    assert [pair.arm for pair in made.pairs] == ["E=4 k=5 · lens · varH ≤ 5"]
    assert made.differing == {}
    retired = {"read_first": True, "tau_v": 5.0, "gate": {"kind": "varH"}, "engine": now["engine"] | {"name": "h100"}}
    renamed = replace(after, config=now | {"threshold": 5.0, "gate": {"kind": "varH"}})
    assert between(replace(before, config=old | retired), renamed).differing == {}
    used = replace(before, config=old | {"adaptive_thing": True})
    assert between(used, after).differing == {"adaptive_thing": ([True], [None])}


def test_every_format_says_the_same(results):
    shown = done("report", "--compare", "aaaa", "bbbb")
    assert "1.333 (" in shown.stdout and "dtype" in shown.stdout
    made = json.loads(call("report", "--compare", "aaaa", "bbbb", "--format", "json").stdout)
    assert [pair["verdict"] for pair in made["pairs"]] == ["within noise", "faster"]
    lines = list(csv.reader(io.StringIO(call("report", "--compare", "aaaa", "bbbb", "--format", "csv").stdout)))
    assert [len(line) for line in lines] == [11] * 3 and lines[2][5] == "faster"
    markdown = call("report", "--compare", "aaaa", "bbbb", "--format", "md").stdout
    assert "| arm" in markdown and "| dtype" in markdown


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base = baseline()
    slow = against(base, "3", 80.0, 81.0, 82.0, number=3)
    for made in (base, against(base), failed("2", "no | memory", number=2), slow):
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
    found = chosen([tables.row(made) for made in folder.read(place)[0]], words)
    assert "".join(sorted(row.key[0] for row in found)) == keys


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
    assert message in said(ConfigError, chosen, [], [word])


def test_list_and_show(place):
    listed = call("runs", "list", "gate=varH", "speedup>1")
    assert "1 point(s)" in listed.stdout and "varH ≤ 5" in listed.stdout and "1.50x" in listed.stdout
    shown = done("runs", "show", "1111")
    for text in ("selfspec sweep", "speedup", 'tok_s": 150.0', "git", "revision"):
        assert text in shown.stdout
    (one,) = document(call("runs", "show", "1111", "--json"))["points"]
    assert one["row"]["speedup"] == 1.5 and len(one["repeats"]) == 3


def test_a_name_that_is_not_unique_or_not_there_is_bad_input(place):
    for words, message in ((["4444"], "no point's id begins"), ([""], "not unique")):
        assert message in refused("runs", "show", *words)
    for command in (("runs", "list"), ("report",), ("runs", "export")):
        assert "there is no such folder; did you mean results?" in refused(*command, "results_dir=resultz")
    (place.parent / "empty").mkdir()
    assert "holds no runs/" in refused("runs", "list", "results_dir=empty")


def test_two_points_are_compared_by_the_beginnings_of_their_ids(place):
    result = call("report", "--compare", "1111", "3333")
    assert "slower" in result.stdout and "No setting, version or machine differs" in result.stdout
    assert "no arm in common" in call("report", "--compare", "1111", "2222").stderr  # that one failed


def test_delete_asks_first_and_makes_the_tables_again(place):
    assert document(call("runs", "delete", "status~memory", "--dry-run", "--json"))["deleted"][0].startswith("2222")
    assert "--yes" in refused("runs", "delete", "status~memory")
    assert len(list((place / "runs").glob("*.json"))) == 4
    done("runs", "delete", "status~memory", "--yes")
    assert len(list((place / "runs").glob("*.json"))) == 3
    assert "memory" not in (place / "summary.csv").read_text()
    assert document(call("runs", "delete", "0000", "--yes", "--json"))["deleted"][0].startswith("0000")
    points, _ = folder.read(place)
    assert points[0].compared_with.speedup == 1.5  # what was compared with it keeps its figures
    assert "nothing was named" in call("runs", "delete", "--yes", "results_dir=results").stderr


# ---- a report as text ------------------------------------------------------------------------------------------------


@pytest.fixture
def reported(place):
    folder.save(place, against(baseline(), "4", arm=ARM | {"model": "m_1"}))


def text(form, *more):
    return done("report", "--format", form, *more).stdout


def test_markdown_is_a_table_for_a_pull_request(reported):
    made = text("md")
    assert made.startswith("2 tables, each with a baseline of its own")
    (row,) = [line for line in made.splitlines() if line.startswith("| E=4") and "150.0" in line][:1]
    head = next(line for line in made.splitlines() if line.startswith("| arm"))
    assert row.count("|") == head.count("|")
    assert "out of" not in made and "failed: no | memory" in made
    assert "selfspec 0.1.0" in made


def test_csv_is_the_record_and_json_has_null_for_what_was_not_measured(reported):
    points, _ = folder.read("results")
    assert text("csv") == columns.text(columns.Summary, [tables.row(point) for point in points])
    assert len(list(csv.reader(io.StringIO(text("csv"))))) == 6
    made = json.loads(text("json"))
    assert [row["ppl"] for row in made["rows"]] == [None] * 5
    assert not any("power_w" in row for row in made["rows"])
    assert made["found"] and made["provenance"][0]["git revision"] == "a" * 10


def test_only_rows_that_are_asked_for_with_the_baseline_that_they_were_compared_with(reported):
    made = json.loads(text("json", "--where", "model=m", "--where", "speedup>1"))
    assert [row["arm"] for row in made["rows"]] == ["baseline", "layer_skip"]
    assert "none of the 5 points is so" in refused("report", "--where", "gate=maxp")
    assert call("report", "--format", "pdf").exit_code == 2


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
def by_category():
    """A baseline and two arms by category, and a third arm of a workload without any."""
    plain = baseline()
    plain = replace(plain, engine=plain.engine | {"categories": statistics.by_category(runs(1.0, [1] * 7))})
    twice = against(plain, "1")
    twice = replace(twice, engine=twice.engine | {"categories": statistics.by_category(runs(2.0, [1, 3, 3]))})
    slower = against(plain, "2", arm=twice.arm | {"k": 3})
    slower = replace(slower, engine=slower.engine | {"categories": statistics.by_category(runs(0.5, [1, 2, 2, 2]))})
    return sources.of_points([plain, twice, slower, against(plain, "3", arm=twice.arm | {"k": 2})])


def test_rows_are_compared_with_the_same_category_of_the_baseline(by_category):
    rows = {(row["point"][:1], row["category"]): row for row in tables.category_rows(by_category.points)}
    assert len(rows) == 9
    ours = rows["1", "math"]
    assert ours["speedup"] == pytest.approx(2.0) and ours["low"] < 2.0 < ours["high"]
    assert ours["tok_step"] == pytest.approx(3.0) and ours["accepted"] == [1.0, 1.0]
    assert rows["2", "translation"]["speedup"] == pytest.approx(0.5)
    assert (rows["0", "all"]["speedup"], rows["0", "all"]["tok_step"]) == (None, 1.0)


def test_the_report_by_category_has_a_line_for_each_and_one_for_all(by_category):
    ((_, head, body, notes),) = table.matrices(by_category)
    assert [line[0] for line in body] == ["math", "translation", "all"]
    assert head[:4] == ["category", "requests", "plain tok/s", "A speedup"]
    assert body[0][3].startswith("2.00x (") and body[0][4:6] == ["3.00", "100% 100%"]
    assert body[1][6].startswith("0.50x (")
    assert [note[:2] for note in notes] == ["A:", "B:"]
    ((_, _, body, _), *_) = table.matrices(sources.of_points(by_category.points[1:]))
    assert body[0][:3] == ["math", "", ""]  # the baseline's point is not there
    assert "| translation" in table.by_category(by_category, Format.md)
    lines = list(csv.DictReader(io.StringIO(table.by_category(by_category, Format.csv))))
    assert len(lines) == 9 and {line["arm"] for line in lines} > {"baseline"}
    assert len(json.loads(table.by_category(by_category, Format.json))) == 9
    assert "no point has categories" in said(ConfigError, table.matrices, sources.of_points([baseline()]))


@pytest.mark.slow
def test_the_page_draws_each_category_with_its_interval(by_category):
    (figure,) = [one for one in figures.of_sources(by_category) if one.name == "categories"]
    (panel,) = figure.panels
    first = panel.data[0]
    assert first["series"] == panel.data[2]["series"]
    assert (first["category"], first["speedup"], first["accepted"]) == ("math", 2.0, 1.0)
    assert first["low"] < first["high"] and len(panel.data) == 6 and len(panel.colours) == 2
    json.dumps(figure.spec())
