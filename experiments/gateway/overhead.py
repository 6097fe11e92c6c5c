"""What a gateway adds to the time to first token, and what it takes from the rate of tokens: one command, JSON out.

    python experiments/gateway/overhead.py --vllm-router R/bin/vllm-router --litellm L/bin/litellm --out beside.json

A server without a model sends tokens at a steady pace. The same clients ask it directly and through
each gateway, in turn, so that what the machine does meanwhile meets all of them. Each of N streams asks again as soon as its
answer has ended. They begin `spread` at random over the time of one answer, as those of different users do, or `at once`.
Reported for each number of streams and way to begin: p50 and p99 of the time to first token in milliseconds, what that is
over asking directly, tokens a second as a share of direct, and the CPU time of the gateway's process for a request, which
does not depend on what else the machine does. The row `direct` has the floor: its time to first token less the server's own
step is what clients and server take. Run it on a quiet machine. `--table beside.json` measures nothing: it writes the table
of docs/gateway_reference.md from such a file.
"""  # noqa: E501

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import uvicorn
import uvloop

from selfspec_cli import children
from selfspec_cli.children import free_port

MODEL = "toy"
KEY = "sk-of-this-measurement-and-nothing-else"  # LiteLLM does not start without one; vllm-router and smg ignore it
HEADERS = {"Authorization": f"Bearer {KEY}", "Accept-Encoding": "identity"}
PATH = "/v1/completions"
START_SECONDS = 120.0
PAGE = Path(__file__).parents[2] / "docs" / "gateway_reference.md"
NAMES = {"selfspec": "selfspec", "vllm-router": "vllm-router", "litellm": "LiteLLM"}
MOST_EVENTS = 3000  # a second for all streams: clients and server in Python keep up with no more


# ---- the server without a model --------------------------------------------------------------------------------------


def serve(port: int, step: float) -> None:
    """Answer every completion with max_tokens tokens, the first after `step` seconds, and the others as far apart as
    the request's `user` says: gateways pass it on, and vLLM ignores it."""
    head = b'data: {"id":"x","object":"text_completion","created":1,"model":"toy","choices":'
    event = head + b'[{"index":0,"text":"word ","logprobs":null,"finish_reason":%s}]}\n\n'

    def answer(kind: bytes) -> dict[str, Any]:
        return {"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        if scope["method"] == "GET":
            body = json.dumps({"object": "list", "data": [{"id": MODEL, "object": "model"}]}).encode()
            body = b"" if scope["path"] == "/metrics" else body
            await send(answer(b"application/json"))
            return await send({"type": "http.response.body", "body": body})
        raw = b""
        while True:
            message = await receive()
            raw += message.get("body", b"")
            if not message.get("more_body"):
                break
        if scope["path"] != PATH:  # vllm-router asks the server to render prompts, for one
            await send({"type": "http.response.start", "status": 404, "headers": []})
            return await send({"type": "http.response.body", "body": b""})
        asked = json.loads(raw)
        tokens = asked.get("max_tokens") or 4
        if not asked.get("stream"):
            choice = {"index": 0, "text": "word", "finish_reason": "length"}
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            about = {"id": "x", "object": "text_completion", "created": 1, "model": MODEL}
            body = json.dumps(about | {"choices": [choice], "usage": usage}).encode()
            await send(answer(b"application/json"))
            return await send({"type": "http.response.body", "body": body})
        await send(answer(b"text/event-stream; charset=utf-8"))
        apart = float(asked.get("user") or step)
        for place in range(tokens):
            await asyncio.sleep(apart if place else step)
            data = event % (b'"length"' if place + 1 == tokens else b"null")
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    uvicorn.run(
        app,
        host="127.0.0.1",
        port=port,
        log_level="error",
        loop="uvloop",
        http="httptools",
        backlog=4096,
        timeout_keep_alive=600,
    )


# ---- processes -------------------------------------------------------------------------------------------------------


@contextmanager
def started(command: list[str], port: int, log: Path) -> Iterator[tuple[str, int]]:
    """(address, process id) of a program that listens on a port, once it answers a completion; ended afterwards."""
    with open(log, "wb") as out:
        process = children.start(command, out, os.environ)
    url = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + START_SECONDS
        while True:
            if process.poll() is not None or time.monotonic() > until:
                sys.exit(f"{command[0]} did not start: {log.read_text(errors='replace')[-2000:]}")
            if asyncio.run(answers(url + PATH)):
                break
            time.sleep(0.3)
        yield url, process.pid
    finally:
        children.end(process, signal.SIGTERM, 10)


def cpu_seconds(session: int) -> float:
    """CPU time so far of all living processes of a session; 0.0 for session 0."""
    taken = 0.0
    for place in Path("/proc").glob("[0-9]*") if session else ():
        with suppress(OSError):  # it has ended meanwhile
            if int((place / "stat").read_text().rpartition(")")[2].split()[3]) == session:
                taken += sum(int(one.read_text().split()[0]) for one in place.glob("task/*/schedstat")) / 1e9
    return taken


async def answers(url: str) -> bool:
    """Whether a short stream comes."""
    try:
        async with aiohttp.ClientSession() as session:
            return (await stream(session, url, 2))[1] > 0
    except (aiohttp.ClientError, OSError, AssertionError):
        return False


def gateways(options: argparse.Namespace, backend: str, folder: Path) -> dict[str, tuple[list[str], int]]:
    """The command and the port of every gateway that is measured in front of the server at `backend`, by name."""
    found: dict[str, tuple[list[str], int]] = {}

    def add(name: str, make: Callable[[int], list[Any]]) -> None:
        port = free_port()
        found[name] = [str(word) for word in make(port)], port

    config = folder / "selfspec.yaml"
    settings = {
        "policy": "round_robin",
        "keys": [{"name": "all", "key": hashlib.sha256(KEY.encode()).hexdigest()}],
        "results_dir": str(folder / "selfspec"),
        "ledger": {"plain_share": 0.0},
        "backends": [{"name": "b0", "kind": "local", "url": backend}],
    }
    config.write_text(json.dumps(settings))
    add("selfspec", lambda port: [sys.executable, "-m", "selfspec_cli", "gateway", config, f"port={port}"])
    listen = ["--policy", "round_robin", "--worker-urls", backend, "--host", "127.0.0.1", "--prometheus-port"]
    if options.vllm_router:
        add("vllm-router", lambda port: [options.vllm_router, *listen, free_port(), "--port", port])
    if options.smg:
        add("smg", lambda port: [options.smg, "launch", *listen, free_port(), "--port", port])
    if options.litellm:
        lite = folder / "litellm.yaml"
        server = {"model": f"text-completion-openai/{MODEL}", "api_base": f"{backend}/v1", "api_key": "none"}
        settings = {
            "model_list": [{"model_name": MODEL, "litellm_params": server}],
            "general_settings": {"master_key": KEY},
            "router_settings": {"num_retries": 2, "timeout": 120, "stream_timeout": 120},
        }
        lite.write_text(json.dumps(settings))
        add("litellm", lambda port: [options.litellm, "--config", lite, "--host", "127.0.0.1", "--port", port])
    return found


# ---- clients ---------------------------------------------------------------------------------------------------------


async def stream(
    session: aiohttp.ClientSession, url: str, tokens: int, apart: float = 0.01
) -> tuple[float, int, float]:
    """(seconds to the first event, events with a choice, seconds in all) of a stream. apart: seconds between tokens."""
    body = {
        "model": MODEL,
        "max_tokens": tokens,
        "stream": True,
        "temperature": 0,
        "ignore_eos": True,
        "user": str(apart),
        "prompt": "once upon a time",
    }
    began, first, events = time.perf_counter(), None, 0
    async with session.post(url, json=body, headers=HEADERS) as response:
        assert response.status == 200, response.status
        async for part in response.content.iter_any():
            if first is None:
                first = time.perf_counter() - began
            events += part.count(b'"choices":[{') + part.count(b'"choices": [{')
    assert first is not None
    return first, events, time.perf_counter() - began


async def measured(
    url: str, options: argparse.Namespace, streams: int, repeats: int, spread: bool, thrown_away: int
) -> dict[str, Any]:
    """Each of `streams` clients asks `thrown_away` times, and then `repeats` times."""
    firsts: list[float] = []
    events, lasted = 0, 0.0

    begin, apart = random.Random(0), max(options.step, streams / MOST_EVENTS)

    async def client() -> None:
        nonlocal events, lasted
        for repeat in range(repeats + thrown_away):
            try:
                first, made, seconds = await stream(session, url, options.tokens, apart)
            except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError):  # it was kept, and closed meanwhile
                first, made, seconds = await stream(session, url, options.tokens, apart)
            if repeat >= thrown_away:
                firsts.append(first)
                events, lasted = events + made, lasted + seconds
            if not spread:
                await together.wait()
            elif repeat == 0:  # the first answers have begun at once, and opened the connections
                await asyncio.sleep(seconds * begin.random())

    together = asyncio.Barrier(streams)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(client() for _ in range(streams)))
    return {"firsts": firsts, "events": events, "seconds": lasted / streams}


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def main() -> None:
    """Start everything, measure in turn, print JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 256, 1000])
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument(
        "--step", type=float, default=0.005, help="seconds between tokens of the server without a model"
    )
    parser.add_argument(
        "--requests", type=int, default=64, help="for each number of streams, in each round; of streams twice"
    )
    parser.add_argument("--rounds", type=int, default=1, help="times that all are measured in turn")
    parser.add_argument("--out", type=Path, help="a file for the JSON, beside the output")
    for name in ("--vllm-router", "--smg", "--litellm"):
        parser.add_argument(name, help="path of the program, in an environment of its own")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--table", type=Path, help="write the page's table from this file, and measure nothing")
    options = parser.parse_args()
    if options.serve:
        return serve(options.serve, options.step)
    if options.table:
        return write_table(json.loads(options.table.read_text(encoding="utf-8")))
    with ExitStack() as stack, tempfile.TemporaryDirectory() as scratch:
        folder, port = Path(scratch), free_port()
        command = [sys.executable, __file__, "--serve", str(port), "--step", str(options.step)]
        backend, _ = stack.enter_context(started(command, port, folder / "server.log"))
        running = {"direct": (backend, 0)}
        for name, (words, its_port) in gateways(options, backend, folder).items():
            running[name] = stack.enter_context(started(words, its_port, folder / f"{name}.log"))
            print(f"{name}: {running[name][0]}", file=sys.stderr)
        found = rounds(options, {name: (url + PATH, pid) for name, (url, pid) in running.items()})
        document = {
            "path": PATH,
            "tokens": options.tokens,
            "step_s": options.step,
            "cpus": os.cpu_count(),
            "load_average": os.getloadavg()[0],
            "rows": table(found),
        }
    text = json.dumps(document, indent=1)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")
    print(text)


Found = dict[tuple[int, bool, str], list[dict[str, Any]]]
MOST_OF_LITELLM = 256  # streams; a thousand would take it five minutes
AT_ONCE = (16,)  # numbers of streams that also begin at once
LITELLM_SHARE = 4  # its requests take so long that it gets a fourth of them, and of many streams none to begin with


def rounds(options: argparse.Namespace, running: dict[str, tuple[str, int]]) -> Found:
    """(streams, spread, gateway) -> what was measured in each round."""
    found: Found = {}
    parts = [(streams, spread) for streams in options.streams for spread in (True, False)[: 1 + (streams in AT_ONCE)]]
    for number in range(options.rounds):
        for streams, spread in parts:
            for name in list(running) if number % 2 == 0 else list(running)[::-1]:
                url, pid = running[name]
                repeats, thrown_away = max(1 + (streams < 256), options.requests // streams), 1
                if name == "litellm":
                    if streams > MOST_OF_LITELLM:
                        continue
                    repeats, thrown_away = max(1, repeats // LITELLM_SHARE), int(streams <= 16)
                before, began = cpu_seconds(pid), time.monotonic()
                part = uvloop.run(measured(url, options, streams, repeats, spread, thrown_away))
                part["cpu"] = (cpu_seconds(pid) - before) / (streams * (repeats + thrown_away))
                found.setdefault((streams, spread, name), []).append(part)
                took = f"{time.monotonic() - began:.1f} s"
                print(f"round {number + 1}, {streams} streams, spread {spread}: {name}, {took}", file=sys.stderr)
    return found


def table(found: Found) -> list[dict[str, Any]]:
    """A row for each gateway, number of streams and way to begin."""
    rows = []
    for (streams, spread, name), parts in found.items():
        beside = found[streams, spread, "direct"]
        firsts, direct = ([one for part in parts_of for one in part["firsts"]] for parts_of in (parts, beside))
        row: dict[str, Any] = {
            "gateway": name,
            "streams": streams,
            "begin": "spread" if spread else "at once",
            "rounds": len(parts),
            "requests": len(firsts),
        }
        for label, share in (("p50", 0.5), ("p99", 0.99)):
            row[f"ttft_{label}_ms"] = round(1000 * quantile(firsts, share), 3)
            row[f"added_{label}_ms"] = round(1000 * (quantile(firsts, share) - quantile(direct, share)), 3)
        row["tokens_s"] = round(rate(parts), 1)
        row["share_of_direct"] = round(rate(parts) / rate(beside), 4)
        if name != "direct":
            row["cpu_ms_request"] = round(1000 * sum(one["cpu"] for one in parts) / len(parts), 3)
        rows.append(row)
    return rows


def write_table(document: dict[str, Any]) -> None:
    """Put what was measured where streams begin at random moments into the page, between its two markers."""
    rows = {(one["streams"], one["gateway"]): one for one in document["rows"] if one["begin"] == "spread"}
    rounds = min(one["rounds"] for one in rows.values())
    head = ["streams", *NAMES.values()]
    lines = [
        f"{document['cpus']} cores, load average {document['load_average']:.1f}; at least {rounds} rounds, "
        f"{document['tokens']} tokens an answer.",
        "",
        f"| {' | '.join(head)} |",
        "|---" * len(head) + "|",
    ]
    for streams in dict.fromkeys(streams for streams, _ in rows):
        cells = [f"{streams:,}"]
        for name in NAMES:
            one = rows.get((streams, name))
            cells.append(
                f"{one['added_p50_ms']:.1f}, {one['added_p99_ms']:.1f} · {one['cpu_ms_request']:.1f}"
                if one
                else "not measured"
            )
        lines.append(f"| {' | '.join(cells)} |")
    begin, end = "<!-- beside -->", "<!-- /beside -->"
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(begin)
    after = rest.partition(end)[2]
    PAGE.write_text("\n".join([before + begin, *lines, end + after]), encoding="utf-8")


def rate(parts: Sequence[dict[str, Any]]) -> float:
    """Tokens a second."""
    return float(sum(one["events"] for one in parts) / sum(one["seconds"] for one in parts))


if __name__ == "__main__":
    main()
