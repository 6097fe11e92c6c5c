"""Where the time of an arm goes, as `selfspec profile` found it."""

from collections.abc import Sequence
from typing import Any

import altair as alt

from selfspec_cli.record import tables
from selfspec_cli.record.profiles import PARTS, Profile
from selfspec_cli.report.figures import base
from selfspec_cli.report.figures.base import Figure, Panel
from selfspec_cli.report.rows import group_title, label

COLOURS = dict(zip(PARTS, [*base.SERIES[: len(PARTS) - 1], base.PLAIN], strict=True))
"""One for each part, in the order in which they stand in a bar."""


def shares(profiles: Sequence[Profile]) -> list[Figure]:
    """A bar an arm, with the share of each part in the wall time; a panel for each model, workload and machine."""
    by_machine: dict[tuple[str, str], list[Profile]] = {}
    for profile in profiles:
        by_machine.setdefault((profile.device, group_title(tables.of_arm(profile.arm))), []).append(profile)
    panels = []
    for (device, title), members in by_machine.items():
        data: list[dict[str, Any]] = []
        for profile in sorted(members, key=lambda profile: profile.arm["arm"] != "baseline")[: base.LONGEST]:
            name = label(tables.of_arm(profile.arm))
            number = f"{profile.tok_s:.1f} tok/s"
            for order, part in enumerate(part for part in COLOURS if part in profile.seconds):
                seconds = profile.seconds[part]
                shares = {"share": base.sig(seconds / profile.wall), "ms": base.sig(1000 * seconds / profile.rounds)}
                text = number if order == 0 else ""
                data.append({"arm": name, "part": part, "what": PARTS[part], "order": order, "text": text} | shares)
        panels.append(Panel(device, title, data))
    colour = alt.Color(
        "part:N",
        sort=list(COLOURS),
        scale=alt.Scale(domain=list(COLOURS), range=list(COLOURS.values())),
        legend=alt.Legend(title=None, orient="bottom", columns=4),
    )
    x = alt.X("share:Q", stack=True, axis=alt.Axis(title="share of the wall time", format="%", tickCount=6))
    tips = ["arm:N", "part:N", "what:N", alt.Tooltip("share:Q", format=".1%"), alt.Tooltip("ms:Q", title="ms a round")]
    titles = base.titles_above().transform_filter("datum.order == 0")
    chart = (base.bars(x, tips, color=colour, order="order:Q") + titles).properties(
        width="container", height=alt.Step(base.STEP)
    )
    about = (
        "Under PyTorch's profiler, every moment of a run counts as one part: on a GPU that of the kernel that runs, "
        "and while none runs, what the host does. The number is the speed without the profiler, which slows the host."
    )
    return base.figure("profile", "Where the time goes", about, chart, panels)
