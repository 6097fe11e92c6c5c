"""A comparison of two sets of points as text: for people, a pull request, or a program."""

from typing import Any

from selfspec_cli.report import static
from selfspec_cli.report.compare import Comparison, Pair
from selfspec_cli.report.formats import Format
from selfspec_cli.report.rows import times

HEAD = ("arm", "A tok/s", "B tok/s", "B over A", "B is", "A speedup", "B speedup", "speedups", "A accept", "B accept")
MOST_VALUES = 4  # of a setting that differs, on one side
MOST_ARMS = 6  # of one side alone that are named


def text(comparison: Comparison, form: Format) -> str:
    """The comparison in one of the formats that are text."""
    if form is Format.json:
        return static.as_json(document(comparison))
    body = [_line(pair) for pair in comparison.pairs]
    if form is Format.csv:
        lines = [[pair.where, *line] for pair, line in zip(comparison.pairs, body, strict=True)]
        return static.as_csv([["workload", *HEAD], *lines])
    parts = [comparison.found]
    for where in dict.fromkeys(pair.where for pair in comparison.pairs):
        lines = [line for pair, line in zip(comparison.pairs, body, strict=True) if pair.where == where]
        parts += [f"### {where}", static.table(HEAD, lines)]
    rows = [[name, *map(_values, values)] for name, values in comparison.differing.items()]
    parts += ["### What differs", static.table(("setting", "A", "B"), rows)] if rows else []
    parts += [] if rows else ["No setting, version or machine differs."]
    for side, arms in zip((comparison.a, comparison.b), comparison.alone, strict=True):
        if arms:
            more = ", ..." if len(arms) > MOST_ARMS else ""
            parts.append(f"{len(arms)} arm(s) of {side} alone: {', '.join(arms[:MOST_ARMS])}{more}")
    return "\n\n".join(parts) + "\n"


def document(comparison: Comparison) -> dict[str, Any]:
    """The comparison as JSON."""
    pairs = [
        {
            "arm": pair.arm,
            "workload": pair.where,
            "a": pair.a.point,
            "b": pair.b.point,
            "a_tok_s": pair.a.tok_s_median,
            "b_tok_s": pair.b.tok_s_median,
            "ratio": pair.ratio,
            "low": pair.interval and pair.interval[0],
            "high": pair.interval and pair.interval[1],
            "verdict": pair.verdict,
            "runs": pair.runs,
            "a_speedup": pair.a.speedup,
            "b_speedup": pair.b.speedup,
            "speedups": pair.of_speedups,
        }
        for pair in comparison.pairs
    ]
    differing = {name: {"a": a, "b": b} for name, (a, b) in comparison.differing.items()}
    return {
        "a": comparison.a,
        "b": comparison.b,
        "found": comparison.found,
        "pairs": pairs,
        "differing": differing,
        "only_a": comparison.alone[0],
        "only_b": comparison.alone[1],
        "warnings": comparison.warnings,
    }


def _line(pair: Pair) -> list[str]:
    ratio = "" if pair.ratio is None else f"{pair.ratio:.3f}"
    if pair.interval is not None:
        ratio += f" ({pair.interval[0]:.3f} to {pair.interval[1]:.3f})"
    speeds = [f"{row.tok_s_median:,.1f}" if row.tok_s_median else "" for row in (pair.a, pair.b)]
    accepts = [f"{row.accept_rate:.1%}" if row.accept_rate is not None else "" for row in (pair.a, pair.b)]
    return [pair.arm, *speeds, ratio, pair.verdict, times(pair.a), times(pair.b), pair.of_speedups, *accepts]


def _values(values: list[Any]) -> str:
    texts = ["not set" if value is None else str(value) for value in values]
    return ", ".join(texts[:MOST_VALUES]) + (
        f" and {len(texts) - MOST_VALUES} more" if len(texts) > MOST_VALUES else ""
    )
