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


Column = tuple[str, str, Callable[[Record], str]]
"""A name, what it means, and how it shows a row."""

COLUMNS: list[Column] = [
    (
        "arm",
        "what was run: exit layer E, draft length k, head, and the gate's condition to go on drafting; with acceptance "
        "set, every round yields so many tokens whatever was drafted, and the speed says what drafting costs alone",
        label,
    ),
    ("tok/s", "generated tokens a second: median (slowest to fastest repeat)", speed),
    (
        "speedup",
        "tok/s over that of the baseline in the same table, with the 95 % interval (bootstrap over the repeats of both "
        "sides); arms whose intervals overlap are not told apart",
        times,
    ),
    ("accept", "accepted / drafted tokens", _value("accept_rate", "{:.0%}")),
    ("tok/step", "tokens that one verify step yields", _value("mean_accepted_len", "{:,.2f}")),
    ("drafts", "draft tokens a round", _value("drafted_per_round", "{:,.2f}")),
    ("TTFT ms", "time to first token, median over requests", _value("ttft_ms", "{:,.1f}")),
    ("TPOT ms", "time for each later output token, median over requests", _value("tpot_ms", "{:,.2f}")),
    (
        "ITL ms",
        "time between successive outputs of a request, which may hold several tokens, median",
        _value("itl_ms", "{:,.2f}"),
    ),
    ("TTFT p99", "99th percentile of a load test, ms", _value("ttft_p99_ms", "{:,.1f}", of_load=True)),
    ("TPOT p99", "99th percentile of a load test, ms", _value("tpot_p99_ms", "{:,.2f}", of_load=True)),
    ("E2E p99", "99th percentile of a load test, ms", _value("e2e_p99_ms", "{:,.0f}", of_load=True)),
    ("req/s", "requests that end in a second", _value("req_s", "{:,.2f}")),
    ("goodput", "requests a second that keep the limits that were stated", _value("goodput", "{:,.2f}")),
    ("failed", "requests that failed", lambda row: str(row.failed_requests) if row.failed_requests else ""),
    (
        "others",
        "share of the processor that other programs had while the arm was timed, where it was so much that the arm's "
        "figures are not to be trusted",
        lambda row: f"{row.cpu_others:.0%} !" if disturbed(row.cpu_own, row.cpu_others) else "",
    ),
    (
        "PPL",
        "perplexity of a held-out text under the arm's own predictions; an arm that verifies its drafts has none of "
        "its own",
        _value("ppl", "{:.2f}"),
    ),
    (
        "ΔPPL",
        "that perplexity minus the baseline's of the same text; an arm that verifies its drafts has 0 if all its "
        "outputs are the baseline's, else the next column",
        _value("delta_ppl", "{:+.2f}"),
    ),
    (
        "ΔPPL of greedy",
        "perplexity, under the plain model, of what the arm generates greedily, minus that of what the baseline does "
        "from the same prompts (95 % interval: bootstrap over prompts)",
        _value("delta_ppl_of_greedy", "{:+.2f}"),
    ),
    (
        "ΔPPL of sampled",
        "the same of sampled continuations, which differ from the baseline's by chance",
        _value("delta_ppl_of_sampled", "{:+.2f}"),
    ),
    (
        "scores",
        "of lm-evaluation-harness (`selfspec eval`), each with its standard error; only what is (drafted) goes through "
        "drafting in an arm that verifies its drafts",
        lambda row: row.scores or "",
    ),
    ("verdict", "of `selfspec verify`", lambda row: row.verdict or ""),
    (
        "same",
        "outputs identical to the baseline's, token for token; in the baseline's own row the control: to its own in "
        "another batch order",
        lambda row: "" if row.identical is None else f"{row.identical}/{row.outputs}",
    ),
]


def columns(targets: Sequence[Target] = ()) -> list[Column]:
    """The columns of a table; that of targets only where an experiment stated some."""
    if not targets:
        return COLUMNS
    return [
        *COLUMNS,
        ("target", "what the experiment that measured the arm was to reach", partial(_target, targets=targets)),
    ]


def cells(row: Record, shown: Sequence[Column] = COLUMNS) -> list[str]:
    """One row of text; for a failed arm its label and the reason."""
    if row.status != OK:
        return [label(row), row.status, *[""] * (len(shown) - 2)]
    return [show(row) for _, _, show in shown]


def filled(rows: Sequence[Record], shown: Sequence[Column]) -> list[Column]:
    """Those of the columns in which some row has something to show; the first is always there."""
    measured = [row for row in rows if row.status == OK]
    return [column for place, column in enumerate(shown) if place == 0 or any(column[2](row) for row in measured)]


FIRST = ("arm", "speedup", "tok/s", "others", "same", "accept", "verdict", "target", "tok/step")
"""The columns of a narrow terminal, the most important first; the others follow in their own order."""


def fitting(rows: Sequence[Record], shown: Sequence[Column], width: int) -> list[Column]:
    """Those of the columns that stand side by side in `width` characters without cutting any; the first three of FIRST
    are always there."""
    measured = [row for row in rows if row.status == OK]
    names = [*FIRST, *(name for name, _, _ in shown if name not in FIRST)]
    kept, room = set(), width
    for column in sorted(shown, key=lambda column: names.index(column[0])):
        needed = 2 + max(cell_len(text) for text in [column[0], *map(column[2], measured)])
        if needed <= room or column[0] in FIRST[:3]:
            kept.add(column[0])
            room -= needed
    return [column for column in shown if column[0] in kept]


def render(rows: list[Record], targets: Sequence[Target] = (), width: int | None = None) -> RenderableType:
    """The tables of a report, one a group, each with its own headline, for a rich console.

    width: characters of a terminal's line; columns that do not fit are left out and named. None: all are there.
    """
    parts: list[RenderableType] = []
    together = groups(rows)
    all_columns = filled(rows, columns(targets))
    shown = all_columns if width is None else fitting(rows, all_columns, width)
    for group in together:
        table = Table(title=group.title, title_justify="left", title_style="bold", header_style="bold", box=None)
        for name, _, _ in shown:
            left = name in ("arm", "target")
            table.add_column(name, justify="left" if left else "right", no_wrap=name != "arm", overflow="fold")
        for row in group.rows:
            if row.status == OK:
                table.add_row(*cells(row, shown), style="dim" if row.arm == "baseline" else "")
        parts.append(table)
        parts += [Text(f"  {label(row)}: {row.status}", style="red") for row in group.rows if row.status != OK]
        parts += [Text(f"  {group.headline}"), Text()] if len(together) > 1 else [Text()]
    if hidden := ", ".join(column[0] for column in all_columns if column not in shown):
        more = f"no room here for: {hidden}; a wider terminal or the page of selfspec report has them\n"
        parts.append(Text(more, style="dim"))
    return Group(*parts, Text(overview(together), style="bold"))


def show(rows: list[Record], console: Console, targets: Sequence[Target] = ()) -> None:
    """Print the tables; with every column, and wide enough for it, where the output is no terminal."""
    if not console.is_terminal:
        console = Console(file=console.file, width=400)
    console.print(render(rows, targets, console.width if console.is_terminal else None))
