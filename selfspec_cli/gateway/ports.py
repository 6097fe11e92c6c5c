"""What the gateway needs of an answer cache; `selfspec_cli.gateway.cache` is one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Protocol


class AnswerCache(Protocol):
    """Looks answers up, keeps them, learns which hits were wrong."""

    async def lookup(self, request: Any) -> Any | None:
        """A hit for this request, or None."""

    async def store(self, request: Any, answer_chunks: list[bytes], final: dict[str, Any]) -> Any:
        """Keep an answer. answer_chunks: as they were sent to the client."""

    def replay(self, hit: Any, stream: bool, include_usage: bool = False) -> AsyncIterator[bytes]:
        """The bytes of a hit, as a stream of events or as one JSON object."""

    async def settle(self, most: int = 1) -> int:
        """Judge answers that wait for it, in idle time; how many were."""

    def feedback(self, entry_id: str, right: bool) -> bool:
        """Somebody judged a hit; whether there is such an entry."""

    def evict(self, entry_id: str) -> bool:
        """Forget one answer; whether there was one."""

    def stats(self) -> dict[str, Any]:
        """For the control surface."""

    def close(self) -> None:
        """Write what is left."""
