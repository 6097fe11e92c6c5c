"""The answer cache: an equal request is answered again, equal requests at once share one call, an answer is kept."""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
import time
import uuid
import zlib
from collections.abc import Awaitable, Callable, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from selfspec_cli.gateway import wire
from selfspec_cli.gateway.client import Client
from selfspec_cli.gateway.outcome import Outcome
from selfspec_cli.gateway.request import CHAT, COMPLETIONS, Request
from selfspec_cli.gateway.settings import CacheSettings
from selfspec_cli.gateway.storage import database, print_fault

VERSION = 4
LARGEST = 1 << 22  # bytes of an answer that is kept, and up to which an equal request may still join
AHEAD = 64  # parts of an answer that no client has taken yet, above which the backend is not read from
_NO_MATTER = ("stream", "stream_options", "user", "metadata", "store", "priority", "request_id")
"""Fields of a body that do not shape the answer's text."""
_TOOLS = ("tools", "tool_choice", "functions", "function_call")
_ID = re.compile(rb'"id":\s*("[^"]+")')
_TABLES = """
CREATE TABLE IF NOT EXISTS answer (
    id INTEGER PRIMARY KEY, key BLOB NOT NULL UNIQUE, tenant TEXT NOT NULL, raw BLOB NOT NULL, prompt_tokens INTEGER,
    tokens INTEGER, used REAL NOT NULL, created REAL NOT NULL, bytes INTEGER NOT NULL) STRICT;
CREATE INDEX IF NOT EXISTS answer_used ON answer (used);
CREATE INDEX IF NOT EXISTS answer_created ON answer (created);
CREATE TABLE IF NOT EXISTS size (entries INTEGER NOT NULL, bytes INTEGER NOT NULL) STRICT;
INSERT INTO size SELECT 0, 0 WHERE NOT EXISTS (SELECT 1 FROM size);
CREATE TRIGGER IF NOT EXISTS stored AFTER INSERT ON answer
    BEGIN UPDATE size SET entries = entries + 1, bytes = bytes + new.bytes; END;
CREATE TRIGGER IF NOT EXISTS removed AFTER DELETE ON answer
    BEGIN UPDATE size SET entries = entries - 1, bytes = bytes - old.bytes; END"""
_LEAST_RECENT = """DELETE FROM answer WHERE id IN (
    SELECT id FROM (SELECT id, sum(bytes) OVER (ORDER BY used DESC, id) AS newer FROM answer) WHERE newer > ?)"""

Ask = Callable[[Request, Outcome, Client], Awaitable[None]]


def key(request: Request) -> bytes:
    """32 bytes that differ for any two requests that differ in what shapes the answer or its form, or in the tenant."""
    body = {name: value for name, value in sorted(request.body.items()) if name not in _NO_MATTER}
    usage = bool((request.body.get("stream_options") or {}).get("include_usage"))
    value = [request.tenant, request.model, request.endpoint, request.stream, request.stream and usage, body]
    return hashlib.sha256(wire.dumps(value)).digest()


def specials(request: Request) -> set[str]:
    """Which of the kinds of `also_for` a request is."""
    called = any(one.get("tool_calls") or one.get("role") == "tool" for one in request.messages)
    found = {
        "tools": called or any(request.body.get(name) for name in _TOOLS),
        "images": not request.only_text,
        "sampled": not request.greedy,
    }
    return {name for name, is_one in found.items() if is_one}


@dataclass(frozen=True)
class Kept:
    """An answer as a client got it, and its tokens. entry: what feedback and eviction name it by."""

    raw: bytes
    prompt_tokens: int | None = None
    tokens: int | None = None
    entry: str = ""


class AnswerCache:
    """The file, which several processes may use. Its methods are called from one thread at a time."""

    def __init__(self, path: Path) -> None:
        """Raises SettingsError where the file is no cache's."""
        self._db = database(path, VERSION, _TABLES)

    def close(self) -> None:
        self._db.close()

    def size(self) -> dict[str, int]:
        """Entries that are kept, and their bytes."""
        entries, size = self._db.execute("SELECT entries, bytes FROM size").fetchone()
        return {"entries": entries, "bytes": size}

    def lookup(self, wanted: bytes, now: float, oldest: float) -> Kept | None:
        """The answer to a request, by its key; None where there is none that was made at `oldest` or later."""
        found = self._db.execute(
            "UPDATE answer SET used = ? WHERE key = ? AND created >= ? RETURNING id, raw, prompt_tokens, tokens",
            (now, wanted, oldest),
        ).fetchone()
        if found is None:
            return None
        number, raw, prompt_tokens, tokens = found
        return Kept(zlib.decompress(raw), prompt_tokens, tokens, f"{number:016x}")

    def store(self, wanted: bytes, tenant: str, kept: Kept, now: float, most: int, oldest: float) -> None:
        """Keep an answer. most: bytes of all of them; what was used longest ago goes first, and what is older."""
        raw = zlib.compress(kept.raw)
        number, size = secrets.randbits(62) + 1, len(raw) + 200
        row = (number, wanted, tenant, raw, kept.prompt_tokens, kept.tokens, now, now, size)
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.execute("DELETE FROM answer WHERE key = ? OR created < ?", (wanted, oldest))
            self._db.execute("INSERT INTO answer VALUES (?,?,?,?,?,?,?,?,?)", row)
            if self.size()["bytes"] > most:  # a hundredth more, so that not every store removes
                self._db.execute(_LEAST_RECENT, (most - most // 100,))

    def evict(self, entry: str, tenant: str | None) -> bool:
        """Forget one answer; False where there is none by that id. tenant: whose it has to be; None: anybody's."""
        statement = "DELETE FROM answer WHERE id = ? AND tenant = coalesce(?, tenant)"
        return self._db.execute(statement, (_number(entry), tenant)).rowcount > 0

    def has(self, entry: str, tenant: str) -> bool:
        statement = "SELECT 1 FROM answer WHERE id = ? AND tenant = ?"
        return self._db.execute(statement, (_number(entry), tenant)).fetchone() is not None


def _number(entry: str) -> int | None:
    """The number of an entry's id; None for what is no id."""
    return int(entry, 16) if re.fullmatch("[0-7][0-9a-f]{15}", entry) else None


class SharedCall:
    """One call whose answer goes to all clients that ask the same. It goes on while one of them is there.

    messages: of ASGI, as they were sent. size: bytes of them. readers: clients. furthest: messages that one has taken.
    """

    def __init__(self) -> None:
        self.messages: list[MutableMapping[str, Any]] = []
        self.size = self.readers = self.furthest = 0
        self.client = Client(self.send, {})
        self.task: asyncio.Task[Kept] | None = None
        self._news = asyncio.Event()

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """ASGI: take a part of the answer; returns when the fastest client has room."""
        self.messages.append(message)
        self.size += len(message.get("body", b""))
        self._tell()
        while len(self.messages) - self.furthest > AHEAD:
            await self._news.wait()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def follow(self, client: Client) -> Kept:
        """Send the answer to a client, from its beginning; raises what the call raised."""
        assert self.task is not None
        self.task.add_done_callback(lambda task: self._tell())
        self.readers += 1
        place = 0
        try:
            while place < len(self.messages) or not self.task.done():
                if place == len(self.messages):
                    await self._news.wait()
                    continue
                message = self.messages[place]
                place += 1
                if place > self.furthest:
                    self.furthest = place
                    self._tell()
                await client.hand_on(message)
            return self.task.result()
        finally:
            self.readers -= 1
            if not self.readers:
                self.task.cancel()


class Caching:
    """The cache on a request's way. cache: None where none is configured. shared: calls under way, by key."""

    def __init__(self, settings: CacheSettings, cache: AnswerCache | None) -> None:
        self.settings, self.cache = settings, cache
        self.shared: dict[bytes, SharedCall] = {}
        self._files = ThreadPoolExecutor(1, "cache-file")

    async def call(self, method: Callable[..., Any], *values: Any) -> Any:
        """The result of a method of the cache, in the thread of its file."""
        return await asyncio.get_running_loop().run_in_executor(self._files, method, *values)

    def close(self) -> None:
        if self.cache is not None:
            self._files.submit(self.cache.close).result()
        self._files.shutdown()

    def _wanted(self, request: Request) -> bool:
        """Whether a request may be answered from the cache. Who names a backend wants no other's answer."""
        elsewhere = request.backend is not None and request.cache is None
        fits = request.endpoint in (CHAT, COMPLETIONS) and specials(request) <= set(self.settings.also_for)
        return fits and not elsewhere and request.cache != "none"

    async def answered(self, request: Request, out: Outcome, client: Client, ask: Ask) -> bool:
        """Answer a request from the cache, or by a call that equal requests share; False where it is not cached. ask:
        has a backend answer a request, and raises GatewayError."""
        if self.cache is None:
            return False
        if not self._wanted(request):
            out.cache = "bypassed"
            return False
        wanted, now = key(request), time.time()
        try:
            hit = await self.call(self.cache.lookup, wanted, now, now - self.settings.ttl_s)
        except Exception as error:  # a cache that is broken costs no request
            out.cache = "failed"
            print_fault(error)
            return False
        shared = self.shared.get(wanted)
        if hit is not None:
            out.cache, out.route, out.reason = "hit", "cache", "exact"
            client.headers["x-selfspec-cache"] = f"hit; entry={hit.entry}"
            await _replay(hit, request, out, client)
        elif shared is None or shared.size > LARGEST or not shared.readers:  # without readers it is being ended
            out.cache = "miss"
            shared = self.shared[wanted] = SharedCall()
            shared.task = asyncio.ensure_future(self._ask_once(shared, wanted, request, out, ask))
            await shared.follow(client)
        else:
            out.cache = out.reason = "shared"
            client.headers["x-selfspec-cache"] = "shared"
            kept = await shared.follow(client)
            out.route, out.prompt_tokens, out.tokens = "cache", kept.prompt_tokens, kept.tokens
        return True

    async def _ask_once(self, shared: SharedCall, wanted: bytes, request: Request, out: Outcome, ask: Ask) -> Kept:
        try:
            await ask(request, out, shared.client)
        finally:
            if self.shared.get(wanted) is shared:
                del self.shared[wanted]
        kept = Kept(b"".join(one.get("body", b"") for one in shared.messages), out.prompt_tokens, out.tokens)
        if shared.size <= LARGEST and self.cache is not None:
            now, most = time.time(), int(self.settings.mib * 2**20)
            try:
                await self.call(self.cache.store, wanted, request.tenant, kept, now, most, now - self.settings.ttl_s)
            except Exception as error:
                print_fault(error)
        return kept


async def _replay(kept: Kept, request: Request, out: Outcome, client: Client) -> None:
    """Send an answer again, with an id of its own, so that no client takes two answers for one."""
    raw, out.prompt_tokens, out.tokens = kept.raw, kept.prompt_tokens, kept.tokens
    if known := _ID.search(raw):
        raw = raw.replace(known[1], f'"cached-{uuid.uuid4().hex}"'.encode())
    if not request.stream:
        return await client.whole(200, raw)
    out.ttft = time.monotonic() - request.began
    await client.part(raw, more=False)
