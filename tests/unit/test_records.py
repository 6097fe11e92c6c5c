import csv
import errno
import fcntl
import io
import multiprocessing
import os
import subprocess
import sys
import threading
from dataclasses import replace

import pytest

from selfspec_cli.config.keys import run_key
from selfspec_cli.config.schema import ConfigError, GateConfig, Method, RunConfig
from selfspec_cli.record import records
from selfspec_cli.record.records import AcceptRow, Record

KEY = "0123456789ab"
ROW = Record(run_id="r1", time="2026-11-21T00:00:00+0000", arm="layer_skip", model="m", E=4, k=5, gate="varH",
             threshold=4.5, tok_s_median=101.25, identical=0, key=KEY)  # fmt: skip


@pytest.fixture
def summary(tmp_path):
    return tmp_path / "results" / "summary.csv"


def read(path):
    return records.read(path, Record)


def test_a_row_comes_back_as_it_went(summary):
    records.append(summary, ROW)
    records.append(summary, replace(ROW, model='a, "b"', status="failed: x,\ty"))
    rows, warnings = read(summary)
    assert rows == [ROW, replace(ROW, model='a, "b"', status="failed: x, y")]
    assert warnings == []


def test_the_header_is_the_dataclass_and_a_missing_value_is_an_empty_cell(summary):
    records.append(summary, ROW)
    with summary.open() as file:
        (line,) = csv.DictReader(file)
    assert list(line) == records.header(Record)
    assert line["ppl"] == ""
    assert line["identical"] == "0"
    assert read(summary)[0][0].ppl is None


def test_another_header_is_refused_and_the_file_left_alone(summary):
    summary.parent.mkdir()
    old = "arm,model,colour\nbaseline,m,blue\n"
    summary.write_text(old)
    for action in (lambda: records.append(summary, ROW), lambda: read(summary)):
        with pytest.raises(ConfigError, match=r"unknown columns: colour") as caught:
            action()
        assert "run_id" in str(caught.value)
    assert summary.read_text() == old


def without(text, *names):
    """A file as an earlier version wrote it: the columns `names` are not in it."""
    lines = list(csv.reader(text.splitlines()))
    kept = [place for place, name in enumerate(lines[0]) if name not in names]
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([line[place] for place in kept] for line in lines)
    return out.getvalue()


def test_rows_of_before_a_column_are_read_but_not_added_to(summary):
    records.append(summary, ROW)
    summary.write_text(without(summary.read_text(), "draft_weights"))
    rows, warnings = read(summary)
    assert (rows, warnings) == ([replace(ROW, draft_weights=None)], [])
    with pytest.raises(ConfigError, match="missing columns: draft_weights"):
        records.append(summary, ROW)


@pytest.mark.parametrize("missing", [("draft_weights",), ("power_w", "verification", "E")])
def test_a_file_of_before_a_column_gets_it_and_keeps_its_rows(summary, missing):
    new = summary.with_name("new.csv")
    for path in (summary, new):
        records.append(path, replace(ROW, E=None))
    summary.write_text(without(summary.read_text(), *missing))
    os.chmod(summary, 0o640)
    records.prepare(summary.parent)
    assert summary.read_bytes() == new.read_bytes()  # not a cell is written anew
    assert summary.stat().st_mode & 0o777 == 0o640
    assert list(summary.parent.glob("*.part")) == []
    records.append(summary, replace(ROW, model="next"))
    assert [row.model for row in read(summary)[0]] == ["m", "next"]


def test_what_spoils_a_line_stays_through_an_upgrade_and_spoils_only_it(summary):
    records.append(summary, replace(ROW, model='a, "b"'))
    records.append(summary, ROW)
    head, first, second = without(summary.read_text(), "E").splitlines()
    summary.write_bytes(f"{head}\n{first}\n{head}\n{second[:40]}\n".encode() + b"\xff\n" + second.encode())
    records.prepare(summary.parent)
    rows, warnings = read(summary)
    assert rows == [replace(ROW, model='a, "b"', E=None), replace(ROW, E=None)]
    assert len(warnings) == 2
    assert second[:40].encode() + b"\n\xff\n" in summary.read_bytes()


@pytest.mark.parametrize("text", ["", "run_id,ti", '"run_id","time"'])
def test_a_file_that_append_would_take_or_mend_is_ready(summary, text):
    records.append(summary, ROW)
    head, line = summary.read_text().splitlines()
    quoted = ",".join(f'"{name}"' for name in head.split(","))  # as a spreadsheet saves it
    summary.write_text(f"{quoted}\n{line}\n" if text.startswith('"') else text)
    records.prepare(summary.parent)
    records.append(summary, ROW)
    assert read(summary) == ([ROW] * (2 if text.startswith('"') else 1), [])


def test_nothing_is_changed_where_one_file_is_none_of_ours(summary):
    records.append(summary, ROW)
    older = without(summary.read_text(), "E")
    summary.write_text(older)
    (summary.parent / "accept.tsv").write_text("other\n")
    with pytest.raises(ConfigError, match=r"accept\.tsv has another header"):
        records.prepare(summary.parent)
    assert summary.read_text() == older
    records.prepare(summary.parent / "not there yet")


def test_a_row_that_waited_for_an_upgrade_is_in_the_new_file(summary):
    records.append(summary, ROW)
    new = summary.with_name("new.csv")
    new.write_text(summary.read_text())
    with summary.open("a") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        worker = threading.Thread(target=records.append, args=(summary, ROW), daemon=True)
        worker.start()
        worker.join(0.3)
        new.replace(summary)
    worker.join(10)
    assert read(summary) == ([ROW, ROW], [])


def test_a_write_that_takes_less_than_it_was_given_goes_on(summary, monkeypatch):
    write = os.write
    with monkeypatch.context() as patched:
        patched.setattr(records.os, "write", lambda handle, data: write(handle, data[:7]))
        records.append(summary, ROW)
    assert read(summary) == ([ROW], [])


def test_a_full_disk_leaves_no_half_row(summary, monkeypatch):
    records.append(summary, ROW)
    before, write = summary.read_bytes(), os.write

    def fills_up(handle, data):
        if len(data) < 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(handle, data[:10])

    with monkeypatch.context() as patched:
        patched.setattr(records.os, "write", fills_up)
        with pytest.raises(OSError, match=r"No space left.*summary\.csv"):
            records.append(summary, ROW)
    assert summary.read_bytes() == before
    records.append(summary, ROW)
    assert read(summary) == ([ROW, ROW], [])


def test_the_same_columns_in_another_order_are_refused(summary):
    summary.parent.mkdir()
    summary.write_text(",".join(reversed(records.header(Record))) + "\n")
    with pytest.raises(ConfigError, match="another order"):
        records.append(summary, ROW)


@pytest.mark.parametrize("cut", [1, 5, len(KEY), 60])
def test_a_line_cut_short_spoils_only_itself(summary, cut):
    records.append(summary, ROW)
    records.append(summary, replace(ROW, model="lost"))
    os.truncate(summary, summary.stat().st_size - 1 - cut)
    rows, warnings = read(summary)
    assert rows == [ROW]
    assert len(warnings) == 1
    assert ":3:" in warnings[0]
    records.append(summary, replace(ROW, model="next"))
    assert [row.model for row in read(summary)[0]] == ["m", "next"]


def test_a_last_line_without_its_newline_is_whole(summary):
    records.append(summary, ROW)
    os.truncate(summary, summary.stat().st_size - 1)
    assert read(summary) == ([ROW], [])
    records.append(summary, ROW)
    assert read(summary) == ([ROW, ROW], [])


@pytest.mark.parametrize("size", [0, 3, len(",".join(records.header(Record)))])
def test_a_header_cut_short_is_written_again(summary, size):
    records.append(summary, ROW)
    os.truncate(summary, size)
    records.append(summary, ROW)
    assert read(summary) == ([ROW], [])


def _append_many(path, name, count):
    for number in range(count):
        records.append(path, replace(ROW, model=f"{name}-{number}" + "x" * 300))


def test_processes_that_append_at_once_lose_nothing(summary):
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_append_many, args=(summary, name, 25)) for name in "abcd"]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    rows, warnings = read(summary)
    assert warnings == []
    assert len({row.model for row in rows}) == 100


def test_append_waits_for_the_lock(summary):
    records.append(summary, ROW)
    with summary.open("a") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        worker = threading.Thread(target=records.append, args=(summary, ROW), daemon=True)
        worker.start()
        worker.join(0.3)
        assert worker.is_alive()
        assert len(read(summary)[0]) == 1
    worker.join(10)
    assert len(read(summary)[0]) == 2


def test_accept_rows_are_tab_separated(tmp_path):
    path = tmp_path / "accept.tsv"
    row = replace(records.accept_identity(ROW), rounds=10, drafted=50, accepted=30, accepted_at="10 8 6 4 2")
    records.append(path, row)
    assert records.read(path, AcceptRow) == ([row], [])
    assert path.read_text().splitlines()[0].split("\t") == records.header(AcceptRow)
    assert (row.E, row.gate, row.threshold, row.key) == (4, "varH", 4.5, KEY)


def test_finished_are_the_measured_ones(summary):
    assert records.finished(summary) == set()
    records.append(summary, replace(ROW, key="a" * 12, status="failed: no"))
    records.append(summary, ROW)
    assert records.finished(summary) == {KEY}


def test_identity_says_only_what_the_arm_has():
    cfg = RunConfig(gate=GateConfig(kind="varH"), tau_v=4.0, k=5)
    row = records.identity(cfg, "r", layer=8)
    assert (row.E, row.k, row.head, row.gate, row.threshold, row.key) == (8, 5, "lens", "varH", 4.0, run_key(cfg))
    skip = records.identity(replace(cfg, method=Method.skip, layer=3), "r", layer=8)
    assert (skip.E, skip.k, skip.head, skip.gate, skip.threshold) == (3, None, "lens", None, None)
    baseline = records.identity(replace(cfg, method=Method.baseline), "r", layer=8)
    assert (baseline.E, baseline.k, baseline.head, baseline.gate, baseline.threshold) == (None,) * 5


def test_a_failure_is_one_short_line():
    row = records.failed(replace(ROW), RuntimeError("a\n b" + "c" * 1000))
    assert row.status.startswith("failed: a bc")
    assert len(row.status) < 320
    assert records.failed(replace(ROW), MemoryError()).status == "failed: MemoryError"


def test_a_second_writer_is_refused_with_the_pid_of_the_first(tmp_path):
    code = (
        "import sys; from selfspec_cli.record.records import sweep_lock\n"
        f"with sweep_lock({str(tmp_path)!r}): print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError, match=f"pid {other.pid}"), records.sweep_lock(tmp_path):
            pass
        other.kill()  # a lock dies with its holder
    with records.sweep_lock(tmp_path):
        pass
