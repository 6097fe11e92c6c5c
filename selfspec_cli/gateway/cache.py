"""The cache of answers: a SQLite file by a hash of each request, calls that equal requests share, and replays."""

import asyncio
import hashlib
import secrets
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from selfspec_cli.gateway.client import Client
from selfspec_cli.gateway.database import database
from selfspec_cli.gateway.request import CHAT, COMPLETIONS, Outcome, Request
from selfspec_cli.gateway.settings import CacheSettings
from selfspec_cli.gateway.wire import DONE, END_OF_STREAM, BrokenStream, Event, Parser, dumps, loads, read, written

VERSION = 3
_NO_MATTER = ("stream", "stream_options", "user", "metadata", "store", "priority", "request_id")
"""Fields of a body that do not shape the answer."""
_TOOLS = ("tools", "tool_choice", "functions", "function_call")
LARGEST = 1 << 22  # bytes of an answer that is kept, and up to which an equal request may still join
AHEAD = 64  # parts of an answer that no client has taken yet, above which the backend is not read from
_TABLES = """
CREATE TABLE IF NOT EXISTS answer (
    id INTEGER PRIMARY KEY, key BLOB NOT NULL UNIQUE, tenant TEXT NOT NULL, answer BLOB NOT NULL, used REAL NOT NULL,
    created REAL NOT NULL, bytes INTEGER NOT NULL) STRICT;
CREATE INDEX IF NOT EXISTS answer_used ON answer (used);
CREATE INDEX IF NOT EXISTS answer_created ON answer (created);
CREATE TABLE IF NOT EXISTS size (entries INTEGER NOT NULL, bytes INTEGER NOT NULL) STRICT;
INSERT INTO size SELECT 0, 0 WHERE NOT EXISTS (SELECT 1 FROM size);
CREATE TRIGGER IF NOT EXISTS stored AFTER INSERT ON answer
    BEGIN UPDATE size SET entries = entries + 1, bytes = bytes + new.bytes; END;
CREATE TRIGGER IF NOT EXISTS removed AFTER DELETE ON answer
    BEGIN UPDATE size SET entries = entries - 1, bytes = bytes - old.bytes; END"""

Document = dict[str, Any]
Ask = Callable[[Outcome, Client], Awaitable[None]]


def key(request: Request) -> bytes:
    """32 bytes that differ for any two requests that differ in what shapes the answer, or in the tenant."""
    body = {name: value for name, value in sorted(request.body.items()) if name not in _NO_MATTER}
    value = [request.tenant, request.model, request.endpoint, body]
    return hashlib.sha256(dumps(value)).digest()


def specials(request: Request) -> dict[str, bool]:
    """Whether a request is of each of the kinds of `also_for`."""
    called = any(one.get("tool_calls") or one.get("role") == "tool" for one in request.messages)
    tools = called or any(map(request.body.get, _TOOLS))
    return {"tools": tools, "images": not request.only_text, "sampled": not request.greedy}


class AnswerCache:
    """The file, which several processes may use. Its methods are called from one thread at a time."""

    def __init__(self, path: Path) -> None:
        """Raises SettingsError where the file is no cache's."""
        self._db = database(path, VERSION, _TABLES)

    def _one(self, statement: str, values: Sequence[Any] = ()) -> Any:
        return self._db.execute(statement, values).fetchone()

    def close(self) -> None:
        self._db.close()

    def size(self) -> dict[str, int]:
        """Entries that are kept, and their bytes."""
        return dict(zip(("entries", "bytes"), self._one("SELECT entries, bytes FROM size"), strict=True))

    def lookup(self, wanted: bytes, now: float, oldest: float) -> tuple[str, dict[str, Any]] | None:
        """(the entry's name, the answer in OpenAI's form) by a request's key; None if none is of `oldest` or later."""
        found = self._one("SELECT id, answer FROM answer WHERE key = ? AND created >= ?", (wanted, oldest))
        if found is None:
            return None
        self._db.execute("UPDATE answer SET used = ? WHERE id = ?", (now, found[0]))
        return f"{found[0]:016x}", loads(found[1])

    def store(self, wanted: bytes, tenant: str, answer: dict[str, Any], now: float, most: int, oldest: float) -> None:
        """Keep an answer. most: bytes of all of them; what was used longest ago goes first, and what is older."""
        raw = dumps(answer)
        row = (secrets.randbits(62) + 1, wanted, tenant, raw, now, now, len(raw) + 200)
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            self._remove("key = ? OR created < ?", (wanted, oldest))
            self._db.execute("INSERT INTO answer VALUES (?,?,?,?,?,?,?)", row)
            surplus, least = self.size()["bytes"] - most, []
            if surplus > 0:
                surplus += most // 100  # a hundredth more, so that not every store removes
                for number, size in self._db.execute("SELECT id, bytes FROM answer ORDER BY used"):
                    if surplus <= 0:
                        break
                    least.append((number,))
                    surplus -= size
                self._db.executemany("DELETE FROM answer WHERE id = ?", least)

    def _remove(self, which: str, values: Sequence[Any]) -> bool:
        return self._db.execute(f"DELETE FROM answer WHERE {which}", values).rowcount > 0

    def evict(self, entry: str, tenant: str | None) -> bool:
        """Forget one answer; False where there is none by that id. tenant: whose it has to be; None: anybody's."""
        number = _number(entry)
        return number is not None and self._remove("id = ? AND tenant = coalesce(?, tenant)", (number, tenant))

    def has(self, entry: str, tenant: str) -> bool:
        """Whether there is an answer of this tenant by that id."""
        return self._one("SELECT 1 FROM answer WHERE id = ? AND tenant = ?", (_number(entry), tenant)) is not None


def _number(entry: str) -> int | None:
    """The number of an entry's id; None for what is no id."""
    fits = 0 < len(entry) <= 16 and all(letter in "0123456789abcdef" for letter in entry)
    return number if fits and (number := int(entry, 16)) < 1 << 63 else None


class Flight:
    """One call whose answer goes to all clients that ask the same. It goes on while one of them is there. form: key and
    form of the answer. messages: of ASGI, as sent. size: their bytes. furthest: messages that a client has taken."""

    def __init__(self, form: tuple[bytes, bool, bool]) -> None:
        self.form = form
        self.messages: list[MutableMapping[str, Any]] = []
        self.size = self.readers = self.furthest = 0
        self.client = Client(self.send, {})
        self.task: asyncio.Task[None] | None = None
        self.usage: dict[str, int] = {}
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

    async def follow(self, client: Client) -> None:
        """Send the answer to a client, from its beginning; raises what the call raised."""
        assert self.task is not None
        self.task.add_done_callback(lambda task: self._tell())
        self.readers += 1
        try:
            place = 0
            while True:
                while place < len(self.messages):
                    message = self.messages[place]
                    place += 1
                    if place > self.furthest:
                        self.furthest = place
                        self._tell()
                    await client.hand_on(message)
                if self.task.done():
                    return self.task.result()
                await self._news.wait()
        finally:
            self.readers -= 1
            if not self.readers:
                self.task.cancel()


class Caching:
    """The cache on a request's way: a hit is replayed, equal requests at once share one call, an answer is kept. cache:
    None where none is configured. fault: called with what failed in the cache. flights: by their form."""

    def __init__(
        self, settings: CacheSettings, cache: AnswerCache | None, fault: Callable[[BaseException], Any]
    ) -> None:
        self.settings, self.cache, self.fault = settings, cache, fault
        self.flights: dict[tuple[bytes, bool, bool], Flight] = {}
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
        if elsewhere or request.cache == "none" or request.endpoint not in (CHAT, COMPLETIONS):
            return False
        return all(name in self.settings.also_for for name, special in specials(request).items() if special)

    async def answered(self, out: Outcome, client: Client, ask: Ask) -> bool:
        """Answer from the cache, or by a call that equal requests share; False where the request is not cached. ask:
        has a backend answer. Raises GatewayError as it does."""
        request = out.request
        if self.cache is None:
            return False
        if not self._wanted(request):
            out.cache = "bypassed"
            return False
        wanted, usage = key(request), bool((request.body.get("stream_options") or {}).get("include_usage"))
        now = time.time()
        try:
            hit = await self.call(self.cache.lookup, wanted, now, now - self.settings.ttl_s)
        except Exception as error:  # a cache that is broken costs no request
            out.cache = "failed"
            self.fault(error)
            return False
        if hit is not None:
            await self._replay(hit[0], hit[1], out, client, usage)
            return True
        form = (wanted, request.stream, usage)
        flight = self.flights.get(form)
        if flight is None or flight.size > LARGEST or not flight.readers:  # without readers it is being ended
            out.cache = "miss"
            flight = self.flights[form] = Flight(form)
            flight.task = asyncio.ensure_future(self._fly(flight, out, ask))
            await flight.follow(client)
        else:
            out.cache, out.reason = "shared", "shared"
            client.headers["x-selfspec-cache"] = "shared"
            await flight.follow(client)
            out.route = "cache"
            out.usage(flight.usage)
        return True

    async def _replay(self, entry: str, kept: Document, out: Outcome, client: Client, usage: bool) -> None:
        out.cache, out.route, out.reason = "hit", "cache", "exact"
        client.headers["x-selfspec-cache"] = f"hit; entry={entry}"
        answer = renewed(kept)
        out.usage(answer.get("usage"))
        if not out.request.stream:
            return await client.whole(200, dumps(answer))
        out.ttft = time.monotonic() - out.request.began
        await client.part(b"".join(stream(answer, usage)), more=False)

    async def _fly(self, flight: Flight, out: Outcome, ask: Ask) -> None:
        try:
            await ask(out, flight.client)
        finally:
            if self.flights.get(flight.form) is flight:
                del self.flights[flight.form]
        raw = b"".join(message.get("body", b"") for message in flight.messages)
        prompt, tokens = out.prompt_tokens, out.tokens
        if prompt is not None and tokens is not None:
            flight.usage = {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}
        answer = document(raw) if flight.size <= LARGEST else None
        if answer is None or self.cache is None:
            return
        if not answer.get("usage") and flight.usage:
            answer["usage"] = flight.usage
        wanted, tenant = flight.form[0], out.request.tenant
        now = time.time()
        most = int(self.settings.mib * 2**20)
        try:
            await self.call(self.cache.store, wanted, tenant, answer, now, most, now - self.settings.ttl_s)
        except Exception as error:
            self.fault(error)


def document(raw: bytes) -> Document | None:
    """The answer (a stream of events, or a document) as a document; None for an error, and one that ends early."""
    try:
        answer = loads(raw) if raw.lstrip().startswith(b"{") else _assembled(Parser().feed(raw))
    except (ValueError, LookupError, TypeError, AttributeError, BrokenStream):
        return None
    choices = answer.get("choices")
    ended = choices and all(choice.get("finish_reason") is not None for choice in choices)
    return answer if ended and not answer.get("error") else None


def _assembled(found: list[Event]) -> Document:
    """One document of the parts: texts joined, lists of logprobs joined, the last value of everything else."""
    if found[-1].data != DONE:
        raise BrokenStream("the stream has no end")
    events = [read(event) for event in found[:-1]]
    chat = events[0]["object"].startswith("chat.")
    answer: Document = {name: value for name, value in events[0].items() if name not in ("choices", "usage")}
    answer["object"] = "chat.completion" if chat else "text_completion"
    choices: dict[int, Document] = {}
    for event in events:
        if event.get("usage"):
            answer["usage"] = event["usage"]
        for part in event["choices"]:
            empty = {"message": {"role": "assistant", "content": ""}} if chat else {"text": ""}
            whole = choices.setdefault(part["index"], {"index": part["index"], "finish_reason": None, **empty})
            said = part.get("delta", {}) if chat else {"text": part.get("text") or ""}
            _add(whole["message"] if chat else whole, said)
            if part.get("logprobs"):
                _add(whole.setdefault("logprobs", {}), part["logprobs"])
            for name, value in part.items():
                if name not in ("index", "delta", "text", "logprobs") and value is not None:
                    whole[name] = value
    answer["choices"] = [choices[index] for index in sorted(choices)]
    return answer


def _add(whole: Document, part: Document) -> None:
    """Append the texts and lists of `part` to those of `whole`; calls of tools by their index."""
    for name, value in part.items():
        if name == "tool_calls":
            calls = whole.setdefault(name, [])
            for call in value or ():
                while len(calls) <= call["index"]:
                    calls.append({"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
                one = calls[call["index"]]
                one.update({key: call[key] for key in ("id", "type") if call.get(key)})
                _add(one["function"], call.get("function") or {})
        elif name == "role" or value is None:
            whole[name] = value if name == "role" else whole.get(name)
        elif isinstance(value, str):
            whole[name] = (whole.get(name) or "") + value
        elif isinstance(value, list):
            whole[name] = [*(whole.get(name) or []), *value]
        else:
            whole[name] = value


def renewed(answer: Document) -> Document:
    """The document with an id and a time of its own, so that no client takes two answers for one."""
    prefix = str(answer.get("id", "cache")).partition("-")[0] or "cache"
    return {**answer, "id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time())}


def stream(answer: Document, include_usage: bool) -> Iterator[bytes]:
    """The document as a stream of events: of each choice one part with all of its text and one with its end.
    include_usage: whether the client asked for it (stream_options.include_usage)."""
    chat = answer.get("object") == "chat.completion"
    head = {name: value for name, value in answer.items() if name not in ("choices", "usage", "object")}
    head["object"] = "chat.completion.chunk" if chat else "text_completion"

    def event(choices: list[Document], **more: Any) -> bytes:
        return written(dumps({**head, "choices": choices, **({"usage": None} if include_usage else {}), **more}))

    for choice in answer["choices"]:
        index, logprobs = choice["index"], choice.get("logprobs")
        if chat:
            message = {name: value for name, value in choice["message"].items() if name != "role" and value}
            if calls := message.get("tool_calls"):
                message["tool_calls"] = [{"index": number, **call} for number, call in enumerate(calls)]
            said = [{"delta": {"role": "assistant", "content": ""}}, {"delta": message, "logprobs": logprobs}]
            end: Document = {"delta": {}}
        else:
            said = [{"text": choice["text"], "logprobs": logprobs}]
            end = {"text": "", "logprobs": None}
        rest = {name: value for name, value in choice.items() if name not in ("message", "text", "logprobs", "index")}
        for part in said:
            yield event([{"index": index, "finish_reason": None, **part}])
        yield event([{"index": index, **end, **rest}])
    if include_usage:
        yield event([], usage=answer.get("usage"))
    yield END_OF_STREAM
