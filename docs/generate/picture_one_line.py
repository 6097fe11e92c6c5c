"""The README's picture: the one line's speedup over plain vLLM by clients, with the range of its repeats."""

from __future__ import annotations

import math
from html import escape
from itertools import pairwise
from typing import Any

from figure_tables import PLAIN, SERVED, closed_loops

WIDTH, HEIGHT, LEFT, GAP, TOP, BOTTOM = 860, 358, 44, 60, 34, 110
"""In pixels: of the picture, and of what is around its two panels."""
STYLE = """
text { font: 12px system-ui, "Segoe UI", "DejaVu Sans", sans-serif; fill: #1f2933; }
.title { font-weight: 600; font-size: 14px; } .small { fill: #55616e; }
line { stroke-linecap: round; } .grid { stroke: #d9dfe5; } .plain { stroke: #1f2933; stroke-dasharray: 5 3; }
.ours { stroke: #3b82c4; stroke-width: 2.5; }
.dot { fill: #3b82c4; }
.value { fill: #3b82c4; font-weight: 600; stroke: #ffffff; stroke-width: 3; paint-order: stroke; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6ebf0; } .small { fill: #a3afbb; } .grid { stroke: #333d47; } .plain { stroke: #e6ebf0; }
  .value { fill: #6aa9e4; stroke: #0d1117; }
}
"""
Rows = dict[int, dict[str, Any]]
"""What each arm measured, by the number of clients."""


def picture() -> str:
    """Draw the closed loops of the served measurement, a panel for each kind of prompts, as SVG."""
    by_prompts: dict[str, Rows] = closed_loops()
    highest = max(max(_range(arms)) for rows in by_prompts.values() for arms in rows.values())
    top = math.ceil(2 * highest) / 2
    width = (WIDTH - LEFT - GAP * (len(by_prompts) - 1)) / len(by_prompts)
    shapes = [
        shape
        for place, (prompts, rows) in enumerate(by_prompts.items())
        for shape in _panel(prompts, rows, top, LEFT + place * (width + GAP), width)
    ]
    about = (
        "Speedup over plain vLLM by clients: blue is selfspec, its line from the least to the greatest ratio of the "
        "repeats; dashes are plain vLLM"
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
        low, high = _range(rows[count])
        at = x(count)
        shapes += [
            _text(at, floor + 18, str(count), anchor="middle"),
            _text(at, floor + 34, f"{rows[count][PLAIN]['tok_s']:,.0f}", "small", "middle"),
            _line((at, y(low)), (at, y(high)), "ours"),
            f'<circle class="dot" cx="{at:.1f}" cy="{y(value):.1f}" r="4"/>',
            _text(at, y(high) - 6, f"{value:.2f}x", "value", "middle"),
        ]
    return shapes


def _legend() -> list[str]:
    """Lines under the panels: what stands below the axis, what was measured, and the two kinds of lines."""
    line = HEIGHT - 14
    measured = "A 1.5B coder of once rounded weights, one H200, 128 tokens an answer, three repeats (README)."
    return [
        _text(LEFT, HEIGHT - 36, measured, "small"),
        _text(LEFT, HEIGHT - 54, "Below each axis: clients, and the tokens a second of plain vLLM in all.", "small"),
        _line((LEFT, line - 4), (LEFT + 24, line - 4), "ours"),
        _text(LEFT + 30, line, "selfspec, default (least to greatest of the repeats)"),
        _line((LEFT + 370, line - 4), (LEFT + 394, line - 4), "plain"),
        _text(LEFT + 400, line, "plain vLLM"),
    ]


def _range(arms: dict[str, Any]) -> tuple[float, float]:
    """The least and the greatest ratio of the repeats, as in the README's table."""
    each = [one / other for one, other in zip(arms[SERVED]["all"], arms[PLAIN]["all"], strict=True)]
    return min(each), max(each)


def _line(begin: tuple[float, float], end: tuple[float, float], kind: str) -> str:
    return f'<line class="{kind}" x1="{begin[0]:.1f}" y1="{begin[1]:.1f}" x2="{end[0]:.1f}" y2="{end[1]:.1f}"/>'


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    of_kind = f' class="{kind}"' if kind else ""
    return f'<text{of_kind} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
