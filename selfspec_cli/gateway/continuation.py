"""How an answer that broke off is asked for again, so that the client gets the rest of it, once.

By token ids, where the server tells them (vLLM: `return_token_ids`): the prompt's ids and those that came are a prompt
for /v1/completions, whose answer is the rest. No text is cut into tokens a second time, so under greedy decoding the
text is that of one unbroken answer. What a server keeps for one request (a grammar, penalties, text held back for a
stop string) would be lost, so such requests are asked again from their beginning, if they are greedy, and what the
client has is left out; it is compared first. Other requests cannot be continued.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from selfspec_cli.gateway.asked import CHAT, COMPLETIONS, Asked
from selfspec_cli.gateway.events import BrokenStream, Kept, payload

IDS, AGAIN, NOT = "ids", "again", "not"
COMPLETION_TOKENS = 16  # the answer's length in /v1/completions where the client names none
_STATE = (
    "stop", "frequency_penalty", "presence_penalty", "response_format", "structured_outputs", "tools", "functions",
    "guided_json", "guided_regex", "guided_choice", "guided_grammar", "bad_words", "logits_processors",
    "thinking_token_budget",
)  # fmt: skip
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "ignore_eos", "stop_token_ids",
             "skip_special_tokens", "spaces_between_special_tokens", "logit_bias", "vllm_xargs", "priority",
             "include_stop_str_in_output", "allowed_token_ids", "lora_request", "user", "cache_salt")  # fmt: skip


def way(asked: Asked, vllm: bool) -> str:
    """How this request could be continued. vllm: whether its backend answers as vLLM does."""
    body = asked.body
    several = asked.answers != 1 or (body.get("best_of") or 1) != 1 or bool(body.get("use_beam_search"))
    if several or body.get("echo") or body.get("prompt_logprobs") is not None or "prompt_embeds" in body:
        return NOT
    stateful = any(body.get(name) for name in _STATE)
    logged = body.get("logprobs") not in (None, False)
    chat = asked.endpoint == CHAT and (logged or not _only_text(body.get("messages")))
    if vllm and not stateful and not chat and not body.get("return_token_ids"):
        return IDS
    return AGAIN if asked.greedy and not logged else NOT


def _only_text(messages: Any) -> bool:
    """Whether messages have no pictures or the like, of which token ids say only where they stood."""
    contents = [one.get("content") for one in messages if isinstance(one, dict)] if isinstance(messages, list) else []
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return all(isinstance(part, dict) and part.get("type") == "text" for part in parts)


@dataclass
class Rest:
    """The rest of an answer: how it is asked for, and how its events become those of the answer that broke off."""

    asked: Asked
    kept: Kept
    way: str
    _seen: str = ""
    _skip: str = ""

    def request(self) -> tuple[str, dict[str, Any]] | None:
        """(endpoint, body), or None where nothing is left to ask for.

        Raises:
            BrokenStream: what came so far does not allow it.
        """
        if self.way == AGAIN:
            self._skip, self._seen = _text(self.kept.whole), ""
            return self.asked.endpoint, dict(self.asked.body)
        if not self.kept.only_text:
            raise BrokenStream("it held more than text")
        prompt, tokens = self.kept.prompt_ids(), self.kept.token_ids()
        if not prompt:
            raise BrokenStream("the backend did not tell the prompt's tokens")
        body = {name: self.asked.body[name] for name in _SAMPLING if name in self.asked.body}
        body |= {"model": self.asked.body.get("model"), "prompt": prompt + tokens, "stream": True}
        limit = self.asked.most_tokens or (COMPLETION_TOKENS if self.asked.endpoint == COMPLETIONS else None)
        if limit is not None:
            if limit <= len(tokens):
                return None
            body["max_tokens"] = limit - len(tokens)
        else:
            body["max_tokens"] = None
        if least := self.asked.body.get("min_tokens"):
            body["min_tokens"] = max(0, int(least) - len(tokens))
        if self.asked.body.get("logprobs") is not None:
            body["logprobs"] = self.asked.body["logprobs"]
        return COMPLETIONS, body

    def event(self, event: bytes) -> bytes | None:
        """An event of the rest as one of the answer that broke off; None for one that the client has.

        Raises:
            BrokenStream: the answer that was asked for again has another text.
        """
        raw = payload(event)
        if not raw.startswith(b"{"):
            return event
        found = orjson.loads(raw)
        first = orjson.loads(payload(self.kept.first or b"")) if self.kept.first else {}
        found |= {name: first[name] for name in ("id", "created", "model") if name in first}
        choices = found.get("choices") or []
        if not choices:
            return _packed(found)
        if self.way == AGAIN:
            return self._again(found, choices[0])
        if self.asked.endpoint == CHAT:
            text = choices[0].pop("text", "")
            found["object"] = first.get("object", "chat.completion.chunk")
            for name in ("prompt_token_ids", "prompt_logprobs", "prompt_text"):
                choices[0].pop(name, None)
            choices[0]["delta"] = {"content": text}
        elif isinstance(logged := choices[0].get("logprobs"), dict) and logged.get("text_offset"):
            ahead = self._offset()
            logged["text_offset"] = [one + ahead for one in logged["text_offset"]]
        return _packed(found)

    def _offset(self) -> int:
        """Characters of the answer that came before the rest."""
        return sum(len(text) for text in map(_delta, self.kept.whole))

    def _again(self, found: dict[str, Any], choice: dict[str, Any]) -> bytes | None:
        """Without what the client has."""
        inner = choice.get("delta", choice)
        name = "content" if "delta" in choice else "text"
        if set(inner) & {"tool_calls", "reasoning", "reasoning_content"} and self._skip:
            raise BrokenStream("the same request was answered otherwise the second time")
        text = inner.get(name) or ""
        wanted = self._skip[len(self._seen) :]
        if wanted:
            begins = text.startswith(wanted) or wanted.startswith(text)
            if not begins or (choice.get("finish_reason") and len(text) < len(wanted)):
                raise BrokenStream("the same request was answered otherwise the second time")
            self._seen += text[: len(wanted)]
            text = text[len(wanted) :]
            if not text and not choice.get("finish_reason"):
                return None
        elif not text and not choice.get("finish_reason") and self._skip:
            return None
        inner.pop("role", None)
        inner[name] = text
        return _packed(found)

    def ended(self) -> bytes:
        """The event that says that the limit was reached, for an answer that lacks nothing else."""
        first = orjson.loads(payload(self.kept.first or b"data: {}"))
        empty = {"delta": {"content": ""}} if self.asked.endpoint == CHAT else {"text": ""}
        choice = {"index": 0, **empty, "logprobs": None, "finish_reason": "length"}
        return _packed({name: first[name] for name in ("id", "object", "created", "model") if name in first}
                       | {"choices": [choice]})  # fmt: skip


def usage(found: Mapping[str, Any], prompt: int, before: int) -> dict[str, Any]:
    """The usage of a whole answer, of which the rest was counted with what came before as part of its prompt."""
    tokens = before + int(found.get("completion_tokens") or 0)
    return {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}


def _packed(found: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(found)


def _delta(event: bytes) -> str:
    """The text of one event."""
    raw = payload(event)
    choices = orjson.loads(raw).get("choices") if raw.startswith(b"{") else None
    if not choices:
        return ""
    inner = choices[0].get("delta", choices[0])
    if set(inner) & {"tool_calls", "reasoning", "reasoning_content"}:
        raise BrokenStream("it held more than text")
    return str(inner.get("content", inner.get("text")) or "")


def _text(events: list[bytes]) -> str:
    """The text of all events so far; raises BrokenStream where they held more."""
    return "".join(map(_delta, events))
