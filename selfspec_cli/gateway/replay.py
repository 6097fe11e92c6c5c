"""An answer as the client got it, as one document, and as a stream again."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from typing import Any

from selfspec_cli.gateway import packed
from selfspec_cli.gateway.events import DONE, END_OF_STREAM, BrokenStream, Event, Parser, read, written
from selfspec_cli.gateway.packed import dumps

Document = dict[str, Any]


def document(raw: bytes) -> Document | None:
    """The answer as one JSON document in OpenAI's form; None for one that is an error, ends early or is none at all.

    Args:
        raw: what a client was sent: a stream of events, or one JSON document.
    """
    try:
        answer = packed.loads(raw) if raw.lstrip().startswith(b"{") else _assembled(Parser().feed(raw))
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
            empty = {"index": part["index"], "finish_reason": None}
            whole = choices.setdefault(
                part["index"],
                {**empty, "message": {"role": "assistant", "content": ""}} if chat else {**empty, "text": ""},
            )
            _add(
                whole["message"] if chat else whole, part.get("delta", {}) if chat else {"text": part.get("text") or ""}
            )
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

    Args:
        include_usage: whether the client asked for the usage (stream_options.include_usage).
    """
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
            said: list[Document] = [
                {"delta": {"role": "assistant", "content": ""}},
                {"delta": message, "logprobs": logprobs},
            ]
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
