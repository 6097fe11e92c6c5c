"""Clients of a load test, against a server that knows no model: real locust, real HTTP, times that can be checked."""

import ast
import hashlib
import json
import signal
import threading
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from commands import jsonl, until
from openai_server import serve

from selfspec_cli import interrupts
from selfspec_cli.config.schema import LoadConfig, RunConfig, WorkloadConfig
from selfspec_cli.engine import clients, server
from selfspec_cli.engine.clients import ClientsError, Job, Run, Sample
from selfspec_cli.record.point import median
from selfspec_cli.stages import load

TOKENS = [f'data: {{"choices": [{{"text": "{letter}"}}]}}' for letter in "abc"]
USAGE = 'data: {"choices": [], "usage": {"completion_tokens": 3, "prompt_tokens": 2}}'
DONE = "data: [DONE]"
BODY = {"model": "toy", "max_tokens": 8, "stream": True, "temperature": 0}


def with_locust(test):
    """A slow test, if locust is there. It is looked for and not imported: that would replace sockets by gevent's."""
    needs_locust = pytest.mark.skipif(find_spec("locust") is None, reason="pip install 'selfspec[load]'")
    return pytest.mark.slow(needs_locust(test))


@pytest.fixture
def toy():
    url, asked, end = serve()
    yield SimpleNamespace(url=url, asked=asked)
    end()


def nothing(*_):
    return None


def server_at(url):
    """A server of the baseline, in this process."""
    nobody = SimpleNamespace(pid=-1, poll=lambda: None)
    return server.Server(url, "toy", RunConfig(method="baseline"), nobody, Path("log"))


def config(tmp_path, **changes):
    """A load test of the toy server with the prompts of a file."""
    questions = [{"turns": [f"question {n}"], "category": "ab"[n % 2]} for n in range(4)]
    file = jsonl(tmp_path / "questions.jsonl", questions)
    work = WorkloadConfig(input_len=8, output_len=8, num_prompts=4, prompts=file)
    fields = {"clients": 2, "requests": 8, "repeats": 2} | changes
    return RunConfig(method="baseline", workload=work, load=LoadConfig(**fields), results_dir=str(tmp_path / "results"))


@with_locust
def test_a_closed_loop_keeps_each_client_at_one_request_and_tells_failures_apart(toy, tmp_path):
    prompts = [{"prompt": [n]} for n in (1, 2, 13, 14)]
    failed = 'data: {"error": {"message": "out of memory"}}'
    odd = [[*TOKENS, failed, DONE, ""], ["data: null", DONE], ['{"detail": "no"}']]
    prompts += [*({"prompt": [1], "lines": lines} for lines in odd), {"prompt": [17]}]
    run = clients.run(Job(toy.url, BODY, prompts, clients=3, requests=24), tmp_path, check=nothing)
    assert sorted(one.number for one in run.samples) == list(range(24))
    assert {one.number % 8 for one in run.good} == {0, 1}
    assert {one.number % 8: one.error.split(":")[0] for one in run.failed} == {
        2: "HTTP 400",
        3: "IncompleteRead",
        4: "the server said",
        5: "an event that cannot be read",
        6: "no event",
        7: "RemoteDisconnected",  # the connection is closed without an answer
    }
    assert {one.error for one in run.failed if one.number % 8 == 4} == {"the server said: out of memory"}
    assert len(toy.asked) == 24
    for one in run.good:
        assert (one.tokens, one.prompt_tokens, len(one.events)) == (8, 1, 4)
        # The server waits 2 ms before each of four outputs.
        assert one.events[0] - one.sent >= 0.002
        assert one.events[-1] - one.sent >= 0.008
    assert any(one.events[0] < one.events[-1] for one in run.good)  # read as it came, and not at its end
    for new in run.good:
        assert sum(one.sent <= new.sent < one.events[-1] for one in run.good) <= 3
    assert len({one.digest for one in run.good if one.number % 8 == 0}) == 1
    assert clients.read(tmp_path / "samples.jsonl").good == run.good


@with_locust
def test_an_open_loop_sends_at_its_moments_whatever_the_server_does(toy, tmp_path):
    moments = [0.0, 0.0, 0.2, 0.4, 0.4]
    slow = [{"prompt": [15]}]  # two seconds each: all are asked before the first has ended
    run = clients.run(Job(toy.url, BODY, slow, arrivals=moments), tmp_path, check=nothing)
    known = sorted(run.good, key=lambda one: one.number)
    assert len(known) == 5 and all(one.late >= 0 for one in known)
    began = known[0].sent - known[0].late
    for moment, one in zip(moments, known, strict=True):
        assert one.sent >= began + moment - 0.2
    assert max(one.sent for one in known) < min(one.events[0] for one in known)


@with_locust
def test_clients_of_several_processes_share_the_requests_and_begin_together(toy, tmp_path):
    prompts = [{"prompt": [n]} for n in (1, 2, 3)]
    job = Job(toy.url, BODY, prompts, clients=3, requests=11, processes=2)
    ends = []
    run = clients.run(job, tmp_path / "closed", check=nothing, progress=lambda ended, _: ends.append(ended))
    assert sorted(one.number for one in run.good) == list(range(11)) and len(toy.asked) == 11
    assert {(one.number % 3, one.digest) for one in run.good} == {
        (n, one.digest) for n in range(3) for one in run.good if one.number == n
    }
    first = [min(one.sent for one in run.good if one.number % 2 == part) for part in range(2)]
    assert abs(first[0] - first[1]) < 0.5  # they waited for each other
    assert run.cpu is not None
    left = {path.name for path in (tmp_path / "closed").iterdir()}
    assert left == {"samples.jsonl", "job.json", "clients.log"}
    job = Job(toy.url, BODY, prompts, arrivals=[0.0, 0.1, 0.2], processes=2)
    opened = clients.run(job, tmp_path / "open", check=nothing)
    assert sorted(one.number for one in opened.good) == list(range(3))


@with_locust
def test_where_one_of_several_processes_cannot_run_the_others_end(toy, tmp_path, monkeypatch):
    start, environments = clients.children.start, iter([{}, {"SELFSPEC_LOAD": "{}"}])
    monkeypatch.setattr(clients.children, "start", lambda words, out, own: start(words, out, own | next(environments)))
    job = Job(toy.url, BODY, [{"prompt": [1]}], clients=2, requests=4, processes=2)
    with pytest.raises(ClientsError, match="the clients failed"):
        clients.run(job, tmp_path, check=nothing)


def test_processes_of_clients_leave_the_server_most_of_the_cores(monkeypatch):
    for cores, asked, wanted in ((2, 256, 1), (16, 256, 4), (16, 64, 1), (16, 65, 2), (64, 256, 4), (8, 256, 2)):
        monkeypatch.setattr(clients.os, "cpu_count", lambda cores=cores: cores)
        assert clients.processes_for(asked) == wanted


def test_a_server_is_asked_for_its_counters(toy):
    found = server_at(toy.url)
    counts = found.verify_counts()
    assert (counts.rounds, counts.places, counts.accepted, counts.accepted_at) == (7, 28, 14, [9, 5])
    assert load.kv_blocks(found.metrics()) == 77
    assert found.drafting() is None and found.resident_mib() is None


@pytest.fixture
def loader(tmp_path, monkeypatch):
    """Measures servers with four prompts of two categories."""
    prompts = load.Prompts([{"prompt": [n]} for n in range(4)], [*"abab"])
    monkeypatch.setattr(load, "of_model", lambda cfg: prompts)
    return load.Loader(tmp_path / "raw")


@with_locust
def test_two_servers_are_measured_with_the_same_requests(toy, tmp_path, loader):
    slower, asked_of_slower, end = serve(step=0.02)
    cfg = config(tmp_path)
    try:
        base, found = (loader(cfg, server_at(url)) for url in (slower, toy.url))
    finally:
        end()
    assert median(found.tok_s) > median(base.tok_s)
    assert sum(len(repeat.requests) for repeat in found.repeats) == 16 and found.outputs == base.outputs
    assert found.engine["failed_requests"] == 0 and set(found.engine["categories"]) == {"a", "b", "all"}
    # A baseline and an arm: two runs of eight requests each, and a warm-up in which each client asked once.
    assert sorted(json.dumps(body) for _, body in asked_of_slower) == sorted(json.dumps(body) for _, body in toy.asked)
    assert all(body["ignore_eos"] and body["max_tokens"] == 8 for _, body in toy.asked)
    assert Path(found.engine["samples"], "repeat-2", "samples.jsonl").is_file()


@with_locust
def test_a_share_of_the_saturation_is_measured_once_for_all_arms(toy, tmp_path, loader):
    found = server_at(toy.url)
    cfg = config(tmp_path, share=0.5, clients=2, requests=6, repeats=1)
    first, again = (loader(cfg, found).engine for _ in range(2))
    assert len(loader.saturation) == 1
    assert first["rate"] == again["rate"] == 0.5 * first["saturation_req_s"]
    assert (tmp_path / "raw" / "001" / "saturation" / "samples.jsonl").is_file()
    assert not (tmp_path / "raw" / "002" / "saturation").exists()


@with_locust
def test_an_interrupt_keeps_what_had_ended(toy, tmp_path, loader):
    cfg = config(tmp_path, requests=None, seconds=600.0, repeats=3)

    def interrupt():
        file = tmp_path / "raw" / "001" / "repeat-1" / "samples.jsonl"
        until(lambda: file.is_file() and file.read_text().count("\n") > 20)
        signal.raise_signal(signal.SIGINT)

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    found = []
    with pytest.raises(KeyboardInterrupt), interrupts.deferred():
        found.append(loader(cfg, server_at(toy.url)))
    thread.join()
    assert found[0].engine["interrupted"]
    assert len(found[0].repeats) == 1 and len(found[0].repeats[0].requests) > 20
    assert "it was interrupted" in load.warnings(found[0].engine)[0]


@with_locust
def test_a_point_in_which_every_request_fails_says_why(toy, tmp_path):
    job = Job(toy.url, BODY, [{"prompt": [13]}], clients=1, requests=2)
    with pytest.raises(ClientsError, match="no request ended well: HTTP 400"):
        load._run(server_at(toy.url), job, tmp_path, load.ignore)


def sample(number, sent=0.0, digest="d", error=None):
    return Sample(number, sent, (sent + 1.0, sent + 2.0), 8, 4, digest, 0.0, error)


def test_answers_are_of_the_first_time_that_each_prompt_was_asked():
    run = Run([sample(1, 1.0, "b"), sample(0, 0.0, "a"), sample(2, 2.0, "c")])
    assert load.answers(run, 2) == ("a", "b")
    assert load.answers(run, 4) == ("a", "b", "c", "")  # one was never asked
    assert load.answers(Run([]), 4) == ()
    assert load.unlike([run], 2) == 1  # prompt 0 got "a" and "c"
    assert load.unlike([Run([sample(0), sample(2)])], 2) == 0


def test_what_casts_doubt_on_figures_is_said():
    facts = {"failed_requests": 3, "errors": {"HTTP 500": 3}, "client_cpu": 0.93, "late_p99_ms": 55.0}
    found = load.warnings(facts)
    assert "3 requests failed: 3 times HTTP 500" in found[0]
    assert "93% of a core" in found[1] and "55 ms late" in found[2]
    assert load.warnings({"failed_requests": 0, "client_cpu": 0.1, "late_p99_ms": 0.1}) == []


@pytest.fixture(scope="module")
def reading():
    """`_read` of the clients' file, which can be imported in a process of its own only."""
    source = Path(clients.__file__).with_name("locustfile.py").read_text(encoding="utf-8")
    tree = ast.parse(source)
    wanted = ("_read", "_event", "_failure", "_words", "_count")
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in wanted]
    names = {
        "json": json,
        "hashlib": hashlib,
        "Any": Any,
        "Part": Any,
        "ERROR_LENGTH": 300,
        "UNFINISHED": ("error", "abort"),
    }
    exec(compile(tree, "locustfile.py", "exec"), names)
    return lambda lines: names["_read"]([(float(n), line.encode()) for n, line in enumerate(lines)])


def test_a_stream_that_ends_well_is_read_whole(reading):
    for more in ([], ["event: message", ": ping", "id: 3", "data:", "retry: 5"], ['data: {"choices": null}']):
        found = reading([*TOKENS, *more, USAGE, DONE])
        assert (found["tokens"], found["prompt_tokens"], found["whole"], found["failure"]) == (3, 2, True, None)
        assert found["events_us"] == [0, 1_000_000, 2_000_000]
        assert found["digest"] == hashlib.sha256(b"abc").hexdigest()[:16]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('data: {"error": {"message": "CUDA out of memory", "code": 500}}', "the server said: CUDA out of memory"),
        ('data: {"error": "gone"}', "the server said: gone"),
        ('data: {"error": {"code": 7}}', 'the server said: {"code": 7}'),
        ('data: {"object": "error", "message": "too long"}', "the server said: too long"),
        ('data: {"detail": "not here"}', "the server said: not here"),
        ('data: {"choices": [{"text": "", "finish_reason": "error"}]}', "finish_reason error"),
        ('data: {"choices": [{"text": "", "finish_reason": "abort"}]}', "finish_reason abort"),
        ("data: null", "cannot be read: null"),
        ('data: {"choices": [null]}', "cannot be read"),
        ('data: {"choices": [{"text": 5}]}', "cannot be read"),
        ("data: {broken", "cannot be read: {broken"),
        ("data: " + "[" * 20000, "cannot be read"),
        ("<html>bad gateway</html>", "no event: <html>bad gateway</html>"),
    ],
)
def test_whatever_a_server_says_of_a_failure_is_kept(reading, line, words):
    for lines in ([line, *TOKENS, USAGE, DONE], [*TOKENS, line, USAGE, DONE]):
        found = reading(lines)
        assert words in found["failure"] and len(found["failure"]) <= 340
        assert found["whole"] and len(found["events_us"]) >= 3  # what came with it is kept too


@pytest.mark.parametrize(
    "usage", ["[1]", '{"completion_tokens": -1}', '{"completion_tokens": true}', '{"completion_tokens": 2.5}', "null"]
)
def test_tokens_that_are_no_count_are_not_counted(reading, usage):
    found = reading([*TOKENS, f'data: {{"choices": [], "usage": {usage}}}', DONE])
    assert found["tokens"] is None and found["failure"] is None and len(found["events_us"]) == 3
