"""Profiles of arms: where the time of a run went, as `selfspec profile` found it.

One profile, one file `results/profiles/<run key>-<run>.json`, with the trace beside it. The newest profile of a run key
is in the figure of the page. A profiled run is slower than a measured one, so it is no point.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from selfspec_cli.record import documents
from selfspec_cli.whole import written

FOLDER = "profiles"
SHARES = {
    "trunk": ("trunk",),
    "head": ("head",),
    "gate": ("gate",),
    "draft": ("draft",),
    "verify": ("verify",),
    "sampler": ("sampler",),
    "scheduler": ("scheduler",),
    "detokenise": ("detokenise",),
    "host": ("host",),
    "idle": ("idle", "other"),
}
"""What is shown of a profile, and the parts that each is the sum of."""


@dataclass(frozen=True)
class Profile:
    """Where the time of one arm went.

    arm: columns that name it. seconds: of each part (`report.trace.PARTS`), those without any left out. wall: seconds
    of the run by a clock that is not the trace's. rounds: full passes. tokens: generated. tok_s: without the profiler;
    tok_s_profiled: with it. kernels: slowest first, each with name, part, seconds, calls, bytes of the weights that its
    calls read (None where not known) and rate, their share of the memory's (None where either is not known).
    memory_rate: bytes a second at most; None where it is not known. unknown: what this profile cannot say, in words.
    trace: name of the file beside this one.
    """

    key: str
    run_id: str
    time: str
    device: str
    arm: dict[str, Any]
    seconds: dict[str, float]
    wall: float
    rounds: int
    tokens: int
    tok_s: float
    tok_s_profiled: float
    kernels: list[dict[str, Any]]
    memory_rate: float | None
    gpu: bool
    unknown: list[str]
    trace: str
    command: list[str] | None = None
    config: dict[str, Any] | None = None
    versions: dict[str, str] = field(default_factory=dict)
    git: dict[str, Any] | None = None

    @property
    def name(self) -> str:
        """Of its file, without the suffix."""
        return f"{self.key}-{self.run_id}"

    @property
    def accounted(self) -> float:
        """The sum of all parts over the wall time: 1, but for what the two clocks see differently."""
        return sum(self.seconds.values()) / self.wall

    def share(self, *parts: str) -> float | None:
        """Of the wall time, that of some parts; None where the profile has none of them."""
        seconds = [self.seconds[part] for part in parts if part in self.seconds]
        return sum(seconds) / self.wall if seconds else None

    def columns(self) -> dict[str, float | None]:
        """The share of each of SHARES, as `NAME_share`."""
        return {f"{name}_share": self.share(*parts) for name, parts in SHARES.items()}


def save(results: str | os.PathLike[str], profile: Profile, trace: bytes) -> Path:
    """Write a profile's trace, and then the profile, each whole or not at all; the profile's file.

    Raises:
        OSError: one could not be written.
    """
    folder = Path(results) / FOLDER
    with written(folder / profile.trace) as part:
        part.write_bytes(trace)
    return documents.save(folder / f"{profile.name}.json", profile)


def newest(results: str | os.PathLike[str]) -> dict[str, Profile]:
    """The newest profile of each run key of a results folder. Files that hold none are left alone."""
    saved = documents.read(Path(results) / FOLDER, Profile)
    return {profile.key: profile for profile in sorted(saved, key=lambda profile: profile.run_id)}
