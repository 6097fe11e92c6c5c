"""Tables of the one line: `{"method": "selfspec"}` next to plain vLLM and to every fixed draft length, on live engines."""

from __future__ import annotations

import statistics
from typing import Any

from figure_cells import data_of, ratio, table

FILE = "gpu/one_line_h200.json"
WORDS = {"coding": "coding tasks", "chat": "chat questions", "edits": "edits of given code"}
PLAIN, RULE = "plain", "rule"


def one_line() -> str:
    """Write the README's table: tokens a second of plain vLLM, and the one line's speedup with the range of its repeats.

    A cell with a `model` is of another model than the file's own, and its rows are named by it.
    """
    cells = data_of(FILE)["cells"]
    batches = sorted({cell["batch"] for cell in cells})
    names = [*(WORDS[prompts] for prompts in WORDS), *(cell["model"] for cell in cells if "model" in cell)]
    rows = []
    for name in dict.fromkeys(names):
        of_batch = {cell["batch"]: cell for cell in cells if _name(cell) == name}
        if of_batch:
            rows.append((f"{name}: plain vLLM, tok/s", *(_speed(of_batch.get(batch), PLAIN) for batch in batches)))
            rows.append(("the one line", *(_speedup(of_batch.get(batch)) for batch in batches)))
    return table(("requests at once", *map(str, batches)), rows)


def fixed_lengths() -> str:
    """Write a row per cell of the measurement: the one line and each fixed length over plain decoding on its engine."""
    cells = data_of(FILE)["cells"]
    lengths = list(dict.fromkeys(row["arm"] for cell in cells for row in cell["rows"] if row["arm"].startswith("k=")))
    rows = []
    for cell in cells:
        speeds = {row["arm"]: row["tok_s"] for row in cell["rows"]}
        best = max((speeds[arm] for arm in lengths if arm in speeds), default=None)
        same = cell.get("same_as_plain", {})
        rows.append(
            (
                f"{cell.get('model', cell['prompts'])}, {cell['batch']}",
                *(f"{speeds[arm]:,.0f}" if arm in speeds else "" for arm in (PLAIN, RULE, *lengths)),
                "" if best is None else f"{speeds[RULE] / best:.2f}",
                f"{same[RULE]} of {same[PLAIN]}" if same else "",
                f"{cell['plain_as_itself']} of {same[PLAIN]}" if same else "",
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


def _name(cell: dict[str, Any]) -> str:
    """Return what a cell is of: its prompts, or the other model that it names."""
    return str(cell.get("model") or WORDS[cell["prompts"]])


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
