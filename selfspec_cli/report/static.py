"""A report as text for a pull request or a paper: Markdown, LaTeX, CSV and JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from selfspec_cli.record.columns import Summary, plain
from selfspec_cli.record.columns import text as file_of
from selfspec_cli.record.point import OK
from selfspec_cli.report import details
from selfspec_cli.report.formats import Format
from selfspec_cli.report.rows import groups, label, overview
from selfspec_cli.report.sources import Sources
from selfspec_cli.report.table import cells, columns, filled


def text(sources: Sources, form: Format) -> str:
    """The whole report in one of the formats that are text."""
    if form is Format.csv:
        return file_of(Summary, sources.rows)
    if form is Format.json:
        return json.dumps(document(sources), ensure_ascii=False, indent=1) + "\n"
    parts = [overview(groups(sources.rows)) if form is Format.md else _comment(overview(groups(sources.rows)))]
    shown = filled(sources.rows, columns(sources.targets))
    for group in groups(sources.rows):
        head = [name for name, _, _ in shown]
        body = [cells(row, shown) for row in group.rows if row.status == OK]
        failed = [f"{label(row)}: {row.status}" for row in group.rows if row.status != OK]
        title = f"{group.title}, {group.rows[0].device}"
        parts += titled(title, table(head, body, form), [group.headline, *failed], form)
    origins = details.provenance(sources.points)
    sentences = [", ".join(f"{name} {value}" for name, value in facts.items()) for facts in origins]
    parts += sentences if form is Format.md else map(_comment, sentences)
    return "\n\n".join(parts) + "\n"


def titled(title: str, shown: str, notes: Sequence[str], form: Format) -> list[str]:
    """A table with its title and the sentences about it."""
    if form is Format.md:
        return [f"### {title}", shown, *notes]
    return [_comment(title), shown, *map(_comment, notes)]


def table(head: Sequence[str], body: Sequence[Sequence[str]], form: Format) -> str:
    """A table of text: GitHub's Markdown, or LaTeX's booktabs."""
    from tabulate import tabulate

    align = ["left", *["right"] * (len(head) - 1)]
    if form is Format.md:
        body = [[cell.replace("|", "\\|") for cell in line] for line in body]
    text_ = tabulate(
        body,
        headers=head,
        tablefmt="github" if form is Format.md else "latex_booktabs",
        colalign=align,
        disable_numparse=True,
    )
    return text_ if form is Format.md else _signs(text_)


def _signs(text_: str) -> str:
    """Signs that LaTeX sets in mathematics only, so that a table needs no package but booktabs."""
    for sign, command in {"≤": r"$\le$", "≥": r"$\ge$", "·": r"$\cdot$", "–": "--", "Δ": r"$\Delta$"}.items():
        text_ = text_.replace(sign, command)
    return text_


def _comment(text_: str) -> str:
    return "% " + " ".join(text_.split())


def document(sources: Sources) -> dict[str, Any]:
    """The report as JSON: what was found, rows, targets, provenance. What was not measured is null."""
    together = groups(sources.rows)
    tables_ = [
        {
            "title": group.title,
            "machine": group.rows[0].device,
            "found": group.headline,
            "points": [row.point for row in group.rows],
        }
        for group in together
    ]
    return {
        "found": overview(together),
        "tables": tables_,
        "rows": [plain(row) for row in sources.rows],
        "targets": [asdict(target) for target in sources.targets],
        "provenance": details.provenance(sources.points),
        "warnings": sources.warnings,
    }
