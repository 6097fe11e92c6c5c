"""The README's picture: how much faster the one line is than plain vLLM, by clients, with the range of its repeats.

It also shows how much faster vLLM's other methods were in another run with one request, with 95 % intervals.
"""

from __future__ import annotations

import math
from html import escape
from itertools import pairwise
from typing import Any

from figure_cells import points_of
from figure_tables import PLAIN, SERVED, WORDS, closed_loops, range_of_repeats

from selfspec_cli.record import tables

WIDTH, HEIGHT, LEFT, GAP, TOP, BOTTOM = 860, 378, 44, 60, 34, 130
"""In pixels: of the picture, and of what is around its two panels."""
STYLE = """
text { font: 12px system-ui, "Segoe UI", "DejaVu Sans", sans-serif; fill: #1f2933; }
.title { font-weight: 600; font-size: 14px; } .small { fill: #55616e; }
line { stroke-linecap: round; } .grid { stroke: #d9dfe5; } .plain { stroke: #1f2933; stroke-dasharray: 5 3; }
.ours { stroke: #3b82c4; stroke-width: 2.5; }
.dot { fill: #3b82c4; } .rival { stroke: #7b8794; stroke-width: 2; } .square { fill: #7b8794; }
.value { fill: #3b82c4; font-weight: 600; stroke: #ffffff; stroke-width: 3; paint-order: stroke; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6ebf0; } .small { fill: #a3afbb; } .grid { stroke: #333d47; } .plain { stroke: #e6ebf0; }
  .value { fill: #6aa9e4; stroke: #0d1117; }
}
"""
RIVALS = {"ngram": "n-grams", "eagle3": "EAGLE-3"}
"""vLLM's methods of `experiment=gpu_qwen_rivals`, one request at once, and their names in the picture."""
Rows = dict[int, dict[str, Any]]
"""What each arm measured, by the number of clients."""


def picture() -> str:
    """Draw the closed loops of the served measurement, a panel for each kind of prompts, as SVG."""
    by_prompts: dict[str, Rows] = {prompts: _growing(rows) for prompts, rows in closed_loops().items()}
    highest = max(max(range_of_repeats(arms)) for rows in by_prompts.values() for arms in rows.values())
    top = math.ceil(2 * highest) / 2
    width = (WIDTH - LEFT - GAP * (len(by_prompts) - 1)) / len(by_prompts)
    shapes = [
        shape
        for place, (prompts, rows) in enumerate(by_prompts.items())
        for shape in _panel(prompts, rows, top, LEFT + place * (width + GAP), width)
    ]
    about = (
        "Speedup over plain vLLM by clients: blue is selfspec, its line from the least to the greatest ratio of the "
        "repeats; grey are vLLM's n-grams and EAGLE-3 with one request; dashes are plain vLLM"
    )
    body = "\n".join([*shapes, *_legend()])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{about}">\n'
        f"<style>{STYLE}</style>\n{body}\n</svg>\n"
    )


def _panel(title: str, rows: Rows, top: float, left: float, width: float) -> list[str]:
    """The shapes of one panel. top: the greatest speedup of the axis. left, width: in pixels."""
    clients = sorted(rows)
    step = width / len(clients)
    floor = HEIGHT - BOTTOM

    def x(count: int) -> float:
        return left + step * (clients.index(count) + 0.5)

    def y(speedup: float) -> float:
        return floor - (floor - TOP) * speedup / top

    shapes = [_text(left, TOP - 14, title[0].upper() + title[1:], "title")]
    for half in range(1, int(2 * top) + 1):
        kind = "plain" if half == 2 else "grid"
        shapes += [
            _line((left, y(half / 2)), (left + width, y(half / 2)), kind),
            _text(left - 6, y(half / 2) + 4, f"{half / 2:g}x", "small", "end"),
        ]
    speedups = {count: float(rows[count][SERVED]["tok_s"] / rows[count][PLAIN]["tok_s"]) for count in clients}
    shapes += [
        _line((x(few), y(speedups[few])), (x(more), y(speedups[more])), "ours") for few, more in pairwise(clients)
    ]
    for count, value in speedups.items():
        low, high = range_of_repeats(rows[count])
        at = x(count)
        shapes += [
            _text(at, floor + 18, str(count), anchor="middle"),
            _text(at, floor + 34, f"{rows[count][PLAIN]['tok_s']:,.0f}", "small", "middle"),
            _line((at, y(low)), (at, y(high)), "ours"),
            f'<circle class="dot" cx="{at:.1f}" cy="{y(value):.1f}" r="4"/>',
            _text(at, y(high) - 6, f"{value:.2f}x", "value", "middle"),
        ]
    at = x(clients[0]) + 12
    for name, value, low, high in _rivals(title):
        shapes += [
            _line((at, y(low)), (at, y(high)), "rival"),
            f'<rect class="square" x="{at - 3:.1f}" y="{y(value) - 3:.1f}" width="6" height="6"/>',
            _text(at + 8, y(value) + (12 if value < 1 else 0), f"{name} {value:.2f}x", "small"),
        ]
        at += 5
    return shapes


def _growing(rows: Rows) -> Rows:
    """The rows up to the number of clients with which plain vLLM is fastest: beyond it something else is the limit."""
    fastest = max(rows, key=lambda count: float(rows[count][PLAIN]["tok_s"]))
    return {count: arms for count, arms in rows.items() if count <= fastest}


def _rivals(title: str) -> list[tuple[str, float, float, float]]:
    """Name, speedup, and its 95 % interval, of vLLM's other methods on a kind of prompts."""
    found = []
    for point in points_of("gpu/qwen_1.5b_h200/rivals_eagle3"):
        method = str(point.arm.get("speculative", "")).split()[:1]
        row = tables.row(point)
        if method and WORDS.get(row.workload) == title:
            found.append((RIVALS[method[0]], row.speedup, row.speedup_low, row.speedup_high))
    return found


def _legend() -> list[str]:
    """Lines under the panels: what stands below the axis, what was measured, and the kinds of marks."""
    line, below = HEIGHT - 34, HEIGHT - 14
    measured = "A 1.5B coder of once rounded weights, one H200, 128 tokens an answer, three repeats (README)."
    rivals = (
        "vLLM's other methods in another run, one request (95 % intervals); EAGLE-3's head was trained for five minutes"
    )
    return [
        _text(LEFT, HEIGHT - 56, measured, "small"),
        _text(LEFT, HEIGHT - 74, "Below each axis: clients, and the tokens a second of plain vLLM in all.", "small"),
        _line((LEFT, line - 4), (LEFT + 24, line - 4), "ours"),
        _text(LEFT + 30, line, "selfspec, default (least to greatest of the repeats)"),
        _line((LEFT + 370, line - 4), (LEFT + 394, line - 4), "plain"),
        _text(LEFT + 400, line, "plain vLLM"),
        f'<rect class="square" x="{LEFT + 8}" y="{below - 8}" width="8" height="8"/>',
        _text(LEFT + 30, below, rivals),
    ]


def _line(begin: tuple[float, float], end: tuple[float, float], kind: str) -> str:
    return f'<line class="{kind}" x1="{begin[0]:.1f}" y1="{begin[1]:.1f}" x2="{end[0]:.1f}" y2="{end[1]:.1f}"/>'


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    of_kind = f' class="{kind}"' if kind else ""
    return f'<text{of_kind} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
