"""When a backend that fails is left alone: by the share of failures over a window, then a few requests try it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

WINDOW_SECONDS = 30.0
LEAST_FAILURES = 3
SHARE = 0.5  # of the answers of the window, from which on it opens
OPEN_SECONDS = 5.0
PROBES = 3  # requests at once that try a backend whose time is up


@dataclass
class Breaker:
    """outcomes: (monotonic seconds, failed) of the window. open_until: 0 while it is closed. probing: requests that
    try."""

    now: Callable[[], float] = time.monotonic
    outcomes: deque[tuple[float, bool]] = field(default_factory=deque)
    open_until: float = 0.0
    probing: int = 0

    def allows(self) -> bool:
        """Whether a request may be sent there now."""
        return not self.open_until or (self.now() >= self.open_until and self.probing < PROBES)

    def failed(self) -> None:
        """An answer failed, and it was the backend's fault."""
        at = self.now()
        self.outcomes.append((at, True))
        while self.outcomes[0][0] < at - WINDOW_SECONDS:
            self.outcomes.popleft()
        failures = sum(failed for _, failed in self.outcomes)
        often = failures >= LEAST_FAILURES and failures >= SHARE * len(self.outcomes)
        if often or (self.open_until and at >= self.open_until):
            self.open_until = at + OPEN_SECONDS

    def succeeded(self) -> None:
        """An answer began as it should; after the time of an open breaker this closes it."""
        at = self.now()
        if self.open_until and at < self.open_until:
            return
        if self.open_until:
            self.reset()
        self.outcomes.append((at, False))
        if len(self.outcomes) > 1000:
            self.outcomes.popleft()

    def reset(self) -> None:
        """Close it and forget what was."""
        self.open_until = 0.0
        self.outcomes.clear()
