"""What became of one request: a row of the log, and what is counted."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, field
from typing import Any

from selfspec_cli.gateway.request import Request
from selfspec_cli.gateway.timing import Prediction


@dataclass
class Outcome:
    """Times in seconds; None for what was not measured.

    route: backend, or `cache`. reason: why it was chosen. plain: the request is one of the ledger's baseline.
    lost: seconds between the last token before a backend died and the first one after it. machine_seconds: its share of
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
    machine_seconds: float | None = None
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
        return {
            "at": time.time(),
            "id": request.id,
            "tenant": request.tenant,
            "endpoint": request.endpoint,
            "model": request.model,
            "class": request.kind,
            "stream": request.stream,
            "route": self.route,
            "policy": self.policy,
            "reason": self.reason,
            "plain": self.plain,
            "cache": self.cache,
            "status": self.status,
            "error": self.error,
            "prompt_tokens": self.prompt_tokens,
            "tokens": self.tokens,
            "cached_tokens": self.cached_tokens,
            "waited_ms": _ms(self.waited),
            "ttft_ms": _ms(self.ttft),
            "tpot_ms": _ms(self.tpot),
            "e2e_ms": _ms(self.e2e),
            "expected_ttft_ms": _ms(self.expected_ttft),
            "expected_tpot_ms": _ms(self.expected_tpot),
            "cost": self.cost,
            "machine_s": self.machine_seconds,
            "survived": self.survived,
            "lost_ms": _ms(self.lost),
            "tried": self.tried,
            "sha256": hashlib.sha256(request.text.encode()).hexdigest(),
            **(said if text else {"prompt": None}),
        }


def _whole(value: Any, otherwise: int | None) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else otherwise


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)
