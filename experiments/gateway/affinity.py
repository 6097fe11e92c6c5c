"""Do sessions and conversations stay at one backend? The gateway's `sticky_until_saturated` next to vllm-router's policies.

    python experiments/gateway/affinity.py --vllm-router R/bin/vllm-router --out affinity.json

Behind each are three backends without a model (soak.py's). SESSIONS clients ask TURNS times, one after the other and in turn:
`named` clients send X-Session-ID and prompts that have nothing in common; `conversations` send no name, and each prompt begins
with the one before. Before the last two turns a backend is killed. Reported: the share of turns at the backend of the turn before
(after the kill: of sessions whose backend lives), the largest share of the sessions that one of the three has, and requests lost.
"""  # noqa: E501

from __future__ import annotations

import argparse
import asyncio
import json
import re
import tempfile
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import overhead
import soak

SESSIONS, TURNS, KILL_AT = 30, 6, 4
LENGTH = 700  # characters that a turn adds to its prompt


async def asked(session: aiohttp.ClientSession, url: str, prompt: str, name: str | None) -> str:
    """Which backend answered; empty where none did."""
    body = {"model": soak.MODEL, "prompt": prompt, "max_tokens": 2, "temperature": 0, "stream": True}
    headers = overhead.HEADERS | ({"X-Session-ID": name} if name else {})
    async with session.post(url + "/v1/completions", json=body, headers=headers) as response:
        found = re.search(r'"id": ?"(port-\d+)"', await response.text())
    return "" if found is None else found[1]


async def stayed(url: str, backends: list[soak.Backend], named: bool) -> dict[str, Any]:
    """Run all turns."""
    homes: dict[int, str] = {}
    run, prompts = uuid.uuid4().hex, dict.fromkeys(range(SESSIONS), "")
    kept, turns, lost = Counter[str](), Counter[str](), 0
    async with aiohttp.ClientSession() as session:
        for turn in range(TURNS):
            if turn == KILL_AT:
                await backends[0].kill()
                await asyncio.sleep(15.0)  # health checks see it
            for number in range(SESSIONS):
                new = (f"{run} {number} {turn} " + uuid.uuid4().hex * 30)[:LENGTH]
                prompts[number] = new if named else prompts[number] + new
                where = await asked(session, url, prompts[number], f"{run} {number}" if named else None)
                part = "after" if turn >= KILL_AT else "before"
                lives = homes.get(number) != f"port-{backends[0].port}"
                if turn and (lives or part == "before"):
                    turns[part] += 1
                    kept[part] += where == homes[number]
                lost += not where
                homes[number] = where or homes[number]
            if turn == 0:
                largest = max(Counter(homes.values()).values()) / SESSIONS
        await backends[0].do(session, "well")
    return {
        "stayed": round(kept["before"] / turns["before"], 3),
        "stayed_after_a_death": round(kept["after"] / turns["after"], 3),
        "largest_share": round(largest, 3),
        "requests_lost": lost,
    }


async def all_of(given: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    backends = [soak.Backend() for _ in range(3)]
    rows = []
    try:
        async with aiohttp.ClientSession() as session:
            for backend in backends:
                await backend.do(session, "well")
        urls = [f"http://127.0.0.1:{backend.port}" for backend in backends]
        for gateway, policy in (
            ("selfspec", "sticky_until_saturated"),
            ("vllm-router", "consistent_hash"),
            ("vllm-router", "cache_aware"),
        ):
            program = overhead.gateways(given, urls, soak.MODEL, folder, policy=policy)[gateway]
            for named in (True, False):
                context = overhead.started(program, folder / "log", "/v1/completions", soak.MODEL)
                url, _ = await asyncio.to_thread(context.__enter__)
                try:
                    await asyncio.sleep(10.0)  # all backends have been looked at
                    row = {"gateway": gateway, "policy": policy, "clients": "named" if named else "conversations"}
                    rows.append(row | await stayed(url, backends, named))
                    print(rows[-1], flush=True)
                finally:
                    await asyncio.to_thread(context.__exit__, None, None, None)
    finally:
        for backend in backends:
            await backend.kill()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-router", required=True, help="path of the program, in an environment of its own")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    given.smg, given.litellm = None, None
    with tempfile.TemporaryDirectory() as folder:
        rows = asyncio.run(all_of(given, Path(folder)))
    if given.out:
        given.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
