"""The figures of a report, each a chart and the data of its panels. Sources in, figures out; none decides anything."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from selfspec_cli.record.columns import Record
from selfspec_cli.report import rows as names
from selfspec_cli.report.figures import drafts, speed, under_load
from selfspec_cli.report.figures.base import LOSSY, PLAIN, RIVALS, SERIES, Figure, Panel, name_of
from selfspec_cli.report.rows import Group, groups
from selfspec_cli.report.sources import Sources


def of_sources(sources: Sources) -> list[Figure]:
    """Every figure that the sources have data for, in the order of a page."""
    together = groups(sources.rows)
    by_load = under_load.families(together)
    together = _headline_first(together, by_load)
    figures = [
        *under_load.speedups(by_load),
        *speed.speedups(together, sources.targets),
        *under_load.users_and_gpus(by_load),
        *under_load.waits(by_load),
        *under_load.over_time(sources.points),
        *drafts.identical(together, sources.points),
        *speed.throughput(together),
        *speed.by_category(together, sources.points),
        *drafts.perplexities(together),
        *drafts.against(together, "threshold"),
        *drafts.against(together, "k"),
        *drafts.positions(together, sources.accepts),
        *speed.parts(sources.profiles),
        *drafts.roc(sources.curves),
    ]
    return coloured(figures, sources.rows)


def _headline_first(together: list[Group], families: Sequence[under_load.Family]) -> list[Group]:
    """Groups in the order of the families that they belong to, so that figures begin alike; then the newest."""
    places = {row.point: place for place, family in reversed(list(enumerate(families))) for row in family.rows}
    ranked = [min(places.get(row.point, len(families)) for row in group.rows) for group in together]
    order = sorted(range(len(together)), key=lambda at: (ranked[at], at if ranked[at] < len(families) else -at))
    return [together[at] for at in order]


def coloured(figures: Sequence[Figure], rows: Iterable[Record]) -> list[Figure]:
    """Figures whose panels say which colour each name has. An arm has one colour everywhere. Two arms of one panel have
    different colours as long as there are enough. A line through several arms has the colour of the first."""
    rows = list(rows)
    arms = {row.point: name_of(row) for row in rows}
    kinds = {arms[row.point]: row.arm for row in rows}
    together: dict[str, set[str]] = defaultdict(set)
    for figure in figures:
        for panel in figure.panels:
            drawn = dict.fromkeys(arms[row["point"]] for row in panel.data if row.get("point") in arms)
            for name in drawn:
                together[name] |= set(drawn)
    palettes = {"baseline": [PLAIN], "skip": [LOSSY]} | dict.fromkeys(names.RIVALS, RIVALS)
    chosen: dict[str, str] = {}
    for name, others in together.items():
        used = Counter(chosen[other] for other in others if other in chosen)
        palette = palettes.get(kinds[name], SERIES)
        chosen[name] = min(palette, key=lambda colour: used[colour])  # the first of those least used

    def with_colours(panel: Panel) -> Panel:
        colours: dict[str, str] = {}
        for row in panel.data:
            name = row.get("series", row.get("arm"))
            if name is not None and row.get("point") in arms:
                colours.setdefault(name, chosen[arms[row["point"]]])
        return replace(panel, colours=colours)

    return [replace(figure, panels=[*map(with_colours, figure.panels)]) for figure in figures]
