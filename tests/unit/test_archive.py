"""A results folder as one file: read like the folder, written by one command, and never written into."""

import json
import lzma
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from commands import call, done, refused
from points import against, baseline, failed
from test_quality import finding

from selfspec_cli.config.schema import ConfigError
from selfspec_cli.record import archive, folder, quality
from selfspec_cli.report import compare, sources

PUBLISHED = Path(__file__).parents[2] / "results" / "published"


@pytest.fixture
def results(tmp_path, monkeypatch):
    """A folder of three points, a finding and tables, packed beside it."""
    monkeypatch.chdir(tmp_path)
    base = replace(baseline(), arm_key="a" * 12)
    for made in (base, against(base), failed("2", number=2)):
        folder.save("mine", made)
    folder.save_finding("mine", finding())
    folder.export("mine")
    assert archive.pack(Path("mine"), Path("mine.jsonl.xz")) == 4
    return Path("mine.jsonl.xz")


def test_an_archive_is_read_like_the_folder(results):
    assert folder.read(results) == folder.read("mine")
    assert quality.read(results) == quality.read("mine") and len(quality.read(results).findings) == 1
    one, other = sources.read(results), sources.read("mine")
    assert (one.points, one.rows, one.targets) == (other.points, other.rows, other.targets)
    listed = json.loads(call("runs", "list", "speedup>1", f"results_dir={results}", "--json").stdout)["points"]
    assert [row["speedup"] for row in listed] == [1.5]
    assert "1.50x" in call("report", "--format", "md", f"results_dir={results}").stdout
    made = compare.compare(("mine", str(results)), "nowhere")
    assert [pair.ratio for pair in made.pairs] == [1.0, 1.0] and made.differing == {}


def test_an_archive_may_hold_several_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a/one", "a/two"):
        folder.save(Path("both") / name, baseline(name[-1]))
    archive.pack(Path("both"), Path("published/both.jsonl.xz"))
    inner = Path("published/both.jsonl.xz/a")
    assert sources.folders(Path("published")) == [inner / "one", inner / "two"] == sources.folders(inner)
    assert [point.key for point in folder.read(inner / "two")[0]] == [baseline("o").key]
    assert sources.read("published").places == ["both/a/one", "both/a/two"]
    shown = call("report", "results_dir=published", "--out", "page").stdout
    assert "published holds no points of its own: these are of 2 results folders below it" in " ".join(shown.split())
    assert sources.folders(inner / "one") == [inner / "one"] and not archive.is_folder(inner / "on")


def test_the_same_files_give_the_same_bytes_and_made_tables_are_left_out(results):
    again = Path("again.jsonl.xz")
    for left in ("profiles.csv", "figure.png", ".lock"):
        (Path("mine") / left).write_text("x")
    done("runs", "export", "results_dir=mine", "--archive", str(again))
    assert again.read_bytes() == results.read_bytes()
    lines = [json.loads(line) for line in lzma.decompress(results.read_bytes()).decode().splitlines()]
    assert [line["file"].partition("/")[0] for line in lines] == ["quality", "runs", "runs", "runs"]
    (Path("mine") / "roc").mkdir()
    (Path("mine") / "roc" / "auc.csv").write_bytes(b"a,b\r\n1,2\r\n")
    archive.pack(Path("mine"), again)
    assert archive.read_text(again / "roc" / "auc.csv") == "a,b\r\n1,2\r\n"


def test_nothing_is_written_into_an_archive(results):
    before, seen = results.read_bytes(), sorted(Path().iterdir())
    for attempt in (
        lambda: folder.save(results, baseline("5")),
        lambda: folder.save_finding(results, finding()),
        lambda: folder.writing(results).__enter__(),
        lambda: folder.export(results),
        lambda: folder.delete(results, ["x"]),
    ):
        with pytest.raises(ConfigError, match=r"mine\.jsonl\.xz is an archive .* only read; name a folder"):
            attempt()
    assert "--out FOLDER" in refused("report", f"results_dir={results}")
    assert (results.read_bytes(), sorted(Path().iterdir())) == (before, seen)


@pytest.mark.parametrize("place", ["gpu.jsonl.xz", "sprint.jsonl.xz/conversations"])
def test_an_archive_without_points_says_what_it_holds_and_how_to_read_it(place):
    """It said "no points yet; make some", which nobody can in an archive, and of a folder in one nothing to find."""
    said = call("report", f"results_dir={PUBLISHED / place}").stderr
    assert "holds no points to report" in said and " more. To read one" in said and "make some" not in said
    command = said.partition("To read one: ")[2].strip()
    assert json.loads(subprocess.run(command, shell=True, capture_output=True, text=True, check=True).stdout)["file"]


def test_tables_of_an_archive_are_made_in_a_folder(results):
    done("runs", "export", f"results_dir={results}", "--out", "tables")
    assert Path("tables/summary.csv").read_text() == Path("mine/summary.csv").read_text()
    assert not Path("tables/runs").exists()


@pytest.mark.parametrize("content", [b"no archive", lzma.compress(b"{}\n"), lzma.compress(b"[")])
def test_what_is_no_archive_is_named(tmp_path, content):
    file = tmp_path / "torn.jsonl.xz"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"torn\.jsonl\.xz is no archive of results"):
        folder.read(file)


def test_what_cannot_be_packed_is_named(tmp_path):
    (tmp_path / "some").mkdir()
    for target, words in (("a.zip", "ends in .jsonl.xz"), ("a.jsonl.xz", "holds nothing")):
        with pytest.raises(ConfigError, match=words):
            archive.pack(tmp_path / "some", tmp_path / target)
    (tmp_path / "some" / "torn.json").write_text("{")
    with pytest.raises(ConfigError, match="is no JSON"):
        archive.pack(tmp_path / "some", tmp_path / "a.jsonl.xz")
    assert not list(tmp_path.glob("*a.jsonl.xz*"))


def test_what_is_published_is_few_files_and_no_tables():
    files = [file for file in PUBLISHED.rglob("*") if file.is_file() and not file.name.startswith(".")]
    assert len(files) <= 60
    assert {file.suffix for file in files} <= {".xz", ".txt", ".md", ".json"}
    assert all(file.name.endswith(archive.SUFFIX) for file in files if file.suffix == ".xz")
