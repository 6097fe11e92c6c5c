"""The tables of quality: speed, accept rate, perplexities and scores of every arm of a published folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from figure_cells import at, percent, points_of, ratio, table

from selfspec_cli.record import folder, quality, tables
from selfspec_cli.record.columns import Record
from selfspec_cli.record.quality import GENERATED, GREEDY, Book, arm_in_words
from selfspec_cli.record.targets import Target, experiments_of, targets_of
from selfspec_cli.report.rows import label
from selfspec_cli.report.table import wish

FOLDERS = {
    "quality/reference": "The embedded model, which was trained for early exit",
    "quality/smollm2": "SmolLM2-135M-Instruct, an ordinary chat model that drafts with 8-bit copies of all its layers",
    "sprint/conversations": "The embedded model on conversations like ShareGPT's, and ARC and HellaSwag over local files "
    "of the same form (`experiments/local_tasks.py` makes both, because no hub could be reached)",
}
"""Folders of quality, and what they are about."""
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
    """For each folder what an arm reached, and what perplexity; the columns of one table are too many for a page."""
    parts = []
    for name, about in FOLDERS.items():
        rows = [dict(zip(COLUMNS, line, strict=True)) for line in cells(at(name))]
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


# ---- The milestones of the first sprint: what its plan expected, and what was found


POINTS = "sprint/milestones"


def milestones(place: str = POINTS) -> str:
    """Write the arms of which the plan expected something, and the tuned one, each with the target of its experiment.

    A speedup is the one that accepted tokens and bytes imply, because other programs ran beside these points.
    """
    points = [point for point in points_of(place) if point.ok]
    targets = targets_of(points)
    read, layer = next(
        (point.engine["step_bytes"], point.arm["E"]) for point in points if point.engine.get("step_bytes")
    )
    rows: list[tuple[Any, ...]] = []
    for point in points:
        row = tables.row(point)
        (experiment,) = experiments_of(point)
        milestone, expected = experiment.partition("_")[0], _wanted(experiment, row, targets)
        if not expected and milestone != "m5":
            continue
        rows.append(
            (
                milestone,
                label(row),
                expected,
                ratio(_by_bytes(row, read, layer)),
                percent(row.accept_rate),
                None if row.delta_ppl is None or row.arm != "skip" else f"{row.delta_ppl:+.2f}",
            )
        )
    header = (
        "milestone",
        "arm",
        "expected",
        "by bytes read",
        "accept rate",
        "ΔPPL of library code",
    )
    return table(header, sorted(rows, key=lambda row: row[0]))


def _by_bytes(row: Record, read: Mapping[str, float], layer: int) -> float | None:
    """A speedup by counts alone: the cost model's of an arm that verifies, and of skip the bytes of a step that it reads.

    read, layer: bytes of a step, and the exit, of an arm of that model that drafts with its own first layers. The cache
    of keys and values tells how many layers there are: the draft reads `layer` of them.
    """
    if row.arm == "layer_skip":
        return row.predicted
    if row.E is None:
        return 1.0
    layers = layer * read["full_kv_token"] / read["draft_kv_token"]
    one_layer = (read["full"] - read["draft"]) / (layers - layer)
    return read["full"] / (read["full"] - (layers - row.E) * one_layer)


def _wanted(experiment: str, row: Record, targets: list[Target]) -> str:
    """What the plan wanted of an arm. A speed is wanted as a speedup, and of the baseline nothing can be."""
    matching = [one for one in targets if one.experiment == experiment and one.is_for(row) and row.arm != "baseline"]
    return ", ".join(wish(name, low, high) for one in matching for name, (low, high) in one.values.items())
