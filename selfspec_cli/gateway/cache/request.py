"""A request as the cache sees it: what identifies it exactly, and which part of it is compared by meaning."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson

from selfspec_cli.gateway.settings import SPECIAL

Wants = Literal["none", "exact", "meaning"]


@dataclass(frozen=True)
class CacheRequest:
    """What shapes an answer, and nothing else.

    Attributes:
        tenant: whose request; tenants never see each other's entries.
        model, endpoint: as the client names them.
        messages: of a chat, in OpenAI's form, system prompt included; or
        prompt: of a completion.
        system: a system prompt that is not in `messages`.
        sampling: every other field of the body that shapes the answer (temperature, n, logprobs, response_format,
            seed...).
        tools: the body's tools.
        wants: the most that the request may be answered by: nothing, the same request, or one that means the same.
        now: seconds since the epoch; None: the clock's.
    """

    tenant: str
    model: str
    endpoint: str
    messages: Sequence[Mapping[str, Any]] | None = None
    prompt: Any = None
    system: str = ""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    tools: Any = None
    wants: Wants = "exact"
    now: float | None = None

    @property
    def specials(self) -> set[str]:
        """Which of `SPECIAL` this request is."""
        names = {"tools", "tool_choice", "functions", "function_call"} & set(self.sampling)
        called = any(message.get("tool_calls") or message.get("role") == "tool" for message in self.messages or ())
        return {
            name
            for name, has in zip(
                SPECIAL, (bool(self.tools) or bool(names) or called, self._images, self._seed), strict=True
            )
            if has
        }

    @property
    def _images(self) -> bool:
        """Whether a message has a part that is no text: a picture, sound or a file."""
        parts = [m["content"] for m in self.messages or () if isinstance(m.get("content"), list)]
        return any(not isinstance(part, Mapping) or part.get("type") != "text" for content in parts for part in content)

    @property
    def _seed(self) -> bool:
        return self.sampling.get("seed") is not None

    @property
    def key(self) -> bytes:
        """32 bytes that differ for any two requests that differ in what shapes the answer."""
        return _digest([*self._rest(), self.messages, self.prompt])

    @property
    def question(self) -> str | None:
        """What is compared by meaning: the last message if it is a user's plain text, or a prompt of text. None
        otherwise, and for tools and images, whose answers hang on more than the question.
        """
        if self.specials & {"tools", "images"}:
            return None
        last: Any = self.prompt
        if self.messages:
            if self.messages[-1].get("role") != "user":
                return None
            last = self.messages[-1].get("content")
        if isinstance(last, list) and len(last) == 1 and isinstance(last[0], Mapping):
            last = last[0].get("text")
        return last.strip() if isinstance(last, str) and last.strip() else None

    @property
    def scope(self) -> bytes:
        """32 bytes that two requests share if and only if they differ in the question at most: the tenant, the model,
        the sampling and every earlier message are the same.
        """
        return _digest([*self._rest(), list(self.messages[:-1]) if self.messages else None, None])

    def _rest(self) -> list[Any]:
        return [self.tenant, self.model, self.endpoint, self.system, dict(self.sampling), self.tools]


def _digest(value: Any) -> bytes:
    return hashlib.sha256(orjson.dumps(value, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)).digest()
