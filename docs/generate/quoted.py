"""Measured figures that sentences quote: each stands before a comment that names where it was published.

    2.20x<!-- gpu/widened e4209e624b23 speedup -->
    63 %<!-- gpu/widened e4209e624b23 accept_rate -->
    1.36x<!-- gpu/smollm2/h100+gpu/smollm2/slow_host_h100 e7dd82f25482 speedup -->      the median over the runs
    1.28x<!-- gpu/gpu_8b_drafts 438791af307f tok_s_median / gpu/gpu_8b_drafts ca651c2cd750 tok_s_median -->
    1.74x<!-- serving/load_h200_128.json: compared: closed 64: throughput -->           a published JSON or CSV file and a path in it
    74 %<!-- experiments/reference_model/metrics.json: early_exit: held_out: agreement: 5 -->    one of the repository
    2.05x<!-- external: the LayerSkip paper, table 5 -->                                 no figure of ours

A point is named by its folder of results/published, its key, and a column. `problems` lists the figures of a page that
are not those of their points, and the speedups that name none. Generated parts need no comments.
"""

from __future__ import annotations

import json
import re
import statistics
from dataclasses import asdict
from functools import lru_cache
from typing import Any

from figure_cells import ROOT, data_of, points_of, rows_of

from selfspec_cli.record import tables
from selfspec_cli.record.columns import Record

EXTERNAL = "external:"
UNITS = {"x": 1.0, "%": 100.0}
MARKED = re.compile(r"([+-]?\d[\d,]*(?:\.\d+)?)( ?(?:x|%|tok/s|ms|s)?)(?:\*\*)?<!-- (.+?) -->")
SPEEDUP = re.compile(r"\b\d+\.\d\dx")
GENERATED = re.compile(r"<!-- (\w+) -->\n.*?<!-- /\1 -->", re.DOTALL)


def value(source: str) -> float | None:
    """The published figure that a comment names; None for an external one.

    Raises:
        ValueError: it names none, or not exactly one of each run.
    """
    if source.startswith(EXTERNAL):
        return None
    over, *under = [_one(part) for part in source.split(" / ")]
    if len(under) > 1:
        raise ValueError(f"{source}: one figure over another one")
    return over / under[0] if under else over


def _one(source: str) -> float:
    name, _, path = source.partition(": ")
    try:
        if name.endswith((".json", ".csv")):
            found = _document(name)
            for step in path.split(": "):
                found = found[int(step) if isinstance(found, list) else step]
            return float(found)
        folders, key, column = source.split(" ")
        return statistics.median(_of_point(folder, key, column) for folder in folders.split("+"))
    except (OSError, KeyError, IndexError, TypeError) as error:
        raise ValueError(f"{source}: nothing published is called so ({error})") from error


def _document(name: str) -> Any:
    """A published JSON or CSV file, or a JSON file of the repository."""
    if name.endswith(".csv"):
        return rows_of(name)
    return json.loads((ROOT / name).read_text(encoding="utf-8")) if (ROOT / name).is_file() else data_of(name)


@lru_cache(maxsize=64)
def _rows(folder: str) -> tuple[Record, ...]:
    return tuple(map(tables.row, points_of(folder)))


def _of_point(folder: str, key: str, column: str) -> float:
    found = [row for row in _rows(folder) if key in (row.key, row.point)]
    if len(found) != 1:
        raise ValueError(f"{folder} has {len(found)} points with the key {key}; name one by its id")
    figure = asdict(found[0])[column]
    if figure is None:
        raise ValueError(f"{folder} {key} has no {column}")
    return float(figure)


def problems(text: str) -> list[str]:
    """What is wrong with the figures that a page quotes."""
    prose = GENERATED.sub("", text)
    found = []
    for number, unit, source in MARKED.findall(prose):
        try:
            figure = value(source)
        except ValueError as error:
            found.append(f"{number}{unit}: {error}")
            continue
        if figure is None:
            continue
        digits = len(number.partition(".")[2])
        published = f"{figure * UNITS.get(unit.strip(), 1.0):,.{digits}f}"
        if published.replace(",", "") != number.replace(",", "").removeprefix("+"):
            found.append(f"{number}{unit} is {published}{unit} in {source}")
    bare = MARKED.sub("", prose)
    return found + [f"{number} names no published point" for number in SPEEDUP.findall(bare)]
