"""A report as text for a pull request, a paper or a program: Markdown, CSV and JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from selfspec_cli.record.columns import Summary, plain
from selfspec_cli.record.columns import text as file_of
from selfspec_cli.record.point import OK
from selfspec_cli.report import Format, details
from selfspec_cli.report.rows import groups, label, overview
from selfspec_cli.report.sources import Sources
from selfspec_cli.report.table import cells, filled


def text(sources: Sources, form: Format) -> str:
    if form is Format.csv:
        return file_of(Summary, sources.rows)
    if form is Format.json:
        return as_json(document(sources))
    parts = [overview(groups(sources.rows))]
    shown = filled(sources.rows, sources.targets)
    for group in groups(sources.rows):
        body = [cells(row, shown) for row in group.rows if row.status == OK]
        failed = [f"{label(row)}: {row.status}" for row in group.rows if row.status != OK]
        title = f"{group.title}, {group.rows[0].device}"
        parts += [f"### {title}", table([*shown], body), group.headline, *failed]
    origins = details.provenance(sources.points)
    parts += [", ".join(f"{name} {value}" for name, value in facts.items()) for facts in origins]
    return "\n\n".join(parts) + "\n"


def as_json(document: Any) -> str:
    return json.dumps(document, ensure_ascii=False, indent=1, default=str) + "\n"


def as_csv(rows: Sequence[Sequence[Any]]) -> str:
    """Rows as comma-separated values; the first is the header."""
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows(rows)
    return buffer.getvalue()


def table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A table of text in GitHub's Markdown, the first column on the left and all others on the right."""
    from tabulate import tabulate

    lines = [[cell.replace("|", "\\|") for cell in line] for line in body]
    align = ["left", *["right"] * (len(head) - 1)]
    return tabulate(lines, headers=head, tablefmt="github", colalign=align, disable_numparse=True)


def document(sources: Sources) -> dict[str, Any]:
    """The report as JSON: what was found, rows, targets, provenance. What was not measured is null."""
    together = groups(sources.rows)
    tables_ = []
    for group in together:
        about = {"title": group.title, "machine": group.rows[0].device, "found": group.headline}
        tables_.append(about | {"points": [row.point for row in group.rows]})
    return {
        "found": overview(together),
        "tables": tables_,
        "rows": [plain(row) for row in sources.rows],
        "targets": [asdict(target) for target in sources.targets],
        "provenance": details.provenance(sources.points),
        "warnings": sources.warnings,
    }
