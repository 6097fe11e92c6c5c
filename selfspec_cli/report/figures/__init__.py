"""The figures of a report, each a chart and the data of its panels. Sources in, figures out; none decides anything."""

from __future__ import annotations

from dataclasses import fields

from selfspec_cli.record.columns import Record
from selfspec_cli.report.figures import drafts, engine, exits, load, profile, quality, speed
from selfspec_cli.report.figures.base import Figure
from selfspec_cli.report.rows import groups
from selfspec_cli.report.sources import Sources


def of_sources(found: Sources) -> list[Figure]:
    """Every figure that the sources have data for, in the order of a page."""
    together = groups(found.rows)
    columns = {column.name for column in fields(Record)}
    made = [
        *speed.speedups(together, found.targets),
        *speed.throughput(together),
        *(figure for name in engine.LOADS if name in columns for figure in engine.by_load(together, name)),
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
    return made
