"""The README's table of speedups, from the published points."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from figure_cells import ROOT, at, data_of, ratio, table
from figure_serving import LOADS as SERVED

sys.path.insert(0, str(ROOT / "experiments" / "rivals"))
from table import lost

from selfspec_cli.record import folder, tables
from selfspec_cli.record.tables import Record

Chosen = Callable[[Record], bool]
LOADS = (1, 16, 32, 128)
REAL, SET = "**Real acceptance**", "**Synthetic acceptance: cost alone.** vLLM was told to accept two of three drafts"
SAME = "the same"
NEWEST = {"load_h200_rust_long": "behind vLLM's front end in Rust, newest run",
          "load_h200_full_graphs": "behind vLLM's API server in Python, newest run of every load; a slow host"}  # fmt: skip


def _own_layers(layer: int, weights: str = "shared") -> Chosen:
    """Early exit at a layer over the full vocabulary; `weights` None in old points is shared."""
    return lambda row: (row.arm == "layer_skip" and row.E == layer and (row.draft_weights or "shared") == weights
                        and row.vocab in (None, "full"))  # fmt: skip


def _small_vocabulary(row: Record) -> bool:
    """Early exit over some of the vocabulary."""
    return row.arm == "layer_skip" and row.vocab not in (None, "full")


LINES: tuple[tuple[str, str, str, Chosen] | str, ...] = (
    REAL,
    ("trained for early exit: 15 M parameters, widened to the cost of 5 B; one H200", "first 3 of 24 layers",
     "gpu/widened", _own_layers(3)),
    (SAME, "the same on 8-bit floats", "gpu/widened", _own_layers(3, "fp8")),
    (SAME, "the same on 8-bit integers", "rivals/gpu", _own_layers(3, "int8")),
    (SAME, "the same on 4-bit integers", "gpu/widened_one", _own_layers(3, "int4")),
    ("the same size and text, plainly trained, widened; one H200", "all 24 layers on 4-bit integers",
     "gpu/plain_widened_one_newer", _own_layers(24, "int4")),
    ("SmolLM2-135M-Instruct, an ordinary chat model, widened to the cost of 1.8 B; one H100",
     "all 30 layers on 8-bit integers", "gpu/smollm2/four_bits_h100", _own_layers(30, "int8")),
    ("the same; one H200", SAME, "gpu/smollm2/read_first_h200",
     lambda row: _own_layers(30, "int8")(row) and row.read_first is None),
    ("trained for early exit: 15 M parameters; two CPU cores", "first 3 of 24 layers", "cpu",
     lambda row: _own_layers(3)(row) and row.gate == "varH"),
    SET,
    ("Llama-3-8B shape, random weights; one H200", "first 8 of 32 layers", "gpu/gpu_8b", _own_layers(8)),
    (SAME, "the same on 8-bit floats", "gpu/gpu_8b_drafts", _own_layers(8, "fp8")),
    (SAME, "the same on 4-bit integers, 32,768 tokens of the vocabulary, in an engine for one request",
     "gpu/lowbit/one_request_8b", _small_vocabulary),
    ("the same; one H100", "the same in an engine for 32 requests", "gpu/lowbit/int4_E8_many_h100", _small_vocabulary),
)  # fmt: skip
"""Model and machine, what drafts, the folder of points, and which of its points; or a line of its own."""


def speedups() -> str:
    """The table of speedups, and below it where another method of vLLM was faster than early exit."""
    parts, faster = [_table(), served()], list(lost(at("rivals")))
    if not faster:
        return "\n\n".join(parts)
    told = (
        "Other methods of vLLM were faster in these of the runs that [compare them](docs/rivals.md); "
        "on a CPU a draft on copies takes as long as a plain step:"
    )
    return "\n\n".join([*parts, told, "\n".join(f"- {line}" for line in faster)])


def served() -> str:
    """Throughput of a server over plain vLLM's in closed loops: the newest run of every load behind each front end, and
    all runs."""
    runs = {name: data_of(f"serving/{name}.json") for name in SERVED}
    levels = [level for level in runs[SERVED[0]]["compared"] if level.startswith("closed ")]
    clients = sorted(int(level.removeprefix("closed ")) for level in levels)
    rows = [(told, *(ratio(_reached(runs[name], f"closed {count}")) for count in clients))
            for name, told in NEWEST.items()]  # fmt: skip
    reached = [[one for run in runs.values() if (one := _reached(run, f"closed {count}"))] for count in clients]
    rows.append((f"all {len(runs)} runs, the lowest and the highest",
                 *(f"{ratio(min(found))} to {ratio(max(found))}" for found in reached)))  # fmt: skip
    text = """Served over HTTP on H200s, the widened model on 8-bit integers with a table of lengths, 128 tokens out, clients that
ask again at once. Hosts and versions differ; [load tests](docs/load.md) has each run, and the latencies:

"""
    return text + table(("clients", *map(str, clients)), rows)


def _reached(run: dict[str, Any], level: str) -> float | None:
    """Throughput over plain vLLM's; of several turns the median."""
    turns, once = run.get("over_turns", {}).get(level), run["compared"].get(level)
    if turns:
        return float(turns["throughput"]["median"])
    return float(once["throughput"]) if once else None


def _table() -> str:
    """Of several points at one load the greatest speedup stands in it, in short contexts; the greatest of all
    with real acceptance is bold."""
    rows, best = [], max(_speed(line, 1) or 0.0 for line in LINES[: LINES.index(SET)] if not isinstance(line, str))
    for line in LINES:
        if isinstance(line, str):
            rows.append((line, *[""] * (len(LOADS) + 1)))
            continue
        speeds = [_speed(line, load) for load in LOADS]
        cells = [f"**{ratio(speed)}**" if speed == best else ratio(speed) for speed in speeds]
        rows.append((line[0], line[1], *(cell or "" for cell in cells)))
    return table(("model, machine", "what drafts", "1 request at once", *map(str, LOADS[1:])), rows)


def _speed(line: tuple[str, str, str, Chosen], load: int) -> float | None:
    points = folder.read(at(line[2]))[0]
    found = [row.speedup for row in map(tables.row, points)
             if line[3](row) and row.batch == load and row.input_len <= 128 and row.speedup is not None]  # fmt: skip
    return max(found, default=None)
