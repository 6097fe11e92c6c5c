"""A folder of points as one table: a row an arm, a column a load; each cell is one point."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from figure_cells import data_of, number, points_of, ratio, rows_of, table

from selfspec_cli.record import tables
from selfspec_cli.record.columns import Record
from selfspec_cli.report.rows import label


def by_load(folder: str) -> str:
    """Tokens a second and speedups of a folder with several loads.

    Raises:
        ValueError: two points would share a cell.
    """
    cells: dict[str, dict[tuple[int | None, int | None], str]] = {}
    for row in map(tables.row, points_of(folder)):
        load = (row.input_len, row.batch)
        if load in cells.setdefault(_arm(row), {}):
            raise ValueError(f"{folder}: two points are {_arm(row)} at {load}")
        cells[_arm(row)][load] = _speed(row)
    loads = sorted({load for line in cells.values() for load in line}, key=lambda load: (load[0] or 0, load[1] or 0))
    short = loads[0][0]
    header = [
        f"batch {batch}" + ("" if tokens == short else f", {tokens:,} tokens of context") for tokens, batch in loads
    ]
    return table(
        ("arm, tok/s (speedup)", *header), [(arm, *(line.get(load) for load in loads)) for arm, line in cells.items()]
    )


def _arm(row: Record) -> str:
    return label(replace(row, acceptance_length=None))


def _speed(row: Record) -> str:
    over = "" if row.arm == "baseline" else f" ({ratio(row.speedup)})"
    return f"{number(row.tok_s_median, 3)}{over}"


# ---- A table of one setting on two hosts: how much of a speedup the host decides


HOSTS = {"H100": "gpu/qwen_1.5b_table_h100", "H200": "gpu/qwen_1.5b_h200/code"}
"""Folders of greedy drafts with one table of lengths, by the card of the host; common workloads are shown."""


def hosts() -> str:
    """Write plain decoding and drafts on both hosts, in tokens a second."""
    by_host = {host: _by_load(folder) for host, folder in HOSTS.items()}
    rows = []
    for load in by_host["H200"]:
        if all(load in one for one in by_host.values()):
            workload, batch = load
            pairs = [by_host[host][load] for host in HOSTS]
            rows.append((f"{workload}, {batch}", *(cell for pair in pairs for cell in _cells(*pair))))
    parts = ("plain tok/s", "drafts tok/s", "speedup")
    return table(("workload, requests", *(f"{host}: {part}" for host in HOSTS for part in parts)), rows)


def _by_load(folder: str) -> dict[tuple[str | None, int | None], tuple[Record, Record]]:
    """Return (the baseline, greedy drafts without a gate) by workload and number of requests."""
    rows = [tables.row(point) for point in points_of(folder)]
    pairs: dict[tuple[str | None, int | None], dict[bool, Record]] = {}
    for row in rows:
        if not row.temperature and (row.arm == "baseline" or row.gate == "none"):
            pairs.setdefault((row.workload, row.batch), {})[row.arm != "baseline"] = row
    return {load: (pair[False], pair[True]) for load, pair in pairs.items() if len(pair) == 2}


def _cells(plain: Record, drafts: Record) -> tuple[str | None, ...]:
    speeds = (number(row.tok_s_median, 4) for row in (plain, drafts))
    return *speeds, ratio(drafts.speedup)


# ---- Tables of the one line: `{"method": "selfspec"}` next to plain vLLM and to fixed draft lengths, served and on


FILE = "gpu/one_line_h200.json"
WORDS = {"coding": "coding tasks", "chat": "chat questions"}
PLAIN, RULE, SERVED = "plain", "rule", "one line"
SPEC_BENCH = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")


def one_line() -> str:
    """Write the README's table: plain vLLM's tokens a second by clients, and the one line's speedup, for the numbers of
    clients that all kinds of prompts have."""
    loops = closed_loops()
    clients = sorted(set.intersection(*map(set, loops.values())))
    rows = []
    for name, of_clients in loops.items():
        for words, write in (
            (f"{name}: plain vLLM, tok/s in all", lambda row: f"{row[PLAIN]['tok_s']:,.0f}"),
            ("selfspec over plain", _speedup),
        ):
            rows.append((words, *(write(of_clients[n]) for n in clients)))
    return table(("clients", *map(str, clients)), rows)


def closed_loops() -> dict[str, dict[int, dict[str, Any]]]:
    """Return what each arm measured, by the name of the prompts and the number of clients."""
    levels = [level for level in data_of(FILE)["served"]["levels"] if level["level"].startswith("closed")]
    return {
        name: {_clients(level): level["rows"] for level in levels if level["prompts"] == prompts}
        for prompts, name in WORDS.items()
    }


def served(measurement: str = "served") -> str:
    """Write a row per level of a served measurement: speeds of all arms, and the one line's latency over plain's."""
    levels = sorted(data_of(FILE)[measurement]["levels"], key=_order)
    fixed = list(dict.fromkeys(arm for level in levels for arm in level["rows"] if arm.startswith("k=")))
    latency = ("ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms")
    rows = []
    for level in levels:
        arms = level["rows"]
        plain, ours = arms[PLAIN], arms[SERVED]
        rows.append(
            (
                f"{level['prompts']}, {level['level']}",
                *(f"{arms[arm]['tok_s']:,.0f}" if arm in arms else "" for arm in (PLAIN, SERVED, *fixed)),
                f"{ours['tok_s'] / plain['tok_s']:.2f}",
                *(f"{ours[key] / plain[key]:.2f}" for key in latency),
            )
        )
    header = ("prompts, load", "plain vLLM", "the one line", *fixed, "over plain")
    return table((*header, "TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99"), rows)


def fixed_lengths() -> str:
    """Write plain vLLM's tokens a second on engines and what each other arm reaches of it, by prompts and requests at
    once. The last column counts the outputs of the one line that equal plain vLLM's, and in brackets those of a second
    plain run that do."""
    cells = sorted(data_of(FILE)["cells"], key=lambda cell: (-list(WORDS).index(cell["prompts"]), cell["batch"]))
    arms = [
        RULE,
        *(row["arm"] for row in cells[0]["rows"] if row["arm"].startswith("k=")),
        "before",
        "plain 0.33",
        "0.33",
    ]
    names = {
        RULE: "the one line",
        "before": "older selfspec",
        "plain 0.33": "plain, vLLM 0.33",
        "0.33": "one line, 0.33",
    }
    rows = []
    for cell in cells:
        speeds, same = {row["arm"]: row["tok_s"] for row in cell["rows"]}, cell["same_as_plain"]
        rows.append(
            (
                f"{cell['prompts']}, {cell['batch']}",
                f"{speeds[PLAIN]:,.0f}",
                *(f"{speeds[arm] / speeds[PLAIN]:.2f}" for arm in arms),
                f"{same[RULE]} ({cell['plain_as_itself']}) of {same[PLAIN]}",
            )
        )
    header = ("prompts, requests at once", "plain, tok/s", *(names.get(arm, arm) for arm in arms))
    return table((*header, "outputs as plain (plain again)"), rows)


def spec_bench() -> str:
    """Write the one line's speedup on Spec-Bench by requests at once: of a request, by category, and in all, with its
    interval."""
    found = data_of(FILE)["spec_bench"]
    totals = {f"{cell['batch']:.0f}": cell for cell in found["totals"] if cell["arm"] == SERVED}
    rows = [
        (batch, *(ratio(of_category[name]["speedup"]) for name in SPEC_BENCH), _with_interval(totals[batch]))
        for batch, of_category in found["categories"].items()
    ]
    return table(("requests at once", *(name.replace("_", " ") for name in SPEC_BENCH), "all, in all"), rows)


def _with_interval(cell: dict[str, Any]) -> str:
    return f"**{ratio(cell['speedup'])}** ({cell['speedup_low']:.2f} to {cell['speedup_high']:.2f})"


def _order(level: dict[str, Any]) -> tuple[bool, bool, int]:
    """Coding before chat, closed loops before Poisson arrivals, then by their number."""
    kind, number = level["level"].split()
    return level["prompts"] != "coding", kind != "closed", int(number.rstrip("%"))


def _clients(level: dict[str, Any]) -> int:
    return int(level["level"].split()[1])


def _speedup(arms: dict[str, Any]) -> str:
    """Return the ratio of the median speeds, with the least and the greatest ratio of the repeats."""
    plain, ours = arms[PLAIN], arms[SERVED]
    each = sorted(one / other for one, other in zip(ours["all"], plain["all"], strict=True))
    return f"**{ratio(ours['tok_s'] / plain['tok_s'])}** ({each[0]:.2f}, {each[-1]:.2f})"


# ---- Acceptance of draft weights of all layers, the table of docs/which_models.md


DRAFT_WEIGHTS = {
    "8 bits": "int8",
    "e4m3 (8 bits)": "fp8",
    "4 bits": "int4",
    "4 bits, rounded with data": "int4 weights-int4",
}
"""Kinds of draft weights that an engine takes, as the files call them; the files have others as well."""
MODELS = {
    "SmolLM2-135M": ("smollm2_views", "smollm2_fitted"),
    "reference model": ("reference_views",),
}


def first_drafts() -> str:
    """Shares of first drafts that are accepted, by kind of draft weights, model and way to draft."""
    known = {
        (model, row["view"], float(row["temperature"]), row["drafts"]): row["given_before"]
        for model, files in MODELS.items()
        for name in files
        for row in rows_of(f"views/{name}.csv")
        if row["position"] == "1"
    }
    ways = {
        "greedy": (0.0, "most likely"),
        "at 0.8, most likely": (0.8, "most likely"),
        "at 0.8, drawn": (0.8, "drawn"),
    }
    header = [f"{model}, {way}" for model in MODELS for way in ways]
    lines = []
    for words, view in DRAFT_WEIGHTS.items():
        cells = [known.get((model, view, *way)) for model in MODELS for way in ways.values()]
        lines.append((words, *(None if cell is None else f"{float(cell):.3f}" for cell in cells)))
    return table(("draft weights of all layers", *header), lines)
