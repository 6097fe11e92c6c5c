"""What a client has of a streamed answer, and how the rest of it is asked for after a backend broke off.

By token ids, where the server tells them (vLLM: `return_token_ids`): the ids of the prompt and of what came are a
prompt for /v1/completions, whose answer is the rest. No text is cut into tokens a second time, so under greedy decoding
the text is that of one unbroken answer. What a server keeps for one request (a grammar, penalties, text held back for a
stop string, a parser of reasoning) would be lost, so such requests are asked again from their beginning, if they are
greedy, and what the client has is left out; it is compared first. Anything else cannot be continued: sampling with
state, several answers at once, and an answer of which a part of a tool call has been sent.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from selfspec_cli.gateway.request import CHAT, COMPLETIONS, Request
from selfspec_cli.gateway.wire import DONE, END_OF_STREAM, BrokenStream, Event, dumps, read, written

COMPLETION_TOKENS = 16  # the answer's length in /v1/completions where the client names none
OTHERWISE = "the same request was answered otherwise the second time"
DELTA = "response.output_text.delta"
ENDS = ("response.completed", "response.incomplete")
_BEGINS = ("created", "queued", "in_progress", "output_item.added", "content_part.added")
BEGINS = tuple(f"response.{one}" for one in _BEGINS)  # events that carry no text
CHANNELS = ("reasoning", "reasoning_content", "content", "refusal", "text")
"""Fields of an event that hold text for the client, in the order in which a server sends them."""
_IDS = re.compile(rb'"(prompt_token_ids|token_ids)":\s*\[[\d,\s]*\]')
"""In a JSON text a quote is written \\", so these bytes are keys wherever they occur."""
_STATE = (  # fields that a server keeps something for, which its token ids do not tell
    *("stop", "bad_words", "frequency_penalty", "presence_penalty", "repetition_detection", "thinking_token_budget"),
    *("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("tools", "functions", "logits_processors", "watermarking"),
)
_SAMPLING = (  # fields that the server gets that goes on
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "ignore_eos", "stop_token_ids"),
    *("skip_special_tokens", "spaces_between_special_tokens", "logit_bias", "vllm_xargs", "priority"),
    *("include_stop_str_in_output", "allowed_token_ids", "logprob_token_ids", "return_tokens_as_token_ids"),
    *("stream_interval", "user", "cache_salt"),
)


class Way(StrEnum):
    """Where events come from: the first backend, one that goes on from token ids, one that was asked the same again."""

    first = "first"
    ids = "ids"
    again = "again"


def by_ids(request: Request, vllm: bool) -> bool:
    """Whether the backend is asked for token ids, to go on from them elsewhere. vllm: it answers as vLLM does."""
    body = request.body
    logged_chat = request.endpoint == CHAT and body.get("logprobs") not in (None, False)
    stateful = any(map(body.get, _STATE)) or body.get("include_reasoning") is False  # hides its ids
    asked = body.get("return_token_ids")
    return vllm and _single(request) and not (stateful or logged_chat or asked) and request.only_text


def _single(request: Request) -> bool:
    """Whether the answer is one text and nothing else."""
    body = request.body
    several = request.answers != 1 or (body.get("best_of") or 1) != 1 or bool(body.get("use_beam_search"))
    more = body.get("echo") or body.get("prompt_logprobs") is not None or "prompt_embeds" in body
    return request.endpoint in (CHAT, COMPLETIONS) and not several and not more


@dataclass
class Answer:
    """The client's side of one stream of /v1/chat/completions or /v1/completions. ids: token ids are asked for. head:
    id, created, model and object of the first event. texts: what the client has, by channel. other: something else than
    text was sent, such as a part of a tool call. ends: choices that have ended. usage: the newest, of the whole answer.
    skip: by channel, what a second answer still has to repeat. before: tokens from other backends than that of now."""

    request: Request
    ids: bool = False
    way: Way = Way.first
    head: dict[str, Any] | None = None
    prompt_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    texts: dict[str, list[str]] = field(default_factory=dict)
    other: bool = False
    ends: int = 0
    usage: dict[str, Any] | None = None
    skip: dict[str, str] = field(default_factory=dict)
    before: int = 0

    END = END_OF_STREAM
    named = False  # its events have names

    @property
    def finished(self) -> bool:
        return self.ends >= self.request.answers

    def take(self, event: Event) -> tuple[bytes | None, bool]:
        """(the event as the client gets it, None if it gets none; whether the stream ends with it). Raises BrokenStream
        for an error, for what is no event of an answer, and for another answer than the one that the client has."""
        if event.data.strip() == DONE:
            if not self.finished:
                raise BrokenStream("the stream ended before the answer did")
            return None, True
        if not event.data:
            return None, False
        document = read(event)
        if document.get("usage"):
            self._count(document)
        choices = document.get("choices") or []
        if not isinstance(choices, list) or not all(isinstance(one, dict) for one in choices):
            raise BrokenStream("an event whose choices are none")
        if not choices:
            return self._without_choices(document, event), False
        self.ends += sum(bool(choice.get("finish_reason")) for choice in choices)
        made = self._converted(document, choices[0], event.data)
        return None if made is None else written(made), False

    def _without_choices(self, document: dict[str, Any], event: Event) -> bytes | None:
        """An event that only counts tokens, if the client asked for it, or that a provider adds (content filters)."""
        if document.get("usage"):
            if not (self.request.body.get("stream_options") or {}).get("include_usage"):
                return None
            return written(event.data if self.way is Way.first else dumps(document | (self.head or {})))
        return written(event.data) if "choices" in document and self.way is Way.first else None

    def _converted(self, document: dict[str, Any], choice: dict[str, Any], data: bytes) -> bytes | None:
        if self.head is None:
            self.head = {name: document[name] for name in ("id", "object", "created", "model") if name in document}
        if self.way is Way.ids:
            self._as_continued(document, choice)
        elif self.way is Way.again and not self._trimmed(choice):
            return None
        self._record(document, choice)
        if self.way is Way.first:
            return _IDS.sub(rb'"\1":null', data) if self.ids else data
        choice |= {name: None for name in ("prompt_token_ids", "token_ids") if name in choice}
        return dumps(document | self.head)

    def _record(self, document: dict[str, Any], choice: dict[str, Any]) -> None:
        if self.ids:
            if not self.prompt_ids:
                self.prompt_ids = _ids(document.get("prompt_token_ids") or choice.get("prompt_token_ids"))
            self.token_ids += _ids(choice.get("token_ids"))
        inner = _inner(choice)
        self.other = self.other or bool(inner.get("tool_calls") or inner.get("function_call"))
        for channel in CHANNELS:
            text = inner.get(channel)
            if text and isinstance(text, str):
                self.texts.setdefault(channel, []).append(text)
            self.other = self.other or bool(text and not isinstance(text, str))

    def _as_continued(self, document: dict[str, Any], choice: dict[str, Any]) -> None:
        """Make an event of /v1/completions one of the endpoint that the client asked."""
        if self.request.endpoint == CHAT:
            choice["delta"] = {"content": choice.pop("text", "")}
            for name in ("prompt_token_ids", "prompt_logprobs", "prompt_text"):
                choice.pop(name, None)
        elif isinstance(logged := choice.get("logprobs"), dict) and logged.get("text_offset"):
            ahead = sum(map(len, self.texts.get("text", ())))
            logged["text_offset"] = [one + ahead for one in logged["text_offset"]]

    def _trimmed(self, choice: dict[str, Any]) -> bool:
        """Leave out what the client has; whether anything is left."""
        inner, ends = _inner(choice), bool(choice.get("finish_reason"))
        for channel in CHANNELS:
            if text := inner.get(channel):
                inner[channel] = self.new(channel, text)
        calls = inner.get("tool_calls") or inner.get("function_call")
        if calls or ends:
            self.check_repeated()
        inner.pop("role", None)
        return bool(calls or ends or any(inner.get(channel) for channel in CHANNELS))

    def new(self, channel: str, text: str) -> str:
        """What the client does not have of a second answer's text; raises BrokenStream where it is another text."""
        wanted = self.skip.get(channel, "")
        if not wanted:
            self.check_repeated()
            return text
        if not (text.startswith(wanted) or wanted.startswith(text)):
            raise BrokenStream(OTHERWISE)
        self.skip[channel] = wanted[len(text) :]
        return text[len(wanted) :]

    def check_repeated(self) -> None:
        """Raises BrokenStream while a second answer has not repeated all that the client has."""
        if any(self.skip.values()):
            raise BrokenStream(OTHERWISE)

    def _count(self, document: dict[str, Any]) -> None:
        """Keep the usage; after a continuation, what came before was counted as part of the prompt."""
        if self.way is Way.ids:
            prompt = len(self.prompt_ids)
            tokens = self.before + int(document["usage"].get("completion_tokens") or 0)
            document["usage"] = {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}
        self.usage = document["usage"]

    def next_way(self) -> Way | None:
        """How the rest can be asked for now; None where it cannot."""
        only_text = not self.other and set(self.texts) <= {"content", "text"}
        if self.ids and self.prompt_ids and only_text:
            return Way.ids
        logged = self.request.body.get("logprobs") not in (None, False)
        fits = _single(self.request) and self.request.greedy and not logged and not self.other
        return Way.again if fits and not self.request.body.get("return_token_ids") else None

    def rest(self, way: Way) -> tuple[str, dict[str, Any]] | None:
        """(endpoint, body) that ask for the rest, taken from now on; None where only the limit's event is missing."""
        self.way = way
        if way is Way.again:
            self.ids, self.before, self.prompt_ids, self.token_ids = False, 0, [], []
            self.skip = {channel: "".join(texts) for channel, texts in self.texts.items()}
            return self.request.endpoint, dict(self.request.body)
        self.before = len(self.token_ids)
        body = {name: self.request.body[name] for name in _SAMPLING if name in self.request.body}
        body |= {"model": self.request.body.get("model"), "prompt": self.prompt_ids + self.token_ids, "stream": True}
        limit = self.request.most_tokens
        if limit is None and self.request.endpoint == COMPLETIONS:
            limit = COMPLETION_TOKENS
        if limit is not None and limit <= self.before:
            return None
        body["max_tokens"] = None if limit is None else limit - self.before
        if least := self.request.body.get("min_tokens"):
            body["min_tokens"] = max(0, int(least) - self.before)
        if self.request.endpoint == COMPLETIONS:  # the `false` of a chat would be 0 there, and ask for them
            body["logprobs"] = self.request.body.get("logprobs")
        return COMPLETIONS, body

    def at_limit(self) -> bytes:
        empty: Mapping[str, Any] = {"delta": {"content": ""}} if self.request.endpoint == CHAT else {"text": ""}
        choice = {"index": 0, **empty, "logprobs": None, "finish_reason": "length"}
        return written(dumps({**(self.head or {}), "choices": [choice]}))


def _ids(found: Any) -> list[int]:
    """Token ids of an event, which may have none; raises BrokenStream for what are none."""
    ids = found or []
    if not isinstance(ids, list) or not all(type(one) is int for one in ids):
        raise BrokenStream("an event whose token ids are none")
    return ids


def _inner(choice: dict[str, Any]) -> dict[str, Any]:
    """Where an event's text is: the delta of a chat, otherwise the choice itself."""
    delta = choice.get("delta")
    return delta if isinstance(delta, dict) else choice


@dataclass
class ResponsesAnswer(Answer):
    """The client's side of one stream of /v1/responses: named events, which end with `response.completed`. After a
    death the request is asked again, if it is greedy and only text has been sent. seen: kinds of the events in BEGINS
    that the client has; again: those that the second answer has repeated. ids_seen: ids that the client knows. names:
    the second answer's ids, and the client's in their place. number: of the newest event."""

    seen: list[str] = field(default_factory=list)
    again: list[str] = field(default_factory=list)
    ids_seen: list[str] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    number: int = -1

    END = b""
    named = True

    def take(self, event: Event) -> tuple[bytes | None, bool]:
        if not event.data or event.data.strip() == DONE:  # which follows the last event of an answer
            return None, False
        document = read(event)
        kind = str(document.get("type") or event.name)
        response = document.get("response")
        if isinstance(response, dict) and response.get("usage"):
            usage = response["usage"]
            self.usage = {"prompt_tokens": usage.get("input_tokens"), "completion_tokens": usage.get("output_tokens")}
        made: bytes | None = event.data
        if self.way is Way.first:
            self._remember(document, kind)
        else:
            made = self._left(document, kind)
        if kind in ENDS:
            self.check_repeated()
            self.ends = 1
        return None if made is None else written(made, event.name), kind in ENDS

    def _remember(self, document: dict[str, Any], kind: str) -> None:
        self.number = int(document.get("sequence_number") or self.number + 1)
        if kind == DELTA:
            self.texts.setdefault("text", []).append(str(document.get("delta") or ""))
        elif kind in BEGINS:
            self.seen.append(kind)
            self.ids_seen += [name for name in _item_ids(document) if name not in self.ids_seen]
        elif kind not in ENDS:
            self.other = True  # calls, reasoning, or a text that has ended: it is not asked for again

    def _left(self, document: dict[str, Any], kind: str) -> bytes | None:
        """An event of the second answer, with the ids and numbers that the client knows; None for what it has."""
        if kind in BEGINS and len(self.again) < len(self.seen):
            if self.seen[len(self.again)] != kind:
                raise BrokenStream(OTHERWISE)
            self.again.append(kind)
            new = [name for name in _item_ids(document) if name not in self.names]
            self.names |= dict(zip(new, self.ids_seen[len(self.names) :], strict=False))
            return None
        if kind == DELTA and self.skip.get("text"):
            document["delta"] = self.new("text", str(document.get("delta") or ""))
            if not document["delta"]:
                return None
        else:
            self.check_repeated()
        self.number += 1
        self._remember({**document, "sequence_number": self.number}, kind)
        raw = dumps({**document, "sequence_number": self.number})
        for new_name, name in self.names.items():
            raw = raw.replace(f'"{new_name}"'.encode(), f'"{name}"'.encode())
        return raw

    def next_way(self) -> Way | None:
        return Way.again if self.request.greedy and not self.other else None

    def rest(self, way: Way) -> tuple[str, dict[str, Any]] | None:
        self.again, self.names = [], {}
        return super().rest(way)


def _item_ids(document: dict[str, Any]) -> list[str]:
    """Ids of the response and of its items."""
    inner = [document.get(name) for name in ("response", "item")]
    return [str(one["id"]) for one in inner if isinstance(one, dict) and one.get("id")]
