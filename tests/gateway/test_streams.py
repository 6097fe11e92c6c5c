"""Streams in every form of the standard, and every form of an error in one."""

import asyncio
import json
from dataclasses import replace
from typing import ClassVar

import pytest
from aiohttp import web
from fake import WORDS, Fake, text_of, warms
from running import PROMPT, QUICK, WANTED, running


class Odd(Fake):
    """Writes its events in a form of its own; from event `at` on what `instead` is."""

    write = staticmethod(lambda data: b"data: " + data + b"\n\n")
    at, instead = None, b""

    async def stream(self, request, body):
        if warms(body):
            return await super().stream(request, body)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        ids, tokens = self.plan(body)
        head = {"id": "x", "object": "text_completion", "created": 1, "model": self.model}
        for place, token in enumerate(tokens):
            if place == self.at:
                await response.write(self.instead)
                return response
            choice = {"index": 0, "text": WORDS[token], "finish_reason": "length" if place + 1 == len(tokens) else None}
            if body.get("return_token_ids"):
                choice |= {"token_ids": [token], "prompt_token_ids": None if place else ids}
            await response.write(self.write(json.dumps({**head, "choices": [choice]}).encode()))
        usage = {"prompt_tokens": len(ids), "completion_tokens": len(tokens)}
        await response.write(self.write(json.dumps({**head, "choices": [], "usage": usage}).encode()))
        await response.write(self.write(b"[DONE]"))
        return response


@pytest.mark.parametrize(
    "form",
    [
        lambda data: b"id: 7\nevent: message\nretry: 10\ndata: " + data + b"\n\n",
        lambda data: b": a comment\ndata: " + data + b"\n\n",
        lambda data: b": a ping\n\ndata:" + data + b"\n\n",
        lambda data: b"data: " + data + b"\r\n\r\n",
        lambda data: b"data: " + data + b"\r\r",
        lambda data: b"data: " + data.replace(b", ", b",\ndata: ") + b"\n\n",
        lambda data: b"data:  \t" + data + b"\n\n\n\n",
        lambda data: b"data: " + data + b"\nid\n\n",
    ],
)
async def test_events_in_every_form_of_the_standard_come_through(tmp_path, form):
    fake = Odd("a")
    fake.write = form
    async with running([fake], tmp_path) as on:
        stream = await on.stream(PROMPT | {"stream_options": {"include_usage": True}})
        assert stream.text == WANTED
        assert stream.events[-1]["usage"]["completion_tokens"] == 8
        assert (await on.rows())[0]["tokens"] == 8


@pytest.mark.parametrize(
    "instead",
    [
        b'event: error\ndata: {"message": "no"}\n\n',
        b'data: {  "error": "no"}\n\n',
        b'data: {"id": "x", "error": {"message": "no"}}\n\n',
        b'data: {"object": "error", "message": "no"}\n\n',
        b'data: {"type": "error", "message": "no"}\n\n',
        b"data: 7\n\n",
        b"data: [DONE]\n\n",
        b"data: oh dear\n\n",
        b"",
        b'data: {"choices": 5}\n\n',
        b'data: {"choices": [null]}\n\n',
        b'data: {"choices": [{"text": "a", "token_ids": 5}]}\n\n',
        b'data: {"choices": [{"text": "a", "token_ids": ["a", null]}]}\n\n',
        b'data: {"choices": [{"text": "\\ud800"}], "n": 12345678901234567890}\n\n',
        b'data: {"choices": [], "n": 12345678901234567890, "deep": ' + b"[" * 9999 + b"]" * 9999 + b"}\n\n",
    ],
)
@pytest.mark.parametrize("at", [0, 3])
async def test_every_error_in_a_stream_is_continued_elsewhere_or_told_once(tmp_path, instead, at):
    fake = Odd("a")
    fake.at, fake.instead = at, instead
    async with running([fake, Fake("b")], tmp_path) as on:
        assert (await on.stream(PROMPT)).text == WANTED
        on.gateway.replicas[1].draining = True
        if at == 0:
            assert (await on.post(PROMPT | {"stream": True}))[0] == 502
        else:
            *parts, last = (await on.stream(PROMPT)).events
            assert "error" in last and all("error" not in part for part in parts)
            assert text_of(answer_ids()[:3]) == "".join(part["choices"][0]["text"] for part in parts)


def answer_ids():
    from fake import encode, generated

    return generated(encode("once upon"), 8)


class Strange(Odd):
    """Its events have what `more` adds to their choices, or to the event that counts tokens."""

    more: ClassVar[dict] = {}

    def write(self, data):
        if data[:1] == b"{":
            event = json.loads(data)
            for choice in event["choices"]:
                choice |= self.more
            data = json.dumps(event | ({} if event["choices"] else self.more)).encode()
        return b"data: " + data + b"\n\n"


@pytest.mark.parametrize(
    ("more", "body", "tried"),
    [
        ({"usage": [1]}, {}, ["a"]),  # of an answer that has ended: its tokens are counted here
        ({"usage": {"completion_tokens": "x"}}, {}, ["a"]),
        ({"logprobs": {"text_offset": ["x"]}}, {"logprobs": 1}, ["a", "b"]),
        ({"text": ["x"]}, {"stop": ["never"]}, ["a", "b"]),
        ({"text": 5}, {"stop": ["never"]}, ["a", "b"]),
    ],
)
async def test_a_backend_that_continues_in_another_form_is_one_that_failed(tmp_path, more, body, tried):
    first, second = Fake("a", die_after=4, times=1), Strange("b")
    second.more = more
    async with running([first, second], tmp_path) as on:
        assert (await on.stream(PROMPT | body)).text == WANTED
        assert (await on.rows())[-1]["tried"] == tried


async def test_text_in_parts_of_its_own_form_is_handed_on_and_not_continued(tmp_path):
    """Providers send lists of parts; what was sent of them is no text that could be asked for again."""
    first = Strange("a")
    first.more = {"text": [{"type": "text"}]}
    async with running([first, Fake("b")], tmp_path, kinds={"a": "openai", "b": "openai"}) as on:
        assert all(one["choices"][0]["text"] == first.more["text"] for one in (await on.stream(PROMPT)).events)
        first.at, first.instead = 3, b""
        *_, last = (await on.stream(PROMPT)).events
        assert last["error"]["backend"] == "a"


@pytest.mark.parametrize("tokens", [-5, 10**30, True, "7"])
async def test_tokens_that_are_no_count_are_not_counted(tmp_path, tokens):
    fake = Strange("a")
    fake.more = {"usage": {"prompt_tokens": 3, "completion_tokens": tokens}}
    async with running([fake], tmp_path) as on:
        assert (await on.stream(PROMPT)).text == WANTED
        row = (await on.rows())[-1]
        assert (row["prompt_tokens"], row["tokens"], row["status"]) == (3, 8, 200)


async def test_an_error_that_is_null_is_none(tmp_path):
    fake = Odd("a")
    fake.write = lambda data: b"data: " + data.replace(b'{"id"', b'{"error": null, "id"', 1) + b"\n\n"
    async with running([fake], tmp_path) as on:
        assert (await on.stream(PROMPT)).text == WANTED


class Pings(Odd):
    """Comments alone from event `at` on; warming: when it is warmed up, and never else."""

    warming = False

    async def stream(self, request, body):
        if warms(body) != self.warming:
            return await Fake.stream(self, request, body)
        response = await super().stream(request, body | {"prompt": "once upon"})
        while True:
            await response.write(b": ping\n\n")
            await asyncio.sleep(0.05)


@pytest.mark.parametrize(("at", "warming"), [(0, False), (3, False), (0, True)])
async def test_pings_alone_are_no_life(tmp_path, at, warming):
    """A backend that sends them when it is warmed up is not waited for for ever."""
    fake = Pings("a")
    fake.at, fake.warming = at, warming
    quick = replace(QUICK, first_byte_seconds=1.0, stall_seconds=1.0)
    async with running([fake, Fake("b")], tmp_path, limits=quick) as on:
        assert (await on.stream(PROMPT)).text == WANTED
        assert (await on.rows())[0]["route"] == ("a" if warming else "b")
