"""The figures of a report, each a chart and the data of its panels. Sources in, figures out; none decides anything."""

from selfspec_cli.report.figures import drafts, engine, exits, load, profile, quality, speed, under_load
from selfspec_cli.report.figures.base import Figure
from selfspec_cli.report.figures.colours import coloured
from selfspec_cli.report.rows import groups
from selfspec_cli.report.sources import Sources


def of_sources(found: Sources) -> list[Figure]:
    """Every figure that the sources have data for, in the order of a page."""
    together = groups(found.rows)
    by_load = under_load.families(together)
    made = [
        *under_load.speedups(by_load),
        *speed.speedups(together, found.targets),
        *under_load.users_and_gpus(by_load),
        *under_load.waits(by_load),
        *quality.identical(together, found.points),
        *speed.throughput(together),
        *load.curves(found.rows),
        *load.over_time(found.points),
        *load.categories(found.points),
        *drafts.frontier(together),
        *quality.perplexities(together),
        *quality.scores(together),
        *drafts.against(together, "threshold"),
        *drafts.against(together, "k"),
        *drafts.positions(together, found.accepts),
        *engine.cost_model(together),
        *engine.energy(together),
        *profile.shares(found.profiles),
        *exits.heads(found.heads),
        *exits.roc(found.curves),
        *exits.areas(found.areas),
        *exits.step_costs(found.costs),
    ]
    return coloured(made, found.rows)
