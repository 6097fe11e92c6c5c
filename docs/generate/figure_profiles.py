"""Published profiles (`selfspec profile`) as tables."""

from __future__ import annotations

from collections.abc import Sequence

from figure_cells import at, percent, table

from selfspec_cli.record import archive, profiles, tables
from selfspec_cli.record.columns import Record
from selfspec_cli.record.profiles import SHARES, Profile
from selfspec_cli.report.rows import group_title, label

FOLDER = "profile"
KERNELS = 5  # of the slowest, of each arm


def profile_tables() -> str:
    """Two tables for each model, workload and machine: the share of each part, and the slowest kernels."""
    groups: dict[tuple[str, str], list[Profile]] = {}
    for place in archive.below(at(FOLDER), profiles.FOLDER):
        for profile in profiles.newest(place.parent).values():
            groups.setdefault((profile.device, group_title(_row(profile))), []).append(profile)
    if not groups:
        return "Nothing has been profiled on a quiet machine yet."
    return "\n\n".join(_group(device, title, members) for (device, title), members in sorted(groups.items()))


def _group(device: str, title: str, found: Sequence[Profile]) -> str:
    members = sorted(found, key=lambda one: (one.arm["arm"] != "baseline", one.key))
    parts = table(
        ("arm", *SHARES, "sum of all", "tok/s", "tok/s under the profiler"), [_shares(one) for one in members]
    )
    kind = "kernel" if members[0].gpu else "operator"
    slowest = table(
        ("arm", kind, "part", "share", "times a round", "of the memory's rate"),
        [row for one in members for row in _kernels(one)],
    )
    commands = dict.fromkeys(" ".join(_words(one)) for one in members)
    return "\n\n".join([f"### {title}, {device}", "\n".join(["```", *commands, "```"]), parts, slowest])


def _row(profile: Profile) -> Record:
    return tables.of_arm(profile.arm)


def _words(profile: Profile) -> list[str]:
    return [
        "selfspec",
        *(
            word
            for word in (profile.command or [])[1:]
            if not word.startswith("results_dir=") and word not in ("--debug", "--json")
        ),
    ]


def _shares(profile: Profile) -> tuple[str | None, ...]:
    shares = [profile.share(*parts) for parts in SHARES.values()]
    return (
        label(_row(profile)),
        *(None if share is None else f"{100 * share:.1f} %" for share in shares),
        f"{100 * profile.accounted:.1f} %",
        f"{profile.tok_s:.1f}",
        f"{profile.tok_s_profiled:.1f}",
    )


def _kernels(profile: Profile) -> list[tuple[str | None, ...]]:
    return [
        (
            label(_row(profile)),
            f"`{one['name'][:60]}`",
            one["part"],
            f"{100 * one['seconds'] / profile.wall:.1f} %",
            f"{one['calls'] / profile.rounds:.1f}",
            percent(one["rate"]),
        )
        for one in profile.kernels[:KERNELS]
    ]
