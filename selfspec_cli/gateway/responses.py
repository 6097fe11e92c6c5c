"""/v1/responses as a stream: named events, whose text is in `response.output_text.delta` and which end with
`response.completed`. After a death the request is asked again from its beginning, if it is greedy and only text has
been sent, and what the client has is left out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from selfspec_cli.gateway import packed
from selfspec_cli.gateway.continuation import OTHERWISE, Answer, Way
from selfspec_cli.gateway.events import DONE, BrokenStream, Event, read, written

DELTA = "response.output_text.delta"
ENDS = ("response.completed", "response.incomplete")
_BEGINS = ("created", "queued", "in_progress", "output_item.added", "content_part.added")
BEGINS = tuple(f"response.{one}" for one in _BEGINS)
"""Events that carry no text; a second answer's are left out where the client has the first one's."""


@dataclass
class ResponsesAnswer(Answer):
    """seen: kinds of the events in BEGINS that the client has; again: those that the second answer has repeated.
    ids_seen: ids that the client knows. names: the second answer's ids, and the client's in their place. number: of the
    newest event."""

    seen: list[str] = field(default_factory=list)
    again: list[str] = field(default_factory=list)
    ids_seen: list[str] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    number: int = -1

    END = b""
    named = True

    def take(self, event: Event) -> tuple[bytes | None, bool]:
        """As `Answer.take`."""
        if event.data.strip() == DONE:
            return None, False  # what follows the last event of an answer
        if not event.data:
            return None, False
        document = read(event)
        kind = str(document.get("type") or event.name)
        response = document.get("response")
        if isinstance(response, dict) and response.get("usage"):
            usage = response["usage"]
            self.usage = {"prompt_tokens": usage.get("input_tokens"), "completion_tokens": usage.get("output_tokens")}
        if self.way is Way.first:
            self._remember(document, kind)
            made: bytes | None = event.data
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
            self.ids_seen += [name for name in _ids(document) if name not in self.ids_seen]
        elif kind not in ENDS:
            self.other = True  # calls, reasoning, or a text that has ended: it is not asked for again

    def _left(self, document: dict[str, Any], kind: str) -> bytes | None:
        """An event of the second answer, with the ids and numbers that the client knows; None for what it has."""
        if kind in BEGINS and len(self.again) < len(self.seen):
            if self.seen[len(self.again)] != kind:
                raise BrokenStream(OTHERWISE)
            self.again.append(kind)
            new = [name for name in _ids(document) if name not in self.names]
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
        raw = packed.dumps({**document, "sequence_number": self.number})
        for new_name, name in self.names.items():
            raw = raw.replace(f'"{new_name}"'.encode(), f'"{name}"'.encode())
        return raw

    def next_way(self) -> Way | None:
        """As `Answer.next_way`."""
        return Way.again if self.request.greedy and not self.other else None

    def rest(self, way: Way) -> tuple[str, dict[str, Any]] | None:
        """As `Answer.rest`."""
        self.again, self.names = [], {}
        return super().rest(way)


def _ids(document: dict[str, Any]) -> list[str]:
    """Ids of the response and of its items."""
    inner = [document.get(name) for name in ("response", "item")]
    return [str(one["id"]) for one in inner if isinstance(one, dict) and one.get("id")]
