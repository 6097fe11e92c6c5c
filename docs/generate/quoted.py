"""Measured figures that sentences quote, each with the published point that it must equal.

`quoted.tsv` lists them: page, figure, point; a line for each figure, in the order of the page. A point is one of

    gpu/widened e4209e624b23 speedup                            folder of results/published, key or id, column
    gpu/smollm2/h100+gpu/smollm2/slow_host_h100 e7dd82f25482 speedup        the median over the runs
    gpu/gpu_8b_drafts 438791af307f tok_s_median / gpu/gpu_8b_drafts ca651c2cd750 tok_s_median
    serving/load_h200_128.json: compared: closed 64: throughput             a published JSON or CSV file, a path in it
    experiments/reference_model/metrics.json: early_exit: held_out: agreement: 5       a JSON file of the repository
    external: the LayerSkip paper, table 5                      another author's figure
    -                                                           the same text elsewhere on the page, with another meaning

`problems` compares a page with its lines. To quote a figure, write its point behind it as a comment,
`2.20x<!-- gpu/widened e4209e624b23 speedup -->`, and run

    PYTHONPATH=. python docs/generate/quoted.py         [--drop]

which moves such comments into the list, and sorts the list after sentences have moved. It refuses to drop a line whose
figure is no longer on its page, unless --drop is given.
"""

from __future__ import annotations

import difflib
import json
import re
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

from figure_cells import ROOT, data_of, points_of, rows_of

from selfspec_cli.record import tables
from selfspec_cli.record.columns import Record

LIST = Path(__file__).with_name("quoted.tsv")
EXTERNAL = "external:"
OTHER_MEANING = "-"
UNITS = {"x": 1.0, "%": 100.0}
FIGURE = r"([+-]?\d[\d,]*(?:\.\d+)?)( ?(?:x|%|tok/s|ms|s)?)"
COMMENTED = re.compile(FIGURE + r"(\*\*)?<!-- (.+?) -->")
SPEEDUP = re.compile(r"(?<![\w.,])\d+\.\d\dx")
GENERATED = re.compile(r"<!-- (\w+) -->\n.*?<!-- /\1 -->", re.DOTALL)


def value(source: str) -> float | None:
    """Return the published figure that a point names; None for one without a value of ours.

    Raises:
        ValueError: no published figure has this name, or several of one run have.
    """
    if source == OTHER_MEANING or source.startswith(EXTERNAL):
        return None
    numerator, *denominators = [_of_source(part) for part in source.split(" / ")]
    if len(denominators) > 1:
        raise ValueError(f"{source}: one figure over another one")
    return numerator / denominators[0] if denominators else numerator


def _of_source(source: str) -> float:
    name, _, path = source.partition(": ")
    try:
        if name.endswith((".json", ".csv")):
            node = _document(name)
            for step in path.split(": "):
                node = node[int(step) if isinstance(node, list) else step]
            return float(node)
        folders, key, column = source.split(" ")
        return statistics.median(_of_point(folder, key, column) for folder in folders.split("+"))
    except (OSError, KeyError, IndexError, TypeError) as error:
        raise ValueError(f"{source}: nothing published is called so ({error})") from error


def _document(name: str) -> Any:
    """Return a published JSON or CSV file, or a JSON file of the repository."""
    if name.endswith(".csv"):
        return rows_of(name)
    return json.loads((ROOT / name).read_text(encoding="utf-8")) if (ROOT / name).is_file() else data_of(name)


@lru_cache(maxsize=64)
def _rows(folder: str) -> tuple[Record, ...]:
    return tuple(map(tables.row, points_of(folder)))


def _of_point(folder: str, key: str, column: str) -> float:
    rows = [row for row in _rows(folder) if key in (row.key, row.point)]
    if len(rows) != 1:
        raise ValueError(f"{folder} has {len(rows)} points with the key {key}; name one by its id")
    figure = asdict(rows[0])[column]
    if figure is None:
        raise ValueError(f"{folder} {key} has no {column}")
    return float(figure)


Quotes = list[tuple[str, str]]  # (figure as the page writes it, point), in the order of the page


def listed() -> dict[str, Quotes]:
    """Return the quoted figures of each page."""
    quotes: dict[str, Quotes] = defaultdict(list)
    for line in LIST.read_text(encoding="utf-8").splitlines()[1:]:
        page, figure, source = line.split("\t")
        quotes[page].append((figure, source))
    return quotes


def pages() -> list[str]:
    """Return the pages that may quote figures, as paths below the root."""
    return ["README.md", *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md"))]


def problems(text: str, quotes: Quotes) -> list[str]:
    """Compare a page with its lines of the list: wrong figures, and speedups that name no point."""
    prose = GENERATED.sub("", text)
    wrong = [
        f"{match[1]}{match[2]}: move its comment, python docs/generate/quoted.py" for match in COMMENTED.finditer(prose)
    ]
    for figure, source in quotes:
        if source == OTHER_MEANING and SPEEDUP.fullmatch(figure):
            wrong.append(f"{figure} names no published point")
        try:
            published = _as_written(figure, value(source))
        except ValueError as error:
            wrong.append(f"{figure}: {error}")
            continue
        if published not in (None, figure.replace(",", "").removeprefix("+")):
            wrong.append(f"{figure} is {published} in {source}")
    wanted = [figure for figure, _ in quotes]
    seen = [match[0] for match in _occurrences(prose, set(wanted))]
    missing, added = Counter(wanted) - Counter(seen), Counter(seen) - Counter(wanted)
    wrong += [f"{figure} names no published point" for figure in added]
    wrong += [f"{figure} is in quoted.tsv and not on the page" for figure in missing]
    if not missing and not added and wanted != seen:
        place = next(place for place, pair in enumerate(zip(wanted, seen, strict=True)) if pair[0] != pair[1])
        wrong.append(f"{seen[place]} is where quoted.tsv has {wanted[place]}")
    return wrong


def _as_written(figure: str, published: float | None) -> str | None:
    """Return a published figure with the digits and the unit of the quoted one."""
    match = re.fullmatch(FIGURE, figure)
    if published is None or match is None:
        return None
    digits = len(match[1].partition(".")[2])
    return f"{published * UNITS.get(match[2].strip(), 1.0):.{digits}f}{match[2]}"


def _occurrences(prose: str, listed_figures: set[str]) -> Iterator[re.Match[str]]:
    """Yield the listed figures and all speedups of a text, in the order of the text."""
    exact = "|".join(re.escape(figure) for figure in sorted(listed_figures, key=len, reverse=True))
    pattern = rf"(?<![\w.,+-])(?:{exact})(?![\w%]|[.,]\d)|{SPEEDUP.pattern}" if exact else SPEEDUP.pattern
    return re.finditer(pattern, prose)


def moved(text: str, quotes: Quotes) -> tuple[str, Quotes, Quotes]:
    """Move the comments of a page into its lines: the page without them, its lines in order, and lines left over.

    Figures that kept their places keep their points; of the others, equal figures take theirs in order.
    """
    clean, comments = _without_comments(text)
    hidden = [range(*match.span()) for match in GENERATED.finditer(clean)]
    known = {figure for figure, _ in quotes} | {figure for figure, _ in comments.values()}
    seen = [match for match in _occurrences(clean, known) if not any(match.start() in part for part in hidden)]
    points: dict[int, str] = {}  # by the number of the figure on the page
    for number, match in enumerate(seen):
        if match.start() in comments:
            points[number] = comments[match.start()][1]
    uncommented = [number for number in range(len(seen)) if number not in points]
    old, new = [figure for figure, _ in quotes], [seen[number][0] for number in uncommented]
    rest = dict(enumerate(quotes))
    for block in difflib.SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks():
        for step in range(block.size):
            points[uncommented[block.b + step]] = rest.pop(block.a + step)[1]
    for number in uncommented:
        place = next((place for place, (figure, _) in rest.items() if figure == seen[number][0]), None)
        if number not in points and place is not None:
            points[number] = rest.pop(place)[1]
        elif number not in points and not SPEEDUP.fullmatch(seen[number][0]):
            points[number] = OTHER_MEANING  # `problems` asks for the point of a speedup
    lines = [(match[0], points[number]) for number, match in enumerate(seen) if number in points]
    return clean, lines, [line for line in rest.values() if line[1] != OTHER_MEANING]


def _without_comments(text: str) -> tuple[str, dict[int, tuple[str, str]]]:
    """Return a page without comments, and by the place of each commented figure the figure and its point."""
    comments: dict[int, tuple[str, str]] = {}
    clean, end = "", 0
    for match in COMMENTED.finditer(text):
        clean += text[end : match.start()]
        comments[len(clean)] = match[1] + match[2], match[4]
        clean += match[1] + match[2] + (match[3] or "")
        end = match.end()
    return clean + text[end:], comments


def main() -> int:
    """Move the comments of all pages into the list; refuse to lose a line."""
    quotes, lines, lost = listed() if LIST.is_file() else {}, ["page\tfigure\tpoint"], []
    texts: dict[Path, str] = {}
    for page in pages():
        texts[ROOT / page], ordered, left_over = moved((ROOT / page).read_text(encoding="utf-8"), quotes.get(page, []))
        lines += ["\t".join((page, *line)) for line in ordered]
        lost += ["\t".join((page, *line)) for line in left_over]
    lost += ["\t".join((page, *line)) for page in quotes if page not in pages() for line in quotes[page]]
    if lost:
        print("no longer on its page:", *lost, sep="\n")
    if lost and "--drop" not in sys.argv[1:]:
        return 1
    LIST.write_text("\n".join(lines) + "\n", encoding="utf-8")
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
