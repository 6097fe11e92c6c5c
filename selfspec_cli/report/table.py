"""The table, once as cells of text (for HTML) and once for the terminal."""

from collections.abc import Callable, Sequence
from functools import partial

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from selfspec_cli.record.columns import Record, disturbed
from selfspec_cli.record.point import OK
from selfspec_cli.record.targets import Target, less_is_better
from selfspec_cli.report.rows import groups, label, overview, times


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
    """What this arm was to reach, in the words of its experiment."""
    values = [(name, pair) for target in targets if target.is_for(row) for name, pair in target.values.items()]
    return ", ".join(wish(name, low, high) for name, (low, high) in values)


def wish(name: str, low: float, high: float) -> str:
    """One value of a target, such as speedup ≥ 2.05x."""
    forms = {"speedup": "{:.2f}x", "accept_rate": "{:.0%}", "sm_util": "{:.0%}", "delta_ppl": "{:+.2f}"}
    show = forms.get(name, "{:g}")
    text = show.format(low) if low == high else f"{show.format(low)} to {show.format(high)}"
    sign = "" if low != high else "≤ " if less_is_better(name) else "≥ "
    return f"{name} {sign}{text}"


Columns = dict[str, Callable[[Record], str]]
"""How each column, by its name, shows a row."""

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


def cells(row: Record, shown: Columns = COLUMNS) -> list[str]:
    return [show(row) for show in shown.values()]


def filled(rows: Sequence[Record], targets: Sequence[Target] = ()) -> Columns:
    """The columns in which some row has something to show; that of the arm is always there."""
    columns = COLUMNS | {"target": partial(_target, targets=targets)}
    measured = [row for row in rows if row.status == OK]
    return {name: show for name, show in columns.items() if name == "arm" or any(map(show, measured))}


FIRST = ("arm", "speedup", "tok/s", "others", "same", "accept", "verdict", "target", "tok/step")
"""The columns of a narrow terminal, the most important first; the others follow in their own order."""


def fitting(rows: Sequence[Record], shown: Columns, width: int) -> Columns:
    """Those of the columns that stand side by side in `width` characters without cutting any; the first three of FIRST
    are always there."""
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
    """The tables of a report, one a group, each with its own headline, for a rich console.

    width: characters of a terminal's line; columns that do not fit are left out and named. None: all are there.
    """
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
