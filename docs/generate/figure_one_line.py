"""Tables of the one line: `{"method": "selfspec"}` next to plain vLLM and to every fixed draft length, on live engines."""

from __future__ import annotations

import statistics
from typing import Any

from figure_cells import data_of, ratio, table

FILE = "gpu/one_line_h200.json"
WORDS = {"coding": "coding tasks", "chat": "chat questions", "edits": "edits of given code"}
PLAIN, RULE = "plain", "rule"


def one_line() -> str:
    """Write the README's table: tokens a second of plain vLLM, and the one line's speedup with the range of its repeats."""
    cells = data_of(FILE)["cells"]
    batches = sorted({cell["batch"] for cell in cells})
    rows = []
    for prompts, words in WORDS.items():
        of_batch = {cell["batch"]: cell for cell in cells if cell["prompts"] == prompts}
        if not of_batch:
            continue
        rows.append((f"{words}: plain vLLM, tok/s", *(_speed(of_batch.get(batch), PLAIN) for batch in batches)))
        rows.append(("the one line", *(_speedup(of_batch.get(batch)) for batch in batches)))
    return table(("requests at once", *map(str, batches)), rows)


def fixed_lengths() -> str:
    """Write a row per cell of the measurement: the one line and each fixed length over plain decoding on its engine."""
    cells = data_of(FILE)["cells"]
    lengths = [row["arm"] for row in cells[0]["rows"] if row["arm"].startswith("k=")]
    rows = []
    for cell in cells:
        speeds = {row["arm"]: row["tok_s"] for row in cell["rows"]}
        best = max(lengths, key=lambda arm: speeds[arm])
        rows.append(
            (
                f"{cell['prompts']}, {cell['batch']}",
                f"{speeds[PLAIN]:,.0f}",
                f"{speeds[RULE]:,.0f}",
                *(f"{speeds[arm]:,.0f}" for arm in lengths),
                f"{speeds[RULE] / speeds[best]:.2f}",
                f"{cell['same_as_plain'][RULE]} of {_outputs(cell)}",
                f"{cell['plain_as_itself']} of {_outputs(cell)}",
            )
        )
    header = (
        "prompts, requests at once",
        "plain vLLM",
        "the one line",
        *lengths,
        "of the best fixed",
        "outputs as plain",
        "plain as itself",
    )
    return table(header, rows)


def _outputs(cell: dict[str, Any]) -> int:
    """Return how many outputs each arm of a cell has: plain decoding's are all its own."""
    return int(cell["same_as_plain"][PLAIN])


def _speed(cell: dict[str, Any] | None, arm: str) -> str:
    return "" if cell is None else f"{_row(cell, arm)['tok_s']:,.0f}"


def _speedup(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return ""
    plain = _row(cell, PLAIN)["tok_s"]
    ours = [speed / plain for speed in _row(cell, RULE)["all"]]
    return f"**{ratio(statistics.median(ours))}** ({min(ours):.2f} to {max(ours):.2f})"


def _row(cell: dict[str, Any], arm: str) -> dict[str, Any]:
    return next(row for row in cell["rows"] if row["arm"] == arm)
