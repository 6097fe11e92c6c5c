"""The table, once as cells of text (for HTML) and once for the terminal."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from selfspec_cli.record.point import OK
from selfspec_cli.record.tables import Record
from selfspec_cli.report.rows import groups, label, overview, target_for, times


def _number(digits: int) -> Callable[[float | None], str]:
    return lambda value: "" if value is None else f"{value:,.{digits}f}"


def _speed(row: Record) -> str:
    if row.tok_s_median is None:
        return ""
    spread = f" ({row.tok_s_min:,.0f}–{row.tok_s_max:,.0f})" if row.tok_s_min and row.tok_s_max else ""
    return f"{row.tok_s_median:,.1f}{spread}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _with_ends(name: str, text: str) -> Callable[[Record], str]:
    """A column with its 95 % interval, where there is one."""

    def show(row: Record) -> str:
        value = getattr(row, name)
        low, high = getattr(row, f"{name}_low"), getattr(row, f"{name}_high")
        if value is None:
            return ""
        return text.format(value) + ("" if low is None else f" ({text.format(low)} to {text.format(high)})")

    return show


def _verdict(row: Record) -> str:
    cases = "" if row.verdict_cases is None else f" ({row.verdict_cases} cases)"
    return "" if row.verdict is None else row.verdict + cases


def _same(row: Record) -> str:
    return "" if row.identical is None else f"{row.identical}/{row.outputs}"


def _target(row: Record) -> str:
    target = target_for(row)
    if target is None:
        return ""
    parts = [f"{target.speedup:.2f}x", _share(target.accept_rate)]
    parts += [f"ΔPPL {target.delta_ppl:+.1f}"] if target.delta_ppl is not None else []
    return ", ".join(part for part in parts if part)


COLUMNS: list[tuple[str, str, Callable[[Record], str]]] = [
    (
        "arm",
        "what was run: exit layer E, draft length k, head, and the gate's condition to go on drafting; with acceptance "
        "set, every round yields so many tokens whatever was drafted, and the speed says what drafting costs alone",
        label,
    ),
    ("tok/s", "generated tokens a second: median (slowest to fastest repeat)", _speed),
    (
        "speedup",
        "tok/s over that of the baseline in the same table, with the 95 % interval (bootstrap over the repeats of both "
        "sides); arms whose intervals overlap are not told apart",
        times,
    ),
    ("target", "the speedup, accept rate and ΔPPL that users were promised for this arm", _target),
    ("accept", "accepted / drafted tokens", lambda row: _share(row.accept_rate)),
    ("tok/step", "tokens that one verify step yields", lambda row: _number(2)(row.mean_accepted_len)),
    ("drafts", "draft tokens a round", lambda row: _number(2)(row.drafted_per_round)),
    ("TTFT ms", "time to first token, median over requests", lambda row: _number(1)(row.ttft_ms)),
    ("TPOT ms", "time for each later output token, median over requests", lambda row: _number(2)(row.tpot_ms)),
    (
        "ITL ms",
        "time between successive outputs of a request, which may hold several tokens, median",
        lambda row: _number(2)(row.itl_ms),
    ),
    (
        "PPL",
        "perplexity of a held-out text under the arm's own predictions, with the 95 % interval (bootstrap over "
        "documents) where `selfspec ppl` found it; an arm that verifies its drafts has none of its own",
        _with_ends("ppl", "{:.2f}"),
    ),
    ("ΔPPL", "that perplexity minus the baseline's of the same text", _with_ends("delta_ppl", "{:+.2f}")),
    (
        "ΔPPL of greedy",
        "perplexity, under the plain model, of what the arm generates greedily, minus that of what the baseline does "
        "from the same prompts (95 % interval: bootstrap over prompts)",
        _with_ends("delta_ppl_of_greedy", "{:+.2f}"),
    ),
    (
        "ΔPPL of sampled",
        "the same of sampled continuations, which differ from the baseline's by chance",
        _with_ends("delta_ppl_of_sampled", "{:+.2f}"),
    ),
    (
        "scores",
        "of lm-evaluation-harness (`selfspec eval`), each with its standard error; only what is (drafted) goes through "
        "drafting in an arm that verifies its drafts",
        lambda row: row.scores or "",
    ),
    ("verdict", "of `selfspec verify`, and how many cases it looked at", _verdict),
    ("same", "outputs identical to the baseline's, token for token", _same),
]


def cells(row: Record) -> list[str]:
    """One row of text; for a failed arm its label and the reason."""
    if row.status != OK:
        return [label(row), row.status, *[""] * (len(COLUMNS) - 2)]
    return [show(row) for _, _, show in COLUMNS]


def render(rows: list[Record]) -> RenderableType:
    """The tables of a report, one a group, each with its own headline, for a rich console."""
    parts: list[RenderableType] = []
    found = groups(rows)
    for group in found:
        table = Table(title=group.title, title_justify="left", title_style="bold", header_style="bold", box=None)
        for name, _, _ in COLUMNS:
            table.add_column(name, justify="left" if name in ("arm", "target") else "right", no_wrap=True)
        for row in group.rows:
            if row.status == OK:
                table.add_row(*cells(row), style="dim" if row.arm == "baseline" else "")
        parts.append(table)
        parts += [Text(f"  {label(row)}: {row.status}", style="red") for row in group.rows if row.status != OK]
        parts += [Text(f"  {group.headline}"), Text()] if len(found) > 1 else [Text()]
    return Group(*parts, Text(overview(found), style="bold"))


def show(rows: list[Record], console: Console) -> None:
    """Print the tables, wide enough for every column where the output is no terminal."""
    if not console.is_terminal:
        console = Console(file=console.file, width=400)
    console.print(render(rows))
