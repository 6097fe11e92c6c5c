"""The report by category of prompts: a table for each group of arms, with a row for each category."""

from __future__ import annotations

from string import ascii_uppercase
from typing import Any

from selfspec_cli.config.schema import ConfigError
from selfspec_cli.record import categories
from selfspec_cli.report import Format, static
from selfspec_cli.report.rows import groups, label
from selfspec_cli.report.sources import Sources

POSITIONS = 4  # of a draft, of which a table shows how often it was kept; the formats for programs have all


def document(sources: Sources) -> list[dict[str, Any]]:
    """Every category of every point: what its row says of the arm and the load, and `categories.rows`; raises
    ConfigError where no point has any."""
    by_point = {row.point: row for row in sources.rows}
    lines = []
    for line in categories.rows(sources.points):
        row = by_point[line["point"]]
        about = {name: getattr(row, name) for name in ("model", "workload", "batch", "clients", "rate", "device")}
        lines.append({"arm": label(row)} | about | line)
    if not lines:
        raise ConfigError(
            "no point has categories; measure prompts that have some, such as: "
            "selfspec sweep workload=spec_bench workload.prompts=question.jsonl"
        )
    return lines


def matrices(sources: Sources) -> list[tuple[str, list[str], list[list[str]], list[str]]]:
    """A table for each group of arms that were compared with one baseline: title, head, lines (ALL last), and the arm
    of each letter; raises ConfigError."""
    lines = {(line["point"], line["category"]): line for line in document(sources)}
    with_categories = {point for point, _ in lines}
    tables = []
    for group in groups(sources.rows):
        rows = [row for row in group.rows if row.point in with_categories]  # the baseline's is the first
        if not rows:
            continue
        arms = [row for row in rows if row.arm != "baseline"][: len(ascii_uppercase)]
        lettered = list(zip(ascii_uppercase if len(arms) > 1 else " ", arms, strict=False))
        words = ("speedup", "tok/step", "accepted")
        head = ["category", "requests", "plain tok/s"]
        head += [f"{letter} {word}".strip() for letter, _ in lettered for word in words]
        body = []
        for name in [category for point, category in lines if point == rows[0].point]:
            plain = lines.get((rows[0].point, name)) if rows[0].arm == "baseline" else None
            compared = [cell for row in arms for cell in _cells(lines.get((row.point, name)))]
            body.append([name, _shown(plain, "requests"), _shown(plain, "tok_s"), *compared])
        notes = [f"{letter}: {label(row)}".strip(" :") for letter, row in lettered]
        tables.append((f"{group.title}, {group.rows[0].device}", head, body, notes))
    return tables


def _shown(line: dict[str, Any] | None, name: str) -> str:
    return "" if line is None or line[name] is None else f"{line[name]:,.0f}"


def _cells(line: dict[str, Any] | None) -> list[str]:
    """Speedup with its interval, tokens a step, and the share of steps that kept the first drafts."""
    if line is None:
        return ["", "", ""]
    speedup = "" if line["speedup"] is None else f"{line['speedup']:.2f}x"
    interval = "" if line["low"] is None else f" ({line['low']:.2f}–{line['high']:.2f})"
    step = "" if line["tok_step"] is None else f"{line['tok_step']:.2f}"
    return [speedup + interval, step, " ".join(f"{share:.0%}" for share in line["accepted"][:POSITIONS])]


ABOUT = (
    "tok/s: tokens of a category's requests over the sum of their times, so that of one request; speedup: over the "
    "baseline's (95 % interval: bootstrap over repeats); tok/step: tokens that a step yields after the first output; "
    "accepted: share of these steps that kept the first draft, the first two, …"
)


def text(sources: Sources, form: Format) -> str:
    """The report in a format that is text; raises ConfigError."""
    if form is Format.json:
        return static.as_json(document(sources))
    if form is Format.csv:
        rows = document(sources)
        lines = [row | {"accepted": " ".join(f"{share:.4g}" for share in row["accepted"])} for row in rows]
        return static.as_csv([[*rows[0]], *([*line.values()] for line in lines)])
    parts: list[str] = []
    for title, head, body, notes in matrices(sources):
        parts += [f"### {title}", static.table(head, body), *notes]
    return "\n\n".join([*parts, ABOUT]) + "\n"
