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
    found = gateway_log.routes(rows)
    if not found:
        return None
    ledger = gateway_log.Ledger()
    for row in rows:
        ledger.add(row)
    gains = {(gain.model, gain.route, gain.of): _gain(gain) for gain in ledger.gains()}
    lines = [
        [
            one.model,
            one.route,
            "plain" if one.plain else "routed",
            f"{one.requests:,}",
            f"{one.hits:,}",
            _ms(one.ttft_ms),
            _ms(one.expected_ttft_ms),
            _ms(one.tpot_ms),
            _ms(one.expected_tpot_ms),
            _ms(one.e2e_ms),
            f"{one.tokens:,}",
            "" if one.cost is None else f"{one.cost:.3g}",
            f"{one.survived:,}",
            *("" if one.plain else gains.get((one.model, one.route, of), "") for of in ("seconds", "money")),
        ]
        for one in found
    ]
    return {"columns": COLUMNS, "rows": lines, "requests": f"{len(rows):,}"}


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.3g} ms"


def _gain(one: gateway_log.Gain) -> str:
    if one.gain is None:
        return ""
    return f"{one.gain:.2f}" + ("" if one.low is None else f" ({one.low:.2f} to {one.high:.2f})")
