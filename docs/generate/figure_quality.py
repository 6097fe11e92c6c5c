"""The tables of quality: speed, accept rate, perplexities and scores of every arm of a published folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from figure_cells import at, table

from selfspec_cli.record import folder, quality, tables
from selfspec_cli.record.columns import Record
from selfspec_cli.record.quality import GENERATED, GREEDY, Book, arm_in_words

MODELS = {
    "reference": "The embedded model, which was trained for early exit",
    "smollm2": "SmolLM2-135M-Instruct, an ordinary chat model that drafts with 8-bit copies of all its layers",
}
COLUMNS = (
    "arm",
    "tok/s",
    "accept rate",
    "PPL of text",
    "ΔPPL",
    "ΔPPL of greedy",
    "ΔPPL of sampled",
    "same greedy",
    "scores",
    "verdict",
)
TABLES = (
    ("arm", "tok/s", "accept rate", "same greedy", "scores", "verdict"),
    ("arm", "PPL of text", "ΔPPL", "ΔPPL of greedy", "ΔPPL of sampled"),
)


def quality_tables() -> str:
    """For each model what an arm reached, and what perplexity; the columns of one table are too many for a page."""
    parts = []
    for name, about in MODELS.items():
        rows = [dict(zip(COLUMNS, line, strict=True)) for line in cells(at(f"quality/{name}"))]
        parts.append(f"### {about}")
        parts += [table(columns, [tuple(row[column] for column in columns) for row in rows]) for columns in TABLES]
    return "\n\n".join(parts)


def cells(results: Path) -> list[list[str]]:
    """Return COLUMNS of every arm of a folder: the baseline first, then skip, then verified arms.

    Arms are matched by name and not by key, because a folder may hold findings of several commits.
    """
    book = quality.read(results)
    findings = sorted(book.findings.values(), key=lambda finding: finding.time)
    arms = {arm_in_words(finding.arm): finding.arm for finding in findings}
    quality_columns: dict[str, dict[str, Any]] = {name: {} for name in arms}
    verdicts = {arm_in_words(verdict["arm"]): verdict for verdict in book.verdicts.values() if "arm" in verdict}
    greedy: dict[str, dict[str, Any]] = {name: {} for name in arms}
    for finding in findings:
        name = arm_in_words(finding.arm)
        verdict = {finding.arm_key: verdicts[name]} if name in verdicts else {}
        one_finding = Book({(finding.kind, finding.arm_key): finding}, verdict)
        quality_columns[name] |= one_finding.columns(finding.arm_key, "")
        greedy[name] |= finding.found.get(GREEDY, {}) if finding.kind == GENERATED else {}
    rows = {arm_in_words(point.arm): tables.row(point) for point in folder.read(results)[0] if point.ok}
    order = ("baseline", "skip", "layer_skip")
    names = sorted(arms, key=lambda name: (order.index(arms[name]["arm"]), arms[name].get("E") or 0))
    return [_line(name, quality_columns[name], greedy[name], rows.get(name)) for name in names]


def _line(name: str, columns: dict[str, Any], greedy: dict[str, Any], row: Record | None) -> list[str]:
    speed = f"{row.tok_s_median:,.0f}" if row is not None and row.tok_s_median else ""
    rate = row.accept_rate if row is not None else None
    if rate is None and greedy.get("drafted"):
        rate = greedy["accepted"] / greedy["drafted"]
    return [
        name,
        speed,
        "" if rate is None else f"{rate:.0%}",
        _value(columns, "ppl", "{:,.2f}"),
        *(_value(columns, name, "{:+,.2f}") for name in ("delta_ppl", "delta_ppl_of_greedy", "delta_ppl_of_sampled")),
        f"{greedy['identical']} of {greedy['outputs']}" if "identical" in greedy else "",
        str(columns.get("scores", "")).replace("; ", "<br>"),
        str(columns.get("verdict", "")),
    ]


def _value(columns: dict[str, Any], name: str, form: str) -> str:
    value, low, high = (columns.get(part) for part in (name, f"{name}_low", f"{name}_high"))
    if value is None:
        return ""
    return form.format(value) + ("" if low is None else f" ({form.format(low)} to {form.format(high)})")
