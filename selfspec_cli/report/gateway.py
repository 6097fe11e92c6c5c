"""The gateway's section of the page: what each route took, and what it gained over the baseline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from selfspec_cli.record import gateway_log

COLUMNS = (
    "model",
    "route",
    "way",
    "requests",
    "hits",
    "TTFT",
    "predicted",
    "TPOT",
    "predicted",
    "to the end",
    "tokens",
    "money",
    "continued",
    "gain in time",
    "gain in money",
)


def section(root: Path) -> dict[str, Any] | None:
    """Columns and rows of words for the page; None where no gateway logged a request in this results folder."""
    rows = gateway_log.read(root)
    routes = gateway_log.routes(rows)
    if not routes:
        return None
    ledger = gateway_log.Ledger()
    for row in rows:
        ledger.add(row)
    gains = {(gain.model, gain.route, gain.of): _gain(gain) for gain in ledger.gains()}
    lines = [
        [
            route.model,
            route.route,
            "plain" if route.plain else "routed",
            f"{route.requests:,}",
            f"{route.hits:,}",
            _ms(route.ttft_ms),
            _ms(route.expected_ttft_ms),
            _ms(route.tpot_ms),
            _ms(route.expected_tpot_ms),
            _ms(route.e2e_ms),
            f"{route.tokens:,}",
            "" if route.cost is None else f"{route.cost:.3g}",
            f"{route.survived:,}",
            *("" if route.plain else gains.get((route.model, route.route, of), "") for of in ("seconds", "money")),
        ]
        for route in routes
    ]
    return {"columns": COLUMNS, "rows": lines, "requests": f"{len(rows):,}"}


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.3g} ms"


def _gain(gain: gateway_log.Gain) -> str:
    if gain.gain is None:
        return ""
    return f"{gain.gain:.2f}" + ("" if gain.low is None else f" ({gain.low:.2f} to {gain.high:.2f})")
