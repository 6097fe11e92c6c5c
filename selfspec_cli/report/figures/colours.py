"""One colour for each arm, in all figures of a page."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from selfspec_cli.record.columns import Record
from selfspec_cli.report import rows as names
from selfspec_cli.report.figures.base import LOSSY, PLAIN, RIVALS, SERIES, Figure, Panel
from selfspec_cli.report.rows import label


def coloured(figures: Sequence[Figure], rows: Iterable[Record]) -> list[Figure]:
    """Figures whose panels say which colour each name has.

    An arm has one colour everywhere. Two arms of one panel have different colours as long as there are enough. A line
    through arms of several thresholds has the colour of the first of them.
    """
    arms = {row.point: label(replace(row, acceptance_length=None)) for row in rows}
    kinds = {arms[row.point]: row.arm for row in rows}
    together: dict[str, set[str]] = defaultdict(set)
    for figure in figures:
        for panel in figure.panels:
            drawn = dict.fromkeys(arms[row["point"]] for row in panel.data if row.get("point") in arms)
            for name in drawn:
                together[name] |= set(drawn)
    chosen: dict[str, str] = {}
    for name, others in together.items():
        used = Counter(chosen[other] for other in others if other in chosen)
        chosen[name] = min(_palette(kinds[name]), key=lambda colour: used[colour])  # the first of those least used
    return [
        replace(figure, panels=[_with_colours(panel, arms, chosen) for panel in figure.panels]) for figure in figures
    ]


def _palette(kind: str) -> list[str]:
    """The colours that an arm of this kind may have."""
    if kind in ("baseline", "skip"):
        return [PLAIN if kind == "baseline" else LOSSY]
    return RIVALS if kind in names.RIVALS else SERIES


def _with_colours(panel: Panel, arms: dict[str, str], chosen: dict[str, str]) -> Panel:
    colours: dict[str, str] = {}
    for row in panel.data:
        name = row.get("series", row.get("arm"))
        if name is not None and row.get("point") in arms:
            colours.setdefault(name, chosen[arms[row["point"]]])
    return replace(panel, colours=colours)
