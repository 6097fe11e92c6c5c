"""Tables of one setting on two hosts and as a server: how much of a speedup the host decides."""

from __future__ import annotations

from figure_cells import data_of, number, points_of, ratio, table

from selfspec_cli.record import tables
from selfspec_cli.record.columns import Record

HOSTS = {"H100": "gpu/qwen_1.5b_table_h100", "H200": "gpu/qwen_1.5b_h200/code"}
"""Folders of greedy drafts with one table of lengths, by the card of the host; common workloads are shown."""
SERVED = "gpu/qwen_1.5b_h200/served.json"


def hosts() -> str:
    """Write plain decoding and drafts on both hosts: tokens a second, and the times of a step and a round."""
    by_host = {host: _by_load(folder) for host, folder in HOSTS.items()}
    rows = []
    for load in by_host["H200"]:
        if all(load in one for one in by_host.values()):
            workload, batch = load
            pairs = [by_host[host][load] for host in HOSTS]
            rows.append((f"{workload}, {batch}", *(cell for pair in pairs for cell in _cells(*pair))))
    parts = ("plain tok/s", "drafts tok/s", "speedup", "plain step, ms", "round, ms")
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
    return *speeds, ratio(drafts.speedup), f"{plain.tpot_ms:.2f}", f"{drafts.itl_ms:.2f}"


def served() -> str:
    """Write every level of the coder's load test, early exit over plain vLLM."""
    run = data_of(SERVED)
    rows = []
    for level, over in run["compared"].items():
        sides = [run["rows"][level][side] for side in ("plain", "early exit")]
        rows.append(
            (
                level.removeprefix("closed "),
                *(number(side["tok_s"], 3) for side in sides),
                ratio(over["throughput"]),
                ratio(over["wanted"]),
                *(f"{over[name]:.2f}" for name in ("tpot_p99", "ttft_p99", "settled_ttft_p99")),
                *(f"{side['server_cpu']['python']:.2f}" for side in sides),
            )
        )
    header = (
        "clients",
        "plain tok/s",
        "drafts tok/s",
        "throughput",
        "wanted",
        "p99 TPOT over plain",
        "p99 TTFT over plain",
        "the same, settled",
        "API server, of a core: plain",
        "drafts",
    )
    return table(header, rows)
