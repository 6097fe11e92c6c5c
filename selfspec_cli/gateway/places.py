"""Requests that wait for a place at full backends, fair by tenant."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from selfspec_cli.gateway.request import Request


@dataclass
class Places:
    """The queue. free: whether a backend has room for a request now. waiting: by tenant; the one served last is last.

    `look` lets one request go; it is called whenever a place may have become free.
    """

    free: Callable[[Request], bool]
    waiting: dict[str, deque[tuple[Request, asyncio.Future[None]]]] = field(default_factory=dict)

    def __len__(self) -> int:
        return sum(map(len, self.waiting.values()))

    async def wait(self, request: Request, seconds: float) -> bool:
        """Wait until there is a place; False where there was none in so many seconds."""
        if not self.waiting and self.free(request):
            return True
        first = False
        try:
            async with asyncio.timeout(seconds):
                while True:
                    await self._turn(request, first)
                    if self.free(request):
                        return True
                    first = True  # somebody was faster: it keeps its turn
        except TimeoutError:
            return False

    async def _turn(self, request: Request, first: bool) -> None:
        ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        entry = (request, ready)
        queue = self.waiting.setdefault(request.tenant, deque())
        queue.appendleft(entry) if first else queue.append(entry)
        try:
            if not first:
                self.look()
            await ready
        finally:
            if entry in queue:
                queue.remove(entry)
            if not queue:
                self.waiting.pop(request.tenant, None)

    def look(self) -> None:
        """Let the first request of the next tenant go that finds a place."""
        for tenant in list(self.waiting):
            queue = self.waiting[tenant]
            found = next((entry for entry in queue if not entry[1].done() and self.free(entry[0])), None)
            if found is not None:
                self.waiting[tenant] = self.waiting.pop(tenant)
                queue.remove(found)
                found[1].set_result(None)
                return
