"""Streams in every form of the standard, and every form of an error in one."""

import json
from dataclasses import replace

import pytest
from fake import Fake, answer, warms
from running import PROMPT, QUICK, WANTED, running


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
    async with running([Fake("a", form=form)], tmp_path) as on:
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
    async with running([Fake("a", garbage_after=at, garbage=instead), Fake("b")], tmp_path) as on:
        assert (await on.stream(PROMPT)).text == WANTED
        on.gateway.replicas[1].draining = True
        if at == 0:
            assert (await on.post(PROMPT | {"stream": True}))[0] == 502
        else:
            *parts, last = (await on.stream(PROMPT)).events
            assert "error" in last and all("error" not in part for part in parts)
            assert answer("once upon", 3) == "".join(part["choices"][0]["text"] for part in parts)


def strange(more):
    """Events that have `more` in their choices, or in the event that counts tokens."""

    def form(data):
        if data[:1] == b"{":
            event = json.loads(data)
            for choice in event["choices"]:
                choice |= more
            data = json.dumps(event | ({} if event["choices"] else more)).encode()
        return b"data: " + data + b"\n\n"

    return form


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
    async with running([Fake("a", die_after=4, times=1), Fake("b", form=strange(more))], tmp_path) as on:
        assert (await on.stream(PROMPT | body)).text == WANTED
        assert (await on.rows())[-1]["tried"] == tried


async def test_text_in_parts_of_its_own_form_is_handed_on_and_not_continued(tmp_path):
    """Providers send lists of parts; what was sent of them is no text that could be asked for again."""
    first = Fake("a", form=strange({"text": [{"type": "text"}]}))
    async with running([first, Fake("b")], tmp_path, kinds={"a": "openai", "b": "openai"}) as on:
        assert all(one["choices"][0]["text"] == [{"type": "text"}] for one in (await on.stream(PROMPT)).events)
        first.die_after = 3
        *_, last = (await on.stream(PROMPT)).events
        assert last["error"]["backend"] == "a"


@pytest.mark.parametrize("tokens", [-5, 10**30, True, "7"])
async def test_tokens_that_are_no_count_are_not_counted(tmp_path, tokens):
    form = strange({"usage": {"prompt_tokens": 3, "completion_tokens": tokens}})
    async with running([Fake("a", form=form)], tmp_path) as on:
        assert (await on.stream(PROMPT)).text == WANTED
        row = (await on.rows())[-1]
        assert (row["prompt_tokens"], row["tokens"], row["status"]) == (3, 8, 200)


async def test_an_error_that_is_null_is_none(tmp_path):
    form = lambda data: b"data: " + data.replace(b'{"id"', b'{"error": null, "id"', 1) + b"\n\n"  # noqa: E731
    async with running([Fake("a", form=form)], tmp_path) as on:
        assert (await on.stream(PROMPT)).text == WANTED


class WarmsUpForEver(Fake):
    """Sends comments alone when it is warmed up."""

    async def stream(self, request, body):
        self.times = int(warms(body))
        return await super().stream(request, body | ({"prompt": "never"} if self.times else {}))


@pytest.mark.parametrize(("kind", "at"), [(Fake, 0), (Fake, 3), (WarmsUpForEver, 0)])
async def test_comments_alone_are_no_life(tmp_path, kind, at):
    """A backend that sends them when it is warmed up is not waited for for ever."""
    quick = replace(QUICK, first_byte_seconds=1.0, stall_seconds=1.0)
    async with running([kind("a", hang_after=at, pings=True), Fake("b")], tmp_path, limits=quick) as on:
        assert (await on.stream(PROMPT)).text == WANTED
