"""The generated tables of README and docs, from published points and files."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas
from figure_cells import at, data_of, number, percent, points_of, ratio, rows_of, table

from selfspec_cli.record import folder, tables
from selfspec_cli.record.columns import Record
from selfspec_cli.record.point import Point
from selfspec_cli.record.targets import Target, experiments_of, targets_of
from selfspec_cli.report.rows import groups, label
from selfspec_cli.report.sources import folders as results_folders
from selfspec_cli.report.table import wish

# ---- A folder of points: a row an arm, a column a load; each cell is one point


def by_load(name: str) -> str:
    """Tokens a second and speedups of a folder with several loads; raises ValueError where two points share a cell."""
    cells = [(_arm(row), row.input_len, row.batch, _speed(row)) for row in map(tables.row, points_of(name))]
    frame = pandas.DataFrame(cells, columns=["arm", "tokens", "batch", "speed"])
    by_arm = frame.pivot(index="arm", columns=["tokens", "batch"], values="speed").sort_index(axis=1)
    by_arm = by_arm.reindex(frame["arm"].unique()).astype(object).where(by_arm.notna(), None)
    short = frame["tokens"].min()
    header = [
        f"batch {batch}" + ("" if tokens == short else f", {tokens:,} tokens of context")
        for tokens, batch in by_arm.columns
    ]
    return table(("arm, tok/s (speedup)", *header), by_arm.itertuples(name=None))


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
    by_host = [_host_cells(folder) for folder in HOSTS.values()]
    rows = []
    for load in by_host[-1]:
        if all(load in cells for cells in by_host):
            rows.append((", ".join(map(str, load)), *(cell for cells in by_host for cell in cells[load])))
    parts = ("plain tok/s", "drafts tok/s", "speedup")
    return table(("workload, requests", *(f"{host}: {part}" for host in HOSTS for part in parts)), rows)


def _host_cells(folder: str) -> dict[tuple[str | None, int | None], list[str | None]]:
    """Return speeds of the baseline and of greedy drafts without a gate, and the speedup, by workload and requests."""
    pairs: dict[tuple[str | None, int | None], dict[bool, Record]] = {}
    for row in map(tables.row, points_of(folder)):
        if not row.temperature and (row.arm == "baseline" or row.gate == "none"):
            pairs.setdefault((row.workload, row.batch), {})[row.arm != "baseline"] = row
    return {
        load: [*(number(pair[drafting].tok_s_median, 4) for drafting in (False, True)), ratio(pair[True].speedup)]
        for load, pair in pairs.items()
        if len(pair) == 2
    }


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
        name: {int(level["level"].split()[1]): level["rows"] for level in levels if level["prompts"] == prompts}
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
    once. The last column counts the outputs of the one line that equal plain vLLM's; the number in brackets counts the
    equal outputs of a second plain run."""
    cells = sorted(data_of(FILE)["cells"], key=lambda cell: (-list(WORDS).index(cell["prompts"]), cell["batch"]))
    lengths = {row["arm"]: row["arm"] for row in cells[0]["rows"] if row["arm"].startswith("k=")}
    others = {"before": "older selfspec", "plain 0.33": "plain, vLLM 0.33", "0.33": "one line, 0.33"}
    names = {RULE: "the one line"} | lengths | others
    rows = []
    for cell in cells:
        speeds, same = {row["arm"]: row["tok_s"] for row in cell["rows"]}, cell["same_as_plain"]
        rows.append(
            (
                f"{cell['prompts']}, {cell['batch']}",
                f"{speeds[PLAIN]:,.0f}",
                *(f"{speeds[arm] / speeds[PLAIN]:.2f}" for arm in names),
                f"{same[RULE]} ({cell['plain_as_itself']}) of {same[PLAIN]}",
            )
        )
    header = ("prompts, requests at once", "plain, tok/s", *names.values())
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


def _speedup(arms: dict[str, Any]) -> str:
    """Return the ratio of the median speeds, with the least and the greatest ratio of the repeats."""
    least, greatest = range_of_repeats(arms)
    return f"**{ratio(arms[SERVED]['tok_s'] / arms[PLAIN]['tok_s'])}** ({least:.2f}, {greatest:.2f})"


def range_of_repeats(arms: dict[str, Any]) -> tuple[float, float]:
    """Return the least and the greatest ratio of the repeats' speeds."""
    each = [one / other for one, other in zip(arms[SERVED]["all"], arms[PLAIN]["all"], strict=True)]
    return min(each), max(each)


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


# ---- Settings: a row is one setting, a cell the published point with its key


LOADS = (1, 4, 8, 16, 32)


@dataclass(frozen=True)
class Line:
    """One setting on one model and machine.

    runs: folders of points that measured it; the median of several is shown. keys: the key of its point by number of
    requests.
    """

    model: str
    setting: str
    runs: tuple[str, ...]
    keys: dict[int, str]


def _lines() -> Iterator[Line | str]:
    """Yield the lines of settings.tsv: model, what drafts, folders, keys by number of requests; or a heading alone."""
    for text in Path(__file__).with_name("settings.tsv").read_text(encoding="utf-8").splitlines()[1:]:
        heading, *rest = text.split("\t")
        if not rest:
            yield heading
            continue
        setting, runs, keys = rest
        by_load = dict(key.split(":") for key in keys.split())
        yield Line(heading, setting, tuple(runs.split()), {int(load): key for load, key in by_load.items()})


def rivals() -> str:
    """List where another method of vLLM was faster than every measured setting of self-speculation."""
    return "\n".join(f"- {line}" for line in lost(at("rivals")))


def settings() -> str:
    """Write a row per setting, with a column per number of requests."""
    rows = [
        (line, *[""] * (len(LOADS) + 1)) if isinstance(line, str) else (line.model, line.setting, *setting_cells(line))
        for line in _lines()
    ]
    return table(("model, machine", "what drafts", "1 request at once", *map(str, LOADS[1:])), rows)


def setting_cells(line: Line) -> list[str]:
    """Return the speedups of a line by LOADS; a median is followed by the number of its runs.

    Raises:
        ValueError: a key names no point or a point of another load, or the points have several settings.
    """
    cells, setting = [], None
    for load in LOADS:
        points = [point for name in line.runs for point in points_of(name) if point.key == line.keys.get(load)]
        if not points and load in line.keys:
            raise ValueError(f"{line.setting}: no point of {', '.join(line.runs)} has the key {line.keys[load]}")
        for point in points:
            setting = setting or one_setting(point)
            if point.arm["batch"] != load or one_setting(point) != setting:
                raise ValueError(f"{line.setting}: {point.id} is of another load or setting than its row")
        values = [point.compared_with.speedup for point in points if point.compared_with is not None]
        runs = f" ({len(values)} runs)" if len(values) > 1 else ""
        cells.append(f"{ratio(statistics.median(values))}{runs}" if values else "")
    return cells


def one_setting(point: Point) -> dict[str, Any]:
    """Return a point's setting without the load and the length of the measurement."""
    left_out = ("batch", "repeats", "seed", "output_len")
    return {name: value for name, value in point.arm.items() if name not in left_out and value is not None}


# ---- Where another method of vLLM was faster


TEXTS = {"headline": "Python", "prose": "English documentation", "chat": "chat questions"}
"""The prompts of a workload in words."""


def lost(place: Path) -> Iterator[str]:
    """List settings of other methods that were faster than every setting of early exit, by model, text and load.

    Faster means that the whole interval is above early exit's intervals.
    """
    for results in results_folders(place):
        points = [point for point in folder.read(results)[0] if point.ok]
        for group in groups(tables.row(point) for point in points):
            drafting = (row for row in group.rows if row.arm != "baseline" and row.speedup is not None)
            measured = sorted(drafting, key=lambda row: -row.speedup)
            ours = [row for row in measured if row.arm == "layer_skip"]
            above = [
                row
                for row in measured
                if ours and row not in ours and (row.speedup_low or row.speedup or 0) > max(_high(own) for own in ours)
            ]
            if not above:
                continue
            first = group.rows[0]
            text = TEXTS.get(first.workload or "", "random text")
            others = " and ".join(f"{_method(row)} {row.speedup:.2f}x" for row in above)
            own = " and ".join(f"{_method(row)} {row.speedup:.2f}x" for row in ours)
            where = f"{first.model}, {text}, {first.input_len:,} tokens in, batch {first.batch}, {first.device}"
            yield f"{others}, where early exit was {own} ({where})"


def _method(row: Record) -> str:
    """Return a setting in two or three words."""
    if row.arm == "layer_skip":
        return _arm(row).replace(" · lens", "").replace(" · no gate", "")
    return f"{(row.speculative or row.arm).partition(' ')[0]} k={row.k}"


def _high(row: Record) -> float:
    return row.speedup_high or row.speedup or 0.0


# ---- The milestones of the first sprint: what its plan expected, and what was found


def milestones(place: str = "sprint/milestones") -> str:
    """Write the arms of which the plan expected something, and the tuned one, each with the target of its experiment.

    A speedup is the one that accepted tokens and bytes imply, because other programs ran beside these points.
    """
    points = [point for point in points_of(place) if point.ok]
    targets = targets_of(points)
    drafting = next(point for point in points if point.engine.get("step_bytes"))
    read, layer = drafting.engine["step_bytes"], drafting.arm["E"]
    rows: list[tuple[Any, ...]] = []
    for point in points:
        row = tables.row(point)
        (experiment,) = experiments_of(point)
        milestone, expected = experiment.partition("_")[0], _wanted(experiment, row, targets)
        if not expected and milestone != "m5":
            continue
        delta = None if row.delta_ppl is None or row.arm != "skip" else f"{row.delta_ppl:+.2f}"
        figures = (ratio(_by_bytes(row, read, layer)), percent(row.accept_rate), delta)
        rows.append((milestone, label(row), expected, *figures))
    header = ("milestone", "arm", "expected", "by bytes read", "accept rate", "ΔPPL of library code")
    return table(header, sorted(rows, key=lambda row: row[0]))


def _by_bytes(row: Record, read: Mapping[str, float], layer: int) -> float | None:
    """A speedup by counts alone: the cost model's of an arm that verifies, and of skip the bytes of a step that it reads.

    read, layer: bytes of a step, and the exit, of an arm of that model that drafts with its own first layers. The cache
    of keys and values tells how many layers there are: the draft reads `layer` of them.
    """
    if row.arm == "layer_skip":
        return row.predicted
    if row.E is None:
        return 1.0
    layers = layer * read["full_kv_token"] / read["draft_kv_token"]
    one_layer = (read["full"] - read["draft"]) / (layers - layer)
    return read["full"] / (read["full"] - (layers - row.E) * one_layer)


def _wanted(experiment: str, row: Record, targets: list[Target]) -> str:
    """What the plan wanted of an arm. A speed is wanted as a speedup, and of the baseline nothing can be."""
    matching = [one for one in targets if one.experiment == experiment and one.is_for(row) and row.arm != "baseline"]
    return ", ".join(wish(name, low, high) for one in matching for name, (low, high) in one.values.items())
