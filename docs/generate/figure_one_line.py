"""Tables of the one line: `{"method": "selfspec"}` next to plain vLLM and to fixed draft lengths, served and on engines."""

from __future__ import annotations

from typing import Any

from figure_cells import data_of, ratio, table

FILE = "gpu/one_line_h200.json"
WORDS = {"coding": "coding tasks", "chat again": "chat questions"}
PLAIN, RULE, SERVED = "plain", "rule", "one line"


def one_line() -> str:
    """Write the README's table: plain vLLM's tokens a second by clients, and the one line's speedup and TTFT, each kind
    of prompts by the last run that had it."""
    loops = closed_loops()
    clients = sorted({count for of_clients in loops.values() for count in of_clients})
    rows = []
    for name, of_clients in loops.items():
        for words, write in (
            (f"{name}: plain vLLM, tok/s in all", lambda row: f"{row[PLAIN]['tok_s']:,.0f}"),
            ("selfspec over plain", _speedup),
            (
                "p99 TTFT, selfspec over plain",
                lambda row: f"{row[SERVED]['ttft_p99_ms'] / row[PLAIN]['ttft_p99_ms']:.2f}",
            ),
        ):
            rows.append((words, *(write(of_clients[n]) if n in of_clients else "" for n in clients)))
    return table(("clients", *map(str, clients)), rows)


def closed_loops() -> dict[str, dict[int, dict[str, Any]]]:
    """Return what each arm measured, by the name of the prompts and the number of clients."""
    levels = [level for level in _served_levels() if level["level"].startswith("closed")]
    return {
        name: {_clients(level): level["rows"] for level in levels if level["prompts"] == prompts}
        for prompts, name in WORDS.items()
    }


def served() -> str:
    """Write a row per level of the served measurement: speeds of all arms, and the one line's latency over plain's."""
    levels = _served_levels()
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
    """Write a row per cell of the measurement on engines: the one line and each fixed length next to plain decoding."""
    cells = data_of(FILE)["cells"]
    lengths = list(dict.fromkeys(row["arm"] for cell in cells for row in cell["rows"] if row["arm"].startswith("k=")))
    rows = []
    for cell in cells:
        speeds, same = {row["arm"]: row["tok_s"] for row in cell["rows"]}, cell["same_as_plain"]
        rows.append(
            (
                f"{cell['prompts']}, {cell['batch']}",
                *(f"{speeds[arm]:,.0f}" for arm in (PLAIN, RULE, *lengths)),
                f"{speeds[RULE] / max(speeds[arm] for arm in lengths):.2f}",
                f"{same[RULE]} of {same[PLAIN]}",
                f"{cell['plain_as_itself']} of {same[PLAIN]}",
            )
        )
    header = ("prompts, requests at once", "plain vLLM", "the one line", *lengths)
    return table((*header, "of the best fixed", "outputs as plain", "plain as itself"), rows)


def _served_levels() -> list[dict[str, Any]]:
    """Return the levels of both served runs; the later one, on another host, has prompts of another name."""
    again = [level | {"prompts": f"{level['prompts']} again"} for level in data_of(FILE)["served_again"]["levels"]]
    return [*data_of(FILE)["served"]["levels"], *again]


def _clients(level: dict[str, Any]) -> int:
    return int(level["level"].split()[1])


def _speedup(arms: dict[str, Any]) -> str:
    """Return the ratio of the median speeds, with the least and the greatest ratio of the repeats."""
    plain, ours = arms[PLAIN], arms[SERVED]
    each = sorted(one / other for one, other in zip(ours["all"], plain["all"], strict=True))
    return f"**{ratio(ours['tok_s'] / plain['tok_s'])}** ({each[0]:.2f}, {each[-1]:.2f})"
