"""Tables of speedups: a row is one setting, a cell the published point with its key."""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass
from typing import Any

from figure_cells import ROOT, at, data_of, points_of, ratio, table

sys.path.insert(0, str(ROOT / "experiments" / "rivals"))
from table import lost

from selfspec_cli.record.point import Point

LOADS = (1, 4, 8, 16, 32, 128)
REAL, SET = (
    "**Real acceptance**",
    "**Synthetic acceptance: cost alone.** vLLM accepts two of three drafts, whatever they are",
)
SAME = "the same"
CODER, FILES = (f"gpu/qwen_1.5b_h200/{part}" for part in ("code", "long"))
EDITS = "gpu/qwen_1.5b_tuned_h100/edits"
SERVED = (
    "load_h200",
    "load_h200_swapped",
    "load_h200_alone",
    "load_h200_late",
    "load_h200_again",
    "load_h200_full_graphs",
    "load_h200_128",
    "load_h200_rust",
    "load_h200_rust_measured",
    "load_h200_rust_long",
    "load_h200_python_long",
    "load_h200_trimmed",
    "load_h200_two_api_servers",
)
"""Runs of experiments/serving/load_on_gpu.py on the widened reference model, in their order."""
RUNS = {
    "load_h200_rust_long": "table of lengths, behind vLLM's front end in Rust (run 10)",
    "load_h200_full_graphs": "table of lengths, behind vLLM's API server in Python (run 6, a slow host)",
}
"""Load runs that have a row of their own, each on one server with one setting."""


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


LINES: tuple[Line | str, ...] = (
    REAL,
    Line(
        "Qwen2.5-Coder-1.5B-Instruct, an ordinary chat coder, on coding tasks; H200",
        "all 28 layers on 4-bit integers, table of lengths (12 drafts at 1 request, 8 from 2 on, 6 from 8, 5 from 24)",
        (CODER,),
        {1: "0e23e75e1497", 4: "c5ecb9ac2813", 16: "188c16dab3fb", 32: "fd2b7ef9389e"},
    ),
    Line(
        "the same; H100, a host on which plain decoding is slower",
        SAME,
        ("gpu/qwen_1.5b_table_h100",),
        {1: "275cb7545740", 4: "62d09714abb8", 16: "e49476287ed1", 32: "bd0ab5381265"},
    ),
    Line("the same, on chat questions; H200", SAME, (CODER,), {1: "e4cfdba9a519", 4: "eed149b4b8fc"}),
    Line(
        "the same, on chat questions; H100, that host",
        SAME,
        ("gpu/qwen_1.5b_table_h100",),
        {1: "c946744582ac", 4: "f4602921af1f"},
    ),
    Line(
        "the same, on coding tasks; another host with an H100",
        "the same layers, 6 drafts",
        ("gpu/qwen_1.5b_h100",),
        {1: "865f798cde6e", 4: "75fd8c782455", 16: "d783ab0fdadb", 32: "0c54ecd32b06"},
    ),
    Line(
        "the same, on coding tasks; H200",
        "the same layers, up to 12 drafts that end by a gate (survival at 0.2)",
        (CODER,),
        {1: "180222da98d0"},
    ),
    Line("the same, sampled at temperature 0.8", "the same with drawn drafts, no gate", (CODER,), {1: "5a582214ce24"}),
    Line(
        "the same, on edits of given code; another host with an H100",
        "the same layers, table of lengths (12 drafts at 1 request, 8 from 2 on, 6 from 8), and before them up to 16 tokens copied from the text itself (prompt lookup)",
        (EDITS,),
        {1: "dd63b3d43281", 8: "46d5f827973f"},
    ),
    Line(SAME, "the same with the gate survival at 0.2", (EDITS,), {1: "599d111eda8f", 8: "21ea0d72c227"}),
    Line(SAME, "without prompt lookup, the same table", (EDITS,), {1: "7dc8569aa573", 8: "5d844e4a161f"}),
    Line(
        "the same, questions after 16,384 tokens of files",
        "the same layers over the whole context, 8 drafts",
        (FILES,),
        {32: "29460d760d6c"},
    ),
    Line(SAME, "over a window of 1,024 tokens", (FILES,), {32: "aba8b2595db0"}),
    Line(
        "the same after 32,512 tokens",
        "over the whole context, 8 drafts",
        (FILES,),
        {1: "edba54f6d087", 8: "f65c89f32691"},
    ),
    Line(SAME, "over a window of 1,024 tokens", (FILES,), {1: "9d49a95856b9", 8: "591eba14d59d"}),
    Line(
        "15 M parameters, trained for early exit, widened to the cost of 5 B; H200",
        "first 3 of 24 layers, 4 drafts",
        ("gpu/widened",),
        {1: "e4209e624b23"},
    ),
    Line(
        SAME,
        "the same on 8-bit integers",
        ("rivals/gpu",),
        {1: "c35d5ee6cd43", 8: "181688600f54", 32: "1c455bf81bc9"},
    ),
    Line(
        SAME,
        "first 3 layers on 4-bit integers, 5 drafts, engine for one request",
        ("gpu/widened_one",),
        {1: "2de765c33a6d"},
    ),
    Line(
        "the same size and text, plainly trained, widened; H200",
        "all 24 layers on 4-bit integers, 4 drafts, engine for one request",
        ("gpu/plain_widened_one_newer",),
        {1: "de3d7597ef5b"},
    ),
    Line(
        "SmolLM2-135M-Instruct, an ordinary chat model, widened to the cost of 1.8 B; H100, three hosts",
        "all 30 layers on 8-bit integers, 4 drafts",
        ("gpu/smollm2/h100", "gpu/smollm2/four_bits_h100", "gpu/smollm2/slow_host_h100"),
        {1: "e7dd82f25482", 16: "744a3528e4e4"},
    ),
    Line("the same; H200", SAME, ("gpu/smollm2/read_first_h200",), {1: "191ac9f30d30", 16: "49941cfd5486"}),
    Line(
        "15 M parameters, trained for early exit; two CPU cores",
        "first 3 of 24 layers, 4 drafts, gate varH at 5",
        ("cpu",),
        {1: "fa36750527d0"},
    ),
    SET,
    Line(
        "Llama-3-8B shape, random weights; H200",
        "first 8 of 32 layers, 3 drafts",
        ("gpu/gpu_8b", "gpu/gpu_8b_drafts"),
        {1: "a436e8aa29a6", 16: "31a60377f71c", 32: "eba6cffceab6", 128: "57b1caef957c"},
    ),
    Line(
        SAME,
        "the same on 8-bit floats",
        ("gpu/gpu_8b_drafts",),
        {1: "438791af307f", 16: "d7cfc21d7b6f", 32: "e24b1f982f6c"},
    ),
    Line(
        "the same; H100",
        "first 8 layers on 4-bit integers, 32,768 tokens of the vocabulary, 3 drafts",
        ("gpu/lowbit/int4_E8_many_h100",),
        {1: "d9afdae35f5a", 16: "100d14edc268", 32: "839aecefd32e"},
    ),
)


def rivals() -> str:
    """List where another method of vLLM was faster than every measured setting of self-speculation."""
    return "\n".join(f"- {line}" for line in lost(at("rivals")))


def settings() -> str:
    """Write a row per setting, with a column per number of requests."""
    rows = [
        (line, *[""] * (len(LOADS) + 1)) if isinstance(line, str) else (line.model, line.setting, *_cells(line))
        for line in LINES
    ]
    return table(("model, machine", "what drafts", "1 request at once", *map(str, LOADS[1:])), rows)


def _cells(line: Line) -> list[str]:
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
    return {
        name: value
        for name, value in point.arm.items()
        if name not in ("batch", "repeats", "seed", "output_len") and value is not None
    }


def served() -> str:
    """Write throughputs of a server over plain vLLM's in closed loops: two runs, and the range of all."""
    runs = {name: data_of(f"serving/{name}.json") for name in SERVED}
    levels = [level for level in runs[SERVED[0]]["compared"] if level.startswith("closed ")]
    clients = sorted(int(level.removeprefix("closed ")) for level in levels)
    rows = [
        (about, *(ratio(_reached(runs[name], f"closed {count}")) for count in clients)) for name, about in RUNS.items()
    ]
    reached = [[one for run in runs.values() if (one := _reached(run, f"closed {count}"))] for count in clients]
    rows.append(
        (
            f"all {len(runs)} runs, other hosts and versions: the lowest and the highest",
            *(f"{ratio(min(ratios))} to {ratio(max(ratios))}" for ratios in reached),
        )
    )
    text = """Served over HTTP on H200s, the widened model on 8-bit integers, 128 tokens out, clients that ask again at once:

"""
    return text + table(("clients", *map(str, clients)), rows)


def _reached(run: dict[str, Any], level: str) -> float | None:
    """Return throughput over plain vLLM's; the median of several turns."""
    turns, once = run.get("over_turns", {}).get(level), run["compared"].get(level)
    if turns:
        return float(turns["throughput"]["median"])
    return float(once["throughput"]) if once else None
