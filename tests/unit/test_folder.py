"""A results folder: nothing is lost or torn; and an archive of it, which is read like the folder."""

import csv
import errno
import json
import lzma
import multiprocessing
import os
import resource
import signal
import subprocess
import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from commands import call, done, refused
from points import against, baseline, drafts, failed, point, repeat
from refusals import said
from test_points import finding

from selfspec_cli.config.schema import ConfigError
from selfspec_cli.record import archive, folder, quality
from selfspec_cli.record.folder import RecordError
from selfspec_cli.report import compare, sources
from selfspec_cli.whole import written

BASE = baseline()
ARM = against(BASE)


def lines(results, name="summary.csv"):
    with (Path(results) / name).open(newline="") as file:
        return list(csv.DictReader(file, delimiter="\t" if name.endswith(".tsv") else ","))


def names(results):
    return sorted(path.name for path in (Path(results) / "runs").iterdir())


def test_a_point_is_one_file_and_a_line_of_each_table_once_its_command_ends(tmp_path):
    drafted = replace(ARM, repeats=(repeat(150.0, drafts()),))
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / f".{ARM.id}.99999.part").write_text("of a process that was killed")
    with suppress(KeyboardInterrupt), folder.writing(tmp_path):
        for made in (BASE, drafted):
            assert folder.save(tmp_path, made) == tmp_path / "runs" / f"{made.id}.json"
        assert [line["point"] for line in lines(tmp_path)] == [BASE.id, drafted.id]  # while the command runs
        raise KeyboardInterrupt
    assert folder.read(tmp_path) == ([BASE, drafted], [])
    assert names(tmp_path) == sorted(f"{made.id}.json" for made in (BASE, drafted))
    assert [line["point"] for line in lines(tmp_path)] == [BASE.id, drafted.id]
    assert [(line["drafted"], line["accepted"]) for line in lines(tmp_path, "accept.tsv")] == [("50", "30")]


def test_points_are_in_the_order_in_which_they_were_measured(tmp_path):
    later = point("0", run_id="20261122-000000-aaaa")
    for made in (later, replace(ARM, number=2), BASE):
        folder.save(tmp_path, made)
    assert folder.read(tmp_path)[0] == [BASE, replace(ARM, number=2), later]
    assert folder.read(tmp_path, {BASE.key})[0] == [BASE, later]
    assert folder.read(tmp_path, {later.id})[0] == [later]


def test_a_point_is_never_written_twice(tmp_path):
    file = folder.save(tmp_path, BASE)
    before = file.read_bytes()
    assert "never written twice" in said(RecordError, folder.save, tmp_path, replace(BASE, seconds=9.0))
    assert file.read_bytes() == before
    assert names(tmp_path) == [file.name]


def test_a_point_that_was_left_without_its_line_has_it_once_another_command_begins(tmp_path):
    folder.save(tmp_path, BASE)
    before = (tmp_path / "summary.csv").read_bytes()
    folder.save(tmp_path, ARM)
    (tmp_path / "summary.csv").write_bytes(before)  # killed between the point and its line
    with folder.writing(tmp_path):
        assert [line["point"] for line in lines(tmp_path)] == [BASE.id, ARM.id]


def test_files_that_are_no_points_are_one_warning_and_left_alone(tmp_path):
    folder.save(tmp_path, BASE)
    for number in range(76):
        (tmp_path / "runs" / f"{number}.json").write_text("garbage")
    points, warnings = folder.read(tmp_path)
    assert points == [BASE]
    assert len(warnings) == 1
    assert "and 73 more" in warnings[0]


@pytest.fixture
def small_files():
    """Files may grow to 600 bytes and no further, as on a disk that is full."""
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def fill():
        resource.setrlimit(resource.RLIMIT_FSIZE, (600, limits[1]))

    yield fill
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_is_a_clear_error_and_leaves_nothing_behind(tmp_path, small_files):
    folder.save(tmp_path, BASE)
    folder.export(tmp_path)
    before = (tmp_path / "summary.csv").read_bytes()
    small_files()
    message = said(RecordError, folder.save, tmp_path, ARM)
    assert ".csv could not be written" in said(RecordError, folder.export, tmp_path)
    assert f"{tmp_path}" in message and "free some space" in message and "results_dir=NAME" in message
    assert names(tmp_path) == [f"{BASE.id}.json"]
    assert (tmp_path / "summary.csv").read_bytes() == before


def _as_nobody(action, answer):
    if os.geteuid() == 0:
        os.setuid(65534)
    try:
        answer.put((None, action()))
    except Exception as error:
        answer.put((type(error).__name__, str(error)))


def test_a_read_only_folder_is_refused_with_its_name_and_what_to_do():
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o555)
        for action, kind in (
            (lambda: folder.writing(place).__enter__(), "SettingsError"),
            (lambda: folder.writing(f"{place}/deeper/still").__enter__(), "SettingsError"),
            (lambda: folder.save(place, BASE), "RecordError"),
        ):
            answer = context.Queue()
            worker = context.Process(target=_as_nobody, args=(action, answer))
            worker.start()
            raised, message = answer.get(timeout=20)
            worker.join()
            assert raised == kind
            assert place in message and "make it writable" in message and "results_dir=NAME" in message
        assert os.listdir(place) == []


def test_a_forked_engine_that_outlives_its_command_does_not_hold_the_folder(tmp_path):
    context = multiprocessing.get_context("fork")
    begun, ended = context.Event(), context.Event()

    def engine():
        begun.set()
        ended.wait(20)

    with folder.writing(tmp_path):
        forked = context.Process(target=engine)
        forked.start()
        assert begun.wait(20)
        with pytest.raises(ConfigError, match=f"pid {os.getpid()}"), folder.writing(tmp_path):
            pass
    try:
        with folder.writing(tmp_path):
            assert forked.is_alive()
    finally:
        ended.set()
        forked.join()


def test_a_name_that_is_no_utf_8_loses_no_point(tmp_path):
    """Python reads the bytes of such a file name as surrogates, which UTF-8 cannot hold; JSON can escape them."""
    made = failed(reason="no model in /m/\udcff", command=["selfspec", "bench", "model=/m/\udcff"])
    folder.save(tmp_path, made)
    assert folder.read(tmp_path) == ([made], [])
    assert folder.export(tmp_path) == (1, [])
    (row,) = lines(tmp_path)
    assert row["status"] == r"failed: no model in /m/\udcff"


# ---- a file is replaced as a whole -----------------------------------------------------------------------------------


def test_a_file_is_replaced_when_all_of_it_is_written_and_is_as_readable_as_any_other(tmp_path):
    file = tmp_path / "made" / "file.json"
    for text in ("first", "second"):
        with written(file) as part:
            part.write_text(text)
            part.chmod(0o600)
            assert part.parent == file.parent  # a file of another disk could not replace it in one step
        assert file.read_text() == text
    assert list(file.parent.iterdir()) == [file]
    (tmp_path / "usual").touch()
    assert file.stat().st_mode == (tmp_path / "usual").stat().st_mode


@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), KeyboardInterrupt()], ids=repr)
def test_a_full_disk_or_an_interrupt_leaves_the_old_file_and_nothing_else(tmp_path, failure):
    file = tmp_path / "file.json"
    file.write_text("good")

    def fill(part):
        part.write_text("half")
        raise failure

    with pytest.raises(type(failure)), written(file) as part:
        fill(part)
    assert file.read_text() == "good"
    assert list(tmp_path.iterdir()) == [file]


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
    done("runs", "export", f"results_dir={results}", "--out", "tables")
    assert Path("tables/summary.csv").read_text() == Path("mine/summary.csv").read_text()
    assert not Path("tables/runs").exists()


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
    shown = call("report", f"results_dir={PUBLISHED / place}").stderr
    assert "holds no points to report" in shown and " more. To read one" in shown and "make some" not in shown
    command = shown.partition("To read one: ")[2].strip()
    assert json.loads(subprocess.run(command, shell=True, capture_output=True, text=True, check=True).stdout)["file"]


@pytest.mark.parametrize("content", [b"no archive", lzma.compress(b"{}\n"), lzma.compress(b"[")])
def test_what_is_no_archive_is_named(tmp_path, content):
    file = tmp_path / "torn.jsonl.xz"
    file.write_bytes(content)
    assert "torn.jsonl.xz is no archive of results" in said(ConfigError, folder.read, file)


def test_what_cannot_be_packed_is_named(tmp_path):
    some, target = tmp_path / "some", tmp_path / "a.jsonl.xz"
    some.mkdir()
    assert "ends in .jsonl.xz" in said(ConfigError, archive.pack, some, tmp_path / "a.zip")
    assert "holds nothing" in said(ConfigError, archive.pack, some, target)
    (some / "torn.json").write_text("{")
    assert "is no JSON" in said(ConfigError, archive.pack, some, target)
    assert not list(tmp_path.glob("*a.jsonl.xz*"))


def test_what_is_published_is_few_files_and_no_tables():
    files = [file for file in PUBLISHED.rglob("*") if file.is_file() and not file.name.startswith(".")]
    assert len(files) <= 60
    assert {file.suffix for file in files} <= {".xz", ".txt", ".md", ".json"}
    assert all(file.name.endswith(archive.SUFFIX) for file in files if file.suffix == ".xz")
