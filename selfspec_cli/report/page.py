"""One self-contained HTML page: headline, chart, tables, targets, what the columns mean, what produced it."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from selfspec_cli.record.point import OK
from selfspec_cli.record.tables import Record
from selfspec_cli.report.rows import TARGETS, fastest, groups, latest, overview, target_for
from selfspec_cli.report.table import COLUMNS, cells

STYLE = """
:root { --ink: #1f2933; --muted: #5d6a78; --line: #e1e6eb; --back: #ffffff; --panel: #f6f8fa; --mark: #2f6fb3; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6ebf0; --muted: #9aa7b4; --line: #2c353f; --back: #14191f; --panel: #1c232b; --mark: #74aee6; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2.5rem 1.5rem 4rem; max-width: 72rem; color: var(--ink); background: var(--back);
  font: 16px/1.55 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin: 0 0 .3rem; } h2 { font-size: 1.1rem; margin: 2.4rem 0 .6rem; }
p.lead { font-size: 1.15rem; margin: 0 0 1.6rem; } p.small, footer { color: var(--muted); font-size: .85rem; }
img { width: 100%; height: auto; border: 1px solid var(--line); border-radius: 8px; background: #fff; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .42rem .7rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--muted); font-weight: 600; font-size: .82rem; } th:first-child, td:first-child { text-align: left; }
tr.baseline td { color: var(--muted); } tr.best td { background: var(--panel); font-weight: 600; }
tr.failed td { color: #c23b4b; text-align: left; white-space: normal; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .25rem 1.2rem; margin: 0 0 1.2rem;
  font-size: .92rem; }
dt { color: var(--muted); } dd { margin: 0; }
"""


Section = tuple[str, Path, list[list[str]]]
"""A title, a PNG, and a table as rows of cells of which the first are the headings."""


def html(rows: list[Record], png: Path | None, facts: list[dict[str, Any]], sections: Sequence[Section] = ()) -> str:
    """The page as text; it makes no request.

    Args:
        png: the chart, embedded.
        facts: what produced the rows, name and value pairs; one set for every machine, versions and revision.
        sections: further figures and tables, such as the gates' ROC curves.
    """
    found = groups(rows)
    several = len(found) > 1
    picture = _picture(png, "Bar chart of speedups over the baseline") if png is not None else ""
    more = "".join(f"<h2>{escape(name)}</h2>{_picture(file, name)}{_plain(cells_)}" for name, file, cells_ in sections)
    tables = "".join(
        f"<h2>{escape(group.title)}</h2>{f'<p>{escape(group.headline)}</p>' if several else ''}{_table(group.rows)}"
        for group in found
    )
    glossary = "".join(f"<dt>{escape(name)}</dt><dd>{escape(meaning)}</dd>" for name, meaning, _ in COLUMNS)
    produced = "".join(f"<dl>{_pairs(known)}</dl>" for known in facts)
    return f"""<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>selfspec: results</title><style>{STYLE}</style></head>
<body>
<h1>Early-exit self-speculative decoding, measured</h1>
<p class="lead">{escape(overview(found))}</p>
{picture}
{tables}
{more}
<h2>Targets</h2>
{_targets(latest(rows))}
<p class="small">Targets come from another model and machine; what carries over is the ratio.</p>
<h2>Columns</h2>
<dl>{glossary}</dl>
<h2>What produced this</h2>
{produced}
</body>
</html>
"""


def _pairs(facts: dict[str, Any]) -> str:
    return "".join(f"<dt>{escape(str(name))}</dt><dd>{escape(str(value))}</dd>" for name, value in facts.items())


def _picture(png: Path, alt: str) -> str:
    data = base64.b64encode(png.read_bytes()).decode()
    return f'<img alt="{escape(alt)}" src="data:image/png;base64,{data}">'


def _plain(lines: list[list[str]]) -> str:
    """A table of text; empty where there are no lines."""
    marked = [
        "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in line) + "</tr>"
        for tag, line in zip(["th", *["td"] * len(lines)], lines, strict=False)
    ]
    return f'<div class="scroll"><table>{"".join(marked)}</table></div>' if lines else ""


def _table(members: list[Record]) -> str:
    candidates, known = fastest(members)
    best = candidates[0] if known and len(candidates) == 1 else None
    head = "".join(f'<th title="{escape(meaning)}">{escape(name)}</th>' for name, meaning, _ in COLUMNS)
    body = ""
    for row in members:
        if row.status != OK:
            name, reason = map(escape, cells(row)[:2])
            body += f'<tr class="failed"><td>{name}</td><td colspan="{len(COLUMNS) - 1}">{reason}</td></tr>'
            continue
        kind = "best" if row is best else "baseline" if row.arm == "baseline" else ""
        body += f'<tr class="{kind}">' + "".join(f"<td>{escape(cell)}</td>" for cell in cells(row)) + "</tr>"
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _targets(rows: list[Record]) -> str:
    body = ""
    for target in TARGETS:
        reached = [row.speedup for row in rows if target_for(row) == target and row.speedup is not None]
        if target.name == "baseline":
            reached = [1.0 for row in rows if row.arm == "baseline" and row.status == OK]
        texts = [
            target.name,
            f"{target.speedup:.2f}x",
            f"{target.accept_rate:.0%}" if target.accept_rate is not None else "",
            f"{target.delta_ppl:+.1f}" if target.delta_ppl is not None else "",
            f"{max(reached):.2f}x" if reached else "not measured",
        ]
        body += "<tr>" + "".join(f"<td>{escape(text)}</td>" for text in texts) + "</tr>"
    head = "".join(f"<th>{name}</th>" for name in ("arm", "target", "accept", "ΔPPL", "best measured here"))
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
