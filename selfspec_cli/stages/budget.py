"""How long a search may take."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

CLOSING = 5.0  # seconds kept for shutting the last engine down and writing the choice


@dataclass
class Budget:
    """How long the search may take, from the moment this is made. clock: seconds, never going back."""

    minutes: float
    trials: int  # on each engine
    clock: Callable[[], float] = time.monotonic
    started: float = field(init=False)

    def __post_init__(self) -> None:
        self.started = self.clock()

    def share(self, part: float) -> Budget:
        """A budget of the same beginning that ends after so much of the time."""
        other = Budget(self.minutes * part, self.trials, self.clock)
        other.started = self.started
        return other

    @property
    def spent(self) -> float:
        """Seconds."""
        return self.clock() - self.started

    @property
    def left(self) -> float:
        """Seconds, may be negative."""
        return self.minutes * 60 - CLOSING - self.spent
