"""Server-sent events: the parser against the standard's own algorithm, what is no part of an answer, and answers as
documents and as streams."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from selfspec_cli.gateway import cache
from selfspec_cli.gateway.continuation import Answer, Way
from selfspec_cli.gateway.request import COMPLETIONS, Request
from selfspec_cli.gateway.wire import BrokenStream, Event, Parser, loads, written


def by_the_standard(raw):
    """WHATWG HTML, 9.2.6, line by line over the whole stream."""
    lines = raw.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
    found, data, name = [], [], ""
    for line in lines[:-1]:  # what has no end is never dispatched
        if not line:
            if data:
                found.append(Event(b"\n".join(data), name))
            data, name = [], ""
        elif not line.startswith(b":"):
            field, _, value = line.partition(b":")
            value = value[1:] if value.startswith(b" ") else value
            if field == b"data":
                data.append(value)
            elif field == b"event":
                name = value.decode(errors="replace")
    return found


WORDS = [b"data", b"event", b"id", b"retry", b"x", b"{}", b"[DONE]", b"\xef\xbb\xbf", b"\xff"]
LINES = [b"data: x", b"data: y\r\n", b"data: z\n\n", b"event: e\n"]
PIECES = st.sampled_from([*WORDS, *LINES, b":", b": ", b" ", b"\n", b"\r", b"\r\n", b"\n\n"])


@given(st.lists(PIECES, min_size=12, max_size=40).map(b"".join), st.lists(st.integers(1, 9), min_size=1, max_size=9))
def test_the_parser_does_what_the_standard_says_wherever_the_stream_is_cut(raw, sizes):
    parser, found, place, turn = Parser(), [], 0, 0
    while place < len(raw):
        size = sizes[turn % len(sizes)]
        found += parser.feed(raw[place : place + size])
        place, turn = place + size, turn + 1
    assert found == by_the_standard(raw)


def test_an_event_that_does_not_end_is_given_up():
    parser = Parser()
    for _ in range(60):
        parser.feed(b"data: " + b"x" * 2**16)
    with pytest.raises(BrokenStream, match="4 MiB"):
        parser.feed(b"x" * 2**19)


def test_token_ids_are_taken_out_and_text_is_left_alone():
    answer = Answer(Request(COMPLETIONS, {"prompt": "x"}), ids=True)
    data = b'{"choices":[{"text":"say \\"token_ids\\":[1,2]","prompt_token_ids":[7, 8],"token_ids":[9]}]}'
    made, ends = answer.take(Event(data))
    assert (made, ends) == (written(data.replace(b"[7, 8]", b"null").replace(b"[9]", b"null")), False)
    answer.take(Event(b'{"choices":[{"text":"x","prompt_token_ids":[7,8,9],"token_ids":[10,11]}]}'))
    assert (answer.prompt_ids, answer.token_ids) == ([7, 8], [9, 10, 11])
    assert answer.next_way() is Way.ids
    answer.take(Event(b'{"choices":[{"delta":{"tool_calls":[{"index":0}]}}]}'))
    assert answer.next_way() is None


@pytest.mark.parametrize("value", [b'"\\ud800"', b"NaN", b"-Infinity", b"[" * 9999 + b"]" * 9999])
def test_what_could_not_be_handed_on_is_no_json(value):
    with pytest.raises(ValueError, match=r"."):
        loads(b'{"number": 12345678901234567890, "value": %s}' % value)


# ---- What was streamed comes out whole, and goes in again as the same document


def made(kind, choices, **more):
    return {"id": f"{kind[:4]}-1", "object": kind, "created": 1, "model": "m", "choices": choices, **more}


def usage(prompt, tokens):
    return {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}


LOGPROBS = [{"token": word, "logprob": -0.1, "top_logprobs": []} for word in ("Hello", " you")]
SAID = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "Hello you"}}
ALSO = {"index": 1, "finish_reason": "length", "message": {"role": "assistant", "content": "Hé"}}
CHAT = made("chat.completion", [SAID | {"logprobs": {"content": LOGPROBS}}, ALSO], usage=usage(3, 4))
TOOL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
CALLS = {"role": "assistant", "content": "", "tool_calls": [TOOL]}
CALL = made("chat.completion", [{"index": 0, "finish_reason": "tool_calls", "message": CALLS}])
WROTE = {"index": 0, "text": "a\n\nb", "finish_reason": "stop", "stop_reason": 7}
TEXT = made("text_completion", [WROTE], usage=usage(1, 2))


@pytest.mark.parametrize("answer", [CHAT, CALL, TEXT])
def test_a_document_survives_its_stream(answer):
    again = cache.document(b"".join(cache.stream(answer, include_usage=True)))
    for choice in again["choices"]:
        if choice.get("logprobs") is None:
            choice.pop("logprobs", None)
    assert again == answer


@pytest.mark.parametrize(
    "chunks",
    [
        [],
        [b"nonsense"],
        [b'{"error": {"message": "no"}}'],
        [b'{"choices": []}'],
        [b'{"choices": [{"index": 0, "text": "half", "finish_reason": null}]}'],
        list(cache.stream(CHAT, include_usage=False))[:-1],  # no [DONE]
        [next(cache.stream(CHAT, include_usage=False)), b"data: [DONE]\n\n"],  # no finish_reason
        [b'data: {"error": {"message": "the backend died"}}\n\ndata: [DONE]\n\n'],
        [b"data: {broken\n\ndata: [DONE]\n\n"],
    ],
)
def test_what_is_no_whole_answer_is_refused(chunks):
    assert cache.document(b"".join(chunks)) is None


def test_a_renewed_answer_has_an_id_of_its_own():
    one, other = cache.renewed(CHAT), cache.renewed(CHAT)
    assert one["id"] != other["id"] != CHAT["id"]
    assert one["id"].startswith("chat-") and one["created"] > CHAT["created"]
