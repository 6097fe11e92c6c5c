"""`selfspec load` with servers that it starts: processes without a model stand in for vLLM's."""

import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from commands import call, document, done, refused, until

from selfspec_cli import children
from selfspec_cli.config.schema import LoadConfig
from selfspec_cli.engine import cores, server
from selfspec_cli.engine.server import open_server
from selfspec_cli.extras import install
from selfspec_cli.record import folder, tables
from selfspec_cli.stages import load

pytestmark = pytest.mark.slow
TOY = Path(__file__).with_name("openai_server.py")
WORDS = [
    "gate=maxp",
    "engine.max_num_seqs=4",
    "workload.num_prompts=3",
    "workload.output_len=8",
    "workload.input_len=8",
    "load.requests=6",
    "load.repeats=1",
    "warmup=0",
    "load.clients=1,2",
]


@pytest.fixture
def toys(monkeypatch):
    """Servers without a model; gives the configs that they were started for."""
    started = []

    def deployment(cfg, scratch):
        started.append(cfg)
        return SimpleNamespace(command=lambda: [sys.executable, str(TOY)], environment={})

    monkeypatch.setattr(server, "deployment", deployment)
    return started


CFG = SimpleNamespace(engine=SimpleNamespace(enable_prefix_caching=False), load=LoadConfig())


def processes(word):
    """Processes of this machine, this one left out, that have a word in their command line."""
    found = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if word.encode() in place.read_bytes() and int(place.parent.name) != os.getpid():
                found.append(int(place.parent.name))
        except OSError:
            continue
    return found


@pytest.mark.parametrize("command", ["load", "check"])
def test_without_locust_no_server_starts(toys, tmp_path, monkeypatch, command):
    monkeypatch.setattr(load, "find_spec", lambda _: None)
    words = WORDS
    if command == "check":
        case = {"name": "one", "arm": ["gate=maxp"], "workload": ["load.clients=1"], "reach": {"failed_requests": 0}}
        file = tmp_path / "served.yaml"
        file.write_text(json.dumps({"title": "T", "served": True, "cases": [case]}), encoding="utf-8")
        words = [str(file)]
    said = refused(command, *words, f"results_dir={tmp_path / 'results'}")
    assert f"locust is not installed: {install('load')}" in said
    assert not toys


def test_only_a_server_that_has_answered_is_given_time_to_end(toys, tmp_path, monkeypatch):
    """vLLM drops a signal while it waits for its engine, and would be waited for until its start is over."""
    given, end = [], children.end
    monkeypatch.setattr(children, "end", lambda process, wish, seconds: given.append(seconds) or end(process, wish, 0))
    with open_server(CFG, [], tmp_path / "log", tmp_path) as answering:
        pass
    deaf = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(600)"
    interrupt = Mock(side_effect=KeyboardInterrupt)  # whether this process takes SIGINT is up to who started it
    monkeypatch.setattr(server.interrupts, "check", interrupt)
    made = SimpleNamespace(command=lambda: [sys.executable, "-c", deaf], environment={})
    monkeypatch.setattr(server, "deployment", lambda *words: made)
    with pytest.raises(KeyboardInterrupt), open_server(CFG, [], tmp_path / "log", tmp_path):
        pass
    assert given == [server.STOP_SECONDS, server.GIVE_UP_SECONDS] and server.GIVE_UP_SECONDS < 15
    assert answering.process.poll() is not None and not processes("time.sleep(600)")


@pytest.mark.skipif(find_spec("locust") is None, reason="pip install 'selfspec[load]'")
def test_each_arm_has_one_server_for_all_loads_and_none_is_left(toys, tmp_path, monkeypatch):
    monkeypatch.setattr(cores, "LEAST_SECONDS", 0.01)  # these loads are short
    results = tmp_path / "results"
    more = ("load.ttft_limit=60000", "--json", "--", "--seed", "7")
    shown = document(done("load", *WORDS, f"results_dir={results}", *more))
    assert (shown["measured"], shown["failed"]) == (4, 0) and Path(shown["page"]).is_file()
    assert [cfg.method for cfg in toys] == ["baseline", "layer_skip"]
    points, _ = folder.read(results)
    rows = [tables.row(point) for point in points]
    assert [(row.arm, row.clients) for row in rows] == [*product(("baseline", "layer_skip"), (1, 2))]
    for point, row in zip(points, rows, strict=True):
        assert (sum(len(repeat.requests) for repeat in point.repeats), row.failed_requests, row.kv_blocks) == (6, 0, 77)
        assert row.goodput == pytest.approx(row.req_s)
        assert row.cpu_own is not None and row.cpu_others is not None
        assert point.engine["rss_mib"] > 1 and len(point.repeats) == 1
    for row in rows[2:]:
        assert row.speedup and row.baseline in {point.id for point in points[:2]}
        assert (row.identical, row.outputs) == (3, 3)
    assert points[2].repeats[0].drafting["drafted"] == 12  # by the counters of the server's own worker
    logs = sorted(path.name for path in (results / "logs").glob("*-server-*.log"))
    assert len(logs) == 2
    assert not processes(str(TOY))


def test_a_server_that_does_not_start_fails_its_points_with_the_reason(toys, tmp_path):
    result = call("load", *WORDS, f"results_dir={tmp_path}/r", "--json", "--", "--broken")
    assert result.exit_code == 1
    points, _ = folder.read(tmp_path / "r")
    assert len(points) == 4 and not any(point.ok for point in points)
    assert "the server ended with exit code 1" in points[0].reason
    assert "ValueError: no such option" in points[0].reason
    assert "its baseline failed" in points[-1].reason


def test_the_reason_is_what_went_wrong_and_not_an_error_that_a_warning_names(tmp_path):
    log = tmp_path / "log"
    log.write_text(
        "(APIServer pid=1) WARNING [utils.py:2] This can cause errors like `OSError: [Errno 24]`. Raise it\n"
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig\n"
        "  Value error, Model Runner V1 does not support: adaptive draft verification\n"
    )
    assert server.tail(log) == (
        ": ValidationError: 1 validation error for VllmConfig · Value error, Model Runner V1 does not support: "
        f"adaptive draft verification; all of it: {log}"
    )


def test_a_process_ends_with_the_one_that_started_it(tmp_path):
    words = f"[{sys.executable!r}, '-c', 'import time; time.sleep(600)', {str(tmp_path)!r}]"
    parent = (
        "import os, sys\nfrom selfspec_cli import children\n"
        f"made = children.start({words}, open(os.devnull, 'wb'), os.environ)\nprint(made.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    child = int(process.stdout.readline())
    until(lambda: b"prctl" not in Path(f"/proc/{child}/cmdline").read_bytes())
    process.kill()
    process.wait()
    until(lambda: child not in processes(str(tmp_path)))  # a child of no process of ours: nobody leaves it a zombie


@pytest.mark.parametrize(
    ("first", "seconds", "by"),
    [
        ("signal.signal(signal.SIGINT, signal.SIG_IGN)", 0.2, signal.SIGKILL),  # it does not want to end
        ("pass", 60, signal.SIGINT),
    ],
)
def test_a_process_is_asked_to_end_also_behind_an_ampersand_and_then_it_is_ended(tmp_path, first, seconds, by):
    sleeper = f"import signal, time; {first}; print('up', flush=True); time.sleep(600)"
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell leaves it for what runs behind `&`
    try:
        with open(tmp_path / "out", "wb") as out:
            process = children.start([sys.executable, "-c", sleeper], out, os.environ)
    finally:
        signal.signal(signal.SIGINT, before)
    until(lambda: b"up" in (tmp_path / "out").read_bytes())
    children.end(process, signal.SIGINT, seconds)
    assert process.returncode == -by
