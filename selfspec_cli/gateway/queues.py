"""Two queues: requests of class `batch` wait for a reason to go, and any request waits while all backends are full."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from selfspec_cli.gateway.replica import Replica
from selfspec_cli.gateway.request import Request

ENOUGH = 8  # requests that are let go together, whether or not a backend idles
DEADLINE_SECONDS = 60.0  # a request that names no deadline waits no longer


class Batch:
    """Requests of class `batch` wait until a backend idles, enough of them are there, or their deadline comes.

    candidates: backends that could take a request now. `look` lets requests go where a reason is there; it is called
    when a request comes, when one ends, and when backends were looked at. The oldest deadline goes first.
    """

    def __init__(self, candidates: Callable[[Request], list[Replica]]) -> None:
        self.candidates = candidates
        self.waiting: list[tuple[float, Request, asyncio.Future[str]]] = []  # with the deadline of each

    async def wait(self, request: Request) -> str:
        """Returns when the request may go, and says why: idle, enough or deadline."""
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        deadline = request.deadline or request.began + DEADLINE_SECONDS
        entry = (deadline, request, ready)
        self.waiting.append(entry)
        try:
            self.look()
            # Not `wait_for`, which in Python 3.11 loses a cancellation that comes with the answer.
            async with asyncio.timeout(deadline - request.began):
                return await ready
        except TimeoutError:
            return "deadline"
        finally:
            if entry in self.waiting:
                self.waiting.remove(entry)

    def look(self) -> None:
        """Let go whatever has a reason to: one request for each backend that idles, or all when enough wait."""
        self.waiting = [one for one in self.waiting if not one[2].done()]
        if len(self.waiting) >= ENOUGH:
            for *_, ready in self.waiting:
                ready.set_result("enough")
            self.waiting = []
            return
        taken: set[str] = set()
        for _, request, ready in sorted(self.waiting, key=lambda one: one[0]):
            idle = [one for one in self.candidates(request) if not one.running() and one.name not in taken]
            if idle:
                taken.add(idle[0].name)
                ready.set_result("idle")


@dataclass
class Places:
    """Requests that wait for a place, fair by tenant.

    free: whether a backend has room for a request now. waiting: by tenant; the one served last is last. `look` lets one
    request go; it is called whenever a place may have become free.
    """

    free: Callable[[Request], bool]
    waiting: dict[str, deque[tuple[Request, asyncio.Future[None]]]] = field(default_factory=dict)

    def __len__(self) -> int:
        return sum(map(len, self.waiting.values()))

    async def wait(self, request: Request, seconds: float) -> bool:
        """Wait for a place, at most `seconds`. Returns whether there was one."""
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
