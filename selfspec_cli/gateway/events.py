"""Server-sent events by the standard (WHATWG HTML, section 9.2), and which of them are no part of an answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from selfspec_cli.gateway import packed

BOM = b"\xef\xbb\xbf"
DONE = b"[DONE]"
LARGEST = 1 << 22  # bytes of one event
END_OF_STREAM = b"data: [DONE]\n\n"


class BrokenStream(Exception):
    """A stream that ended early, stalled, or holds what is no event of an answer; the text says which."""


@dataclass(frozen=True)
class Event:
    """One event. data: its lines joined by line feeds. name: of its `event` field, empty if it has none."""

    data: bytes
    name: str = ""


class Parser:
    """Cuts bytes into events. Lines end in CR, LF or both; comments, `id` and `retry` are read and left out."""

    def __init__(self) -> None:
        self._rest = b""
        self._after_cr = False
        self._begun = False

    def feed(self, part: bytes) -> list[Event]:
        """Return the events that are complete now.

        Raises:
            BrokenStream: an event of more than LARGEST bytes.
        """
        if self._after_cr and part:
            part = part.removeprefix(b"\n")  # the second half of a line end that was cut in two
            self._after_cr = False
        if b"\r" in part:
            self._after_cr = part.endswith(b"\r")
            part = part.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        text = self._rest + part if self._rest else part
        if not self._begun:
            if len(text) < len(BOM) and BOM.startswith(text):
                self._rest = text
                return []
            self._begun, text = True, text.removeprefix(BOM)
        *blocks, self._rest = text.split(b"\n\n")
        if len(self._rest) > LARGEST:
            raise BrokenStream("an event of more than 4 MiB")
        return [event for block in blocks if (event := _event(block)) is not None]


def _event(block: bytes) -> Event | None:
    """The event that these lines make; None for comments and fields without data."""
    if block.startswith(b"data: ") and b"\n" not in block:
        return Event(block[6:])
    data, name = [], ""
    for line in block.split(b"\n"):
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            data.append(value)
        elif field == b"event":
            name = value.decode(errors="replace")
    return Event(b"\n".join(data), name) if data else None


def written(data: bytes, name: str = "") -> bytes:
    """An event as bytes. data: JSON, in which a line feed can only stand between tokens."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + data.replace(b"\n", b" ") + b"\n\n"


def read(event: Event) -> dict[str, Any]:
    """The JSON object of an event.

    Raises:
        BrokenStream: it is no JSON object, or an error in any of the forms that servers use.
    """
    try:
        document = packed.loads(event.data)
    except ValueError as error:
        raise BrokenStream("an event that is no JSON") from error
    if not isinstance(document, dict):
        raise BrokenStream("an event that is no JSON object")
    failed = document.get("type") in ("error", "response.failed")
    if event.name == "error" or failed or document.get("error") or document.get("object") == "error":
        raise BrokenStream("the backend sent an error in its stream")
    return document
