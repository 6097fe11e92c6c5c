"""Server-sent events as bytes: where one ends, whether it is one, what is taken out of it. Nothing here parses JSON.

A key is found by its bytes. That is exact: inside a JSON string a quote is written \\", so the bytes `"token_ids":`
occur in no text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

END = b"\n\n"
DONE = b"data: [DONE]"
_IDS = re.compile(rb'"(prompt_token_ids|token_ids)":\s*\[([\d,\s]*)\]')
_NO_CHOICES = re.compile(rb'"choices":\s*\[\s*\]')
_FINISHED = re.compile(rb'"finish_reason":\s*"')
_ERROR = re.compile(rb'^data: \{\s*"error":')
_NOT_TEXT = re.compile(rb'"(?:reasoning|reasoning_content|tool_calls|function_call|refusal)":\s*[^n\s]')


class BrokenStream(Exception):
    """A stream that ended early, stalled, or holds what is no event; the text says which."""


@dataclass
class Frames:
    """Cuts what arrives into whole events; an event that has not ended stays behind."""

    rest: bytes = b""

    def feed(self, part: bytes) -> list[bytes]:
        """The events that are whole now, without the empty line behind them."""
        data = self.rest + part if self.rest else part
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        if data.endswith(END):
            self.rest = b""
            return data[:-2].split(END)
        *events, self.rest = data.split(END)
        if len(self.rest) > 1 << 24:
            raise BrokenStream("an event of more than 16 MiB")
        return events


@dataclass
class Kept:
    """What is remembered of a stream, to go on with it elsewhere.

    prompt, tokens: ids as they stood in the events. first: the first event. whole: every event, where that is wanted.
    only_text: whether all that came is text.
    """

    ids: bool = False
    everything: bool = False
    prompt: bytes | None = None
    tokens: list[bytes] = field(default_factory=list)
    first: bytes | None = None
    whole: list[bytes] = field(default_factory=list)
    only_text: bool = True

    def prompt_ids(self) -> list[int]:
        """Of the prompt; empty where the server did not tell."""
        return _numbers(self.prompt or b"")

    def token_ids(self) -> list[int]:
        """Of the answer so far."""
        return [one for part in self.tokens for one in _numbers(part)]

    def take(self, event: bytes) -> bytes:
        """Remember an event; returns it without the ids, as it would be had nobody asked for them."""
        if self.first is None:
            self.first = event
        if self.everything:
            self.whole.append(event)
        if not self.ids:
            return event
        if self.only_text and _NOT_TEXT.search(event):
            self.only_text = False
        return _IDS.sub(self._taken, event)

    def _taken(self, found: re.Match[bytes]) -> bytes:
        if found[1] == b"prompt_token_ids":
            self.prompt = found[2] if self.prompt is None else self.prompt  # that of the rest is longer
        elif found[2]:
            self.tokens.append(found[2])
        return b'"' + found[1] + b'":null'


def _numbers(part: bytes) -> list[int]:
    return [int(one) for one in part.split(b",") if one.strip()]


def check(event: bytes) -> None:
    """Raises BrokenStream for what is no event of an answer: garbage, or an error in place of one."""
    if event.startswith(b"data: {"):
        if _ERROR.match(event):
            raise BrokenStream(f"the backend sent an error: {event[6:400].decode(errors='replace')}")
        if not event.endswith(b"}"):
            raise BrokenStream("an event that is no JSON object")
    elif event.startswith(b"data:{"):
        pass
    elif not event.startswith((b":", b"event:", b"id:", b"retry:")) and event not in (DONE, b"data:[DONE]"):
        raise BrokenStream(f"what came is no event: {event[:80]!r}")


def is_done(event: bytes) -> bool:
    """Whether it is the last one."""
    return event in (DONE, b"data:[DONE]")


def is_usage(event: bytes) -> bool:
    """Whether it has no choices, and so counts tokens only."""
    return b'"usage"' in event and _NO_CHOICES.search(event) is not None


def finishes(event: bytes) -> int:
    """Of how many choices it says why they have ended."""
    return len(_FINISHED.findall(event))


def payload(event: bytes) -> bytes:
    """The JSON of an event; empty where it has none."""
    return event[5:].strip() if event.startswith(b"data:") else b""
