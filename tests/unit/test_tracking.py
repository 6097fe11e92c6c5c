"""W&B gets a run for each point, without a network: what it wrote is read back from its own files."""

import json
import re
import struct
import sys
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from points import RUN, against, baseline, drafts, failed

from selfspec_cli import commands, extras
from selfspec_cli.config.schema import ConfigError, RunConfig, TrackerConfig
from selfspec_cli.record import columns, folder, tables, tracking
from selfspec_cli.record.columns import header
from selfspec_cli.record.statistics import ttft
from selfspec_cli.record.tracking import open_tracker
from selfspec_cli.report import make

WANDB = RunConfig(k=5, tracker=TrackerConfig(kind="wandb"))
BLOCK = 32 * 1024
KEYS = ("WANDB_API_KEY", "WANDB_MODE", "WANDB_DIR", "WANDB_ENTITY", "WANDB_PROJECT")


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty folder to work in, without the user's own W&B settings; no server can be reached."""
    for name in KEYS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "staged"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read_back(file):
    """The records of a W&B run file, by kind.

    The file is LevelDB's log: blocks of 32 KiB (the first begins with 7 bytes of W&B's own), and in them fragments of
    records, each after its checksum (4 bytes), length (2) and type: 1 whole, 2 first, 3 middle, 4 last.
    """
    from wandb.proto import wandb_internal_pb2

    data, at, parts, found = file.read_bytes(), 7, [], {}
    assert data.startswith(b":W&B")
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:  # too short for a fragment: padding
            at += BLOCK - at % BLOCK
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        if at + 7 + length > len(data):
            break  # it is not all there yet
        parts.append(data[at + 7 : at + 7 + length])
        at += 7 + length
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(b"".join(parts))
            parts.clear()
            found.setdefault(record.WhichOneof("record_type"), []).append(record)
    return found


def whole(file):
    """The records of a file once the last one is there: W&B's own process may write after `finish` has come back."""
    until = time.monotonic() + 60
    while "exit" not in (found := read_back(file)) and time.monotonic() < until:
        time.sleep(0.1)
    return found


def values(items):
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}


@pytest.mark.slow
def test_what_wandb_wrote_is_what_was_measured(place):
    pytest.importorskip("wandb", reason="wandb is not installed; pip install 'selfspec[track]'")
    base = baseline()
    arm = against(base)
    counted = tuple(replace(repeat, verified=drafts(), drafting=None) for repeat in arm.repeats)
    points = [base, replace(arm, repeats=counted), failed("2")]
    with open_tracker(WANDB, RUN) as tracker:
        for point in points:
            folder.save("results", point)
            tracker.log(point)
        pictures = make.pictures("results", "pictures")
        rows = [*map(tables.row, points), tables.of_arm(arm.arm)]  # the last as of an arm that was scored alone
        tracker.report("sweep", Path("results"), rows, pictures)
    (message,) = tracker.messages
    assert "4 runs" in message and f"wandb sync {place}/wandb/offline-run-*{RUN}" in message
    files = place.glob("wandb/offline-run-*/*.wandb")
    written = {file.parent.name.split("-", 3)[-1]: whole(file) for file in files}
    assert sorted(written) == sorted([*(point.id for point in points), f"report-{RUN}"])
    for found in written.values():
        assert found["run"][0].run.run_group == RUN

    arm, row = written[points[1].id], tables.row(points[1])
    config = values(arm["run"][0].run.config.update)
    assert config["k"] == 5 and config["digests"] == {"model": "m0"} and config["arm"]["gate"] == "varH"
    summary = {}
    for record in arm["summary"]:
        summary |= values(record.summary.update)
    names = ("speedup", "tok_s_median", "accept_rate", "baseline")
    assert [summary[name] for name in names] == [getattr(row, name) for name in names]
    assert "power_w" not in summary  # it was not measured
    logged = {}
    for record in arm["history"]:
        logged |= values(record.history.item)
    first = [1000 * ttft(request) for repeat in points[1].repeats for request in repeat.requests]
    counts, bins = (logged[f"latency/ttft_ms.{part}"] for part in ("values", "bins"))
    assert sum(counts) == len(first)
    assert (bins[0], bins[-1]) == pytest.approx((min(first), max(first)))
    assert {name.partition(".")[0] for name in logged} >= {f"latency/{name}_ms" for name in ("tpot", "itl", "e2e")}
    assert arm["artifact"][0].artifact.type == "point"

    report = written[f"report-{RUN}"]
    entries = {entry.path for entry in report["artifact"][0].artifact.manifest.contents}
    assert {f"runs/{point.id}.json" for point in points} <= entries or report["artifact"][-1].artifact.type == "record"
    (table,) = place.glob("wandb/*report*/files/media/table/points*.table.json")
    document = json.loads(table.read_text())
    assert set(header(columns.Summary)) < set(document["columns"]) < set(header(columns.Record))
    assert len(document["columns"]) == len(set(document["columns"]))  # key and point were there twice
    resolved = values(report["run"][0].run.config.update)
    assert (resolved["command"], resolved["k"], resolved["workload"]["batch"]) == ("sweep", 5, 1)
    lines = [dict(zip(document["columns"], line, strict=True)) for line in document["data"]]
    assert [line["tok_s_median"] for line in lines[:2]] == pytest.approx([100.0, 150.0])
    assert lines[1]["delta_ppl"] == 0.0 and lines[2]["tok_s_median"] is None
    assert (lines[0]["accept_rate"], lines[1]["accept_rate"]) == (None, pytest.approx(row.accept_rate))
    assert row.accept_rate > 0
    assert [line["point"] for line in lines] == [row.point for row in rows]
    drawn = {file.stem.partition("_")[0] for file in place.glob("wandb/*report*/files/media/images/figures/*.png")}
    assert {"speedup", "latency"} <= drawn


def test_every_command_that_measures_opens_the_tracker():
    """Fitting measures nothing that a row would show."""
    texts = {file.stem: file.read_text() for file in Path(commands.__file__).parent.glob("*.py")}
    assert {name for name, text in texts.items() if "is_tracked=False" in text} == {"fit"}
    assert not [name for name, text in texts.items() if "with at_work(" in text]
    assert sum(text.count("with on_engines(") + text.count("with tracked(") for text in texts.values()) >= 9


@pytest.fixture
def stub(place, monkeypatch):
    """A stand-in for wandb that says how it was started; (its starts, the processes that would upload)."""
    starts, processes = [], []

    run = MagicMock(dir=str(place / "wandb" / "offline-run-1" / "files"))

    def init(**options):
        starts.append(options)
        Path(run.dir).mkdir(parents=True, exist_ok=True)
        return run

    monkeypatch.setitem(sys.modules, "wandb", MagicMock(init=init))
    monkeypatch.setattr(tracking.subprocess, "Popen", lambda words, **more: processes.append((words, more)))
    return starts, processes


@pytest.mark.parametrize(
    ("env", "mode", "uploads"),
    [
        ({}, "offline", 0),
        ({"WANDB_API_KEY": "x"}, "offline", 1),
        ({"WANDB_API_KEY": "x", "WANDB_MODE": "offline"}, "offline", 0),
        ({"WANDB_API_KEY": "x", "WANDB_MODE": "disabled"}, "disabled", 0),
    ],
)
def test_a_sweep_never_waits_for_a_network(stub, monkeypatch, env, mode, uploads):
    """Whatever the user set, runs are written offline; with a key a process of its own uploads them afterwards."""
    starts, processes = stub
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with open_tracker(WANDB, "run-1") as tracker:
        tracker.log(baseline())
        assert processes == []
    assert [start["mode"] for start in starts] == [mode]
    assert len(processes) == uploads
    if uploads:
        words, options = processes[0]
        assert words[1:4] == ["-m", "wandb", "sync"] and options["start_new_session"]
        assert "being uploaded" in tracker.messages[0]
    else:
        assert len(tracker.messages) == (mode == "offline")


def test_an_upload_that_cannot_start_is_a_message_and_hides_no_error(stub, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "x")

    def refuse(*words, **more):
        raise OSError("no processes left")

    monkeypatch.setattr(tracking.subprocess, "Popen", refuse)
    with open_tracker(WANDB, "run-1") as tracker:
        tracker.log(baseline())
    assert tracker.messages == ["W&B: no processes left"]
    with pytest.raises(RuntimeError, match="mine"), open_tracker(WANDB, "run-1"):
        raise RuntimeError("mine")


def test_no_tracker_imports_nothing(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it would fail
    with open_tracker(RunConfig(), "run-1") as tracker:
        tracker.log(baseline())
    assert tracker.messages == []
    with pytest.raises(ConfigError, match=re.escape(extras.install("track"))), open_tracker(WANDB, "run-1"):
        pass
