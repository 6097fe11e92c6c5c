"""Answers as documents and as streams: what was streamed comes out whole, and goes in again as the same document."""

import pytest

from selfspec_cli.gateway import replay


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
    again = replay.document(b"".join(replay.stream(answer, include_usage=True)))
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
        list(replay.stream(CHAT, include_usage=False))[:-1],  # no [DONE]
        [next(replay.stream(CHAT, include_usage=False)), b"data: [DONE]\n\n"],  # no finish_reason
        [b'data: {"error": {"message": "the backend died"}}\n\ndata: [DONE]\n\n'],
        [b"data: {broken\n\ndata: [DONE]\n\n"],
    ],
)
def test_what_is_no_whole_answer_is_refused(chunks):
    assert replay.document(b"".join(chunks)) is None


def test_a_renewed_answer_has_an_id_of_its_own():
    one, other = replay.renewed(CHAT), replay.renewed(CHAT)
    assert one["id"] != other["id"] != CHAT["id"]
    assert one["id"].startswith("chat-") and one["created"] > CHAT["created"]
