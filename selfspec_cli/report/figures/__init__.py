"""The figures of a report, each a chart and the data of its panels. Sources in, figures out; none decides anything."""

from collections.abc import Sequence

from selfspec_cli.report.figures import drafts, load, profile, quality, roc, speed, under_load
from selfspec_cli.report.figures.base import Figure
from selfspec_cli.report.figures.colours import coloured
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
        *quality.identical(together, sources.points),
        *speed.throughput(together),
        *load.curves(sources.rows),
        *load.over_time(sources.points),
        *load.categories(together, sources.points),
        *quality.perplexities(together),
        *drafts.against(together, "threshold"),
        *drafts.against(together, "k"),
        *drafts.positions(together, sources.accepts),
        *profile.shares(sources.profiles),
        *roc.roc(sources.curves),
    ]
    return coloured(figures, sources.rows)


def _headline_first(together: list[Group], families: Sequence[under_load.Family]) -> list[Group]:
    """Groups in the order of the families by load that they belong to, then the others, the last measured first.

    So every figure of a page begins with the workload of its first figure.
    """
    places = {row.point: place for place, family in reversed(list(enumerate(families))) for row in family.rows}
    ranked = [min(places.get(row.point, len(families)) for row in group.rows) for group in together]
    order = sorted(range(len(together)), key=lambda at: (ranked[at], at if ranked[at] < len(families) else -at))
    return [together[at] for at in order]
