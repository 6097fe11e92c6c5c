"""`selfspec gateway demo`: real servers on the CPU, traffic, a server killed in mid-answer, and what routing gained."""

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pandas
from aiohttp import ClientSession

from selfspec_cli.gateway import server
from selfspec_cli.gateway.backends.base import log_of
from selfspec_cli.gateway.core import Gateway
from selfspec_cli.gateway.settings import GatewaySettings
from selfspec_cli.gateway.supervisor import Supervisor
from selfspec_cli.gateway.wire import loads

START_SECONDS = 420.0
PROMPTS = (
    "def read_lines(path):\n",
    "class Stack:\n    def __init__(self):\n",
    "import os\nimport sys\n\ndef main():\n",
    "for index, value in enumerate(values):\n",
    "def fibonacci(n):\n    if n < 2:\n",
    "try:\n    import json\nexcept ImportError:\n",
)
ROUNDS = 6  # each prompt is asked so often, first alone, then several at once
AT_ONCE = 3
TOKENS = 48
BATCH = 4
TIMES = ("ttft_ms", "expected_ttft_ms", "tpot_ms", "expected_tpot_ms", "e2e_ms")
SUMS = ("tokens", "cost", "machine_s", "survived")
Say = Callable[[str], None]


class DemoFailed(Exception):
    """A server did not start, or an answer was not what it has to be."""


def run(settings: GatewaySettings, say: Say) -> dict[str, Any]:
    """Run the demo; the document that `selfspec gateway demo --json` prints. Raises DemoFailed."""
    return asyncio.run(_run(settings, say))


async def _run(settings: GatewaySettings, say: Say) -> dict[str, Any]:
    if (os.cpu_count() or 1) < 2:  # then the servers share the one core that there is
        for backend in settings.backends:
            backend.environment.clear()
    settings.port = 0
    gateway, began = Gateway(settings), time.time()
    async with server.opened(gateway, say) as supervisor:
        if not await supervisor.ready(START_SECONDS):
            raise DemoFailed(_not_ready(supervisor))
        web = server.server(gateway, say)
        serving = asyncio.ensure_future(web.serve())
        while not web.started:
            await asyncio.sleep(0.05)
        url = f"http://{settings.host}:{web.servers[0].sockets[0].getsockname()[1]}"
        try:
            async with ClientSession(url) as session:
                checks = await _traffic(gateway, supervisor, session, say)
        finally:
            web.should_exit = True
            await serving
    return {
        "routes": routes([row for row in _rows(gateway) if row["at"] >= began]),
        "gains": [asdict(gain) for gain in gateway.ledger.gains()],
        "checks": checks,
        "log": str(gateway.log.file),
    }


def _not_ready(supervisor: Supervisor) -> str:
    folder, ended = supervisor.folder, filter(supervisor.ended, supervisor.replicas)
    said = [f"{one.name} ended before it answered; its log: {log_of(one.settings, folder)}" for one in ended]
    return "; ".join(said) or f"not all servers came up in {START_SECONDS:.0f} s; their logs are in {folder}"


async def _traffic(gateway: Gateway, supervisor: Supervisor, session: ClientSession, say: Say) -> dict[str, Any]:
    """Ask in several ways; what has to be true, by name."""
    say(f"traffic: {len(PROMPTS) * ROUNDS} streams, first one at a time, then {AT_ONCE} at once")
    expected = {prompt: await ask(session, prompt, {"backend": "plain", "cache": "none"}) for prompt in PROMPTS}
    room = asyncio.Semaphore(AT_ONCE)

    async def one(prompt: str, **wishes: Any) -> bool:
        async with room:
            return (await ask(session, prompt, wishes)) == expected[prompt]

    texts = [await one(prompt, cache="none") for prompt in PROMPTS for _ in range(ROUNDS // 2)]
    texts += await asyncio.gather(*(one(prompt, cache="none") for prompt in PROMPTS * (ROUNDS // 2)))
    say("the same again, which a cache may answer; and four requests of class batch")
    texts += await asyncio.gather(*(one(prompt) for prompt in PROMPTS * 2))
    lazy = [one(prompt, **{"class": "batch", "deadline_ms": 20_000, "cache": "none"}) for prompt in PROMPTS[:BATCH]]
    texts += await asyncio.gather(*lazy)
    survived = await _kill(gateway, supervisor, session, say)
    checks = {
        "answers equal to those of the plain server": f"{sum(texts)} of {len(texts)}",
        "stream whose server was killed": ", ".join(f"{name} {value}" for name, value in survived.items()),
    }
    if not all(texts) or not survived["same text"]:
        raise DemoFailed(f"an answer is not what it has to be: {checks}")
    return checks


async def _kill(gateway: Gateway, supervisor: Supervisor, session: ClientSession, say: Say) -> dict[str, Any]:
    """Kill the early-exit server in the middle of an answer; the plain one continues it."""
    prompt, tokens = "def parse_arguments(argv):\n", 160
    whole = await ask(session, prompt, {"backend": "plain", "cache": "none"}, tokens)

    def kill() -> None:
        say("killing the early-exit server in the middle of an answer")
        os.killpg(supervisor.processes["early"].pid, signal.SIGKILL)

    broken = await ask(session, prompt, {"backend": "early", "cache": "none"}, tokens, after=(3, kill))
    gateway.log.write()
    row = _rows(gateway)[-1]
    return {
        "same text": broken == whole,
        "continued by": row["route"],
        "milliseconds lost": round(row["lost_ms"] or 0.0),
    }


async def ask(
    session: ClientSession,
    prompt: str,
    wishes: dict[str, Any],
    tokens: int = TOKENS,
    after: tuple[int, Callable[[], None]] | None = None,
) -> str:
    """Stream one greedy completion; its text. after: a number of parts, and what is called once they have come."""
    body = {"model": "demo", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    text, parts = "", 0
    async with session.post("/v1/completions", json=body | {"stream": True, "selfspec": wishes}) as response:
        async for line in response.content:
            if line.startswith(b"data: {"):
                found = loads(line[6:])
                if "error" in found:
                    raise DemoFailed(found["error"]["message"])
                text += "".join(choice.get("text") or "" for choice in found["choices"])
                parts += 1
                if after is not None and parts == after[0]:
                    after[1]()
    return text


def routes(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What good requests took, by model, route and `plain`: medians of TIMES, sums of SUMS, or None."""
    table = pandas.DataFrame(rows).astype(dict.fromkeys((*TIMES, *SUMS), float))
    ended = table[table["status"].eq(200) & table["route"].notna()]
    found = ended.groupby(["model", "route", "plain"]).agg(
        requests=("status", "size"),
        hits=("cache", lambda verdicts: verdicts.eq("hit").sum()),
        **{name: (name, "median") for name in TIMES},
        **{name: (name, lambda column: column.sum(min_count=1)) for name in SUMS},
    )
    return json.loads(found.reset_index().convert_dtypes().to_json(orient="records"))


def _rows(gateway: Gateway) -> list[dict[str, Any]]:
    return [loads(line) for line in gateway.log.file.read_bytes().splitlines()]
