"""Verdicts of a model, in idle time: whether a cached answer is as right as a fresh one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import orjson

from selfspec_cli.gateway.asked import CHAT, COMPLETIONS
from selfspec_cli.gateway.events import BrokenStream
from selfspec_cli.gateway.replica import Replica
from selfspec_cli.gateway.upstream import BackendFailed, Refused, Upstream

LONGEST = 2000  # characters of each answer that are compared
QUESTION = """Question: {question}

First answer: {cached}

Second answer: {fresh}

Do both answers say the same? Reply with one word, yes or no."""


def judge(upstream: Upstream, replica: Replica) -> Callable[[str, str, str], Awaitable[bool | None]]:
    """Asks a backend about (question, cached, fresh answer); None where it was not idle, failed, or said neither."""

    async def asked(question: str, cached: str, fresh: str) -> bool | None:
        if not replica.available() or not replica.idle():
            return None
        prompt = QUESTION.format(question=question[:LONGEST], cached=cached[:LONGEST], fresh=fresh[:LONGEST])
        body = {"model": replica.model, "messages": [{"role": "user", "content": prompt}], "max_tokens": 3,
                "temperature": 0}  # fmt: skip
        try:
            said = await _answer(upstream, replica, CHAT, body)
        except Refused:  # a model without a chat template
            body["prompt"] = f"{prompt}\nReply:"
            body.pop("messages")
            try:
                said = await _answer(upstream, replica, COMPLETIONS, body)
            except (Refused, BackendFailed, BrokenStream):
                return None
        except (BackendFailed, BrokenStream):
            return None
        word = said.strip().lower()
        return True if word.startswith("yes") else False if word.startswith("no") else None

    return asked


async def _answer(upstream: Upstream, replica: Replica, path: str, body: dict[str, object]) -> str:
    async with upstream.post(replica, path, body, {}) as response:
        found = orjson.loads(b"".join([part async for part in upstream.parts(response)]))
    choice = found["choices"][0]
    return str(choice.get("text") or (choice.get("message") or {}).get("content") or "")
