"""What became of one request: a row of the log, and what is counted."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, field
from typing import Any

from selfspec_cli.gateway.request import Request
from selfspec_cli.gateway.timing import Prediction

TIMES = ("waited", "ttft", "tpot", "e2e", "expected_ttft", "expected_tpot", "lost")
MOST = 1 << 50  # tokens of one request; a backend that says more is wrong


@dataclass
class Outcome:
    """Times in seconds; None for what was not measured.

    route: backend, or `cache`. reason: why it was chosen. plain: the request is one of the ledger's baseline.
    lost: seconds between the last token before a backend died and the first one after it. machine_s: its share of
    the machine's time. tried: backends that failed before the one that answered.
    """

    request: Request
    policy: str = ""
    reason: str = ""
    route: str | None = None
    plain: bool = False
    cache: str = "off"
    status: int = 0
    error: str | None = None
    prompt_tokens: int | None = None
    tokens: int | None = None
    cached_tokens: int | None = None
    expected_ttft: float | None = None
    expected_tpot: float | None = None
    waited: float | None = None
    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None
    cost: float | None = None
    machine_s: float | None = None
    survived: int = 0
    lost: float | None = None
    tried: list[str] = field(default_factory=list)

    def expect(self, found: Prediction | None) -> None:
        """Take the times that are predicted from now on; what has passed is part of the time to first token."""
        passed = time.monotonic() - self.request.began
        self.expected_ttft, self.expected_tpot = (None, None) if found is None else (passed + found.ttft, found.tpot)

    def usage(self, found: Any) -> None:
        """Take the tokens of an answer's `usage`."""
        if isinstance(found, dict):
            self.prompt_tokens = _whole(found.get("prompt_tokens"), self.prompt_tokens)
            self.tokens = _whole(found.get("completion_tokens"), self.tokens)
            details = found.get("prompt_tokens_details")
            self.cached_tokens = _whole(details.get("cached_tokens"), None) if isinstance(details, dict) else None

    def row(self, text: bool) -> dict[str, Any]:
        """A row of the log. text: what was asked is in it; otherwise its SHA-256."""
        request = self.request
        prompt, messages = request.body.get("prompt"), request.body.get("messages")
        said = {"messages": messages} if messages else {"prompt": prompt if isinstance(prompt, str) else None}
        asked = {name: getattr(request, name) for name in ("id", "tenant", "endpoint", "model", "stream")}
        became = {name: value for name, value in vars(self).items() if name not in ("request", *TIMES)}
        return {
            "at": time.time(),
            **asked,
            "class": request.kind,
            **became,
            **{f"{name}_ms": _ms(getattr(self, name)) for name in TIMES},
            "sha256": hashlib.sha256(request.text.encode()).hexdigest(),
            **(said if text else {"prompt": None}),
        }


def _whole(value: Any, otherwise: int | None) -> int | None:
    return value if type(value) is int and 0 <= value < MOST else otherwise


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)
