"""Profiles of arms: where the time of a run went, as `selfspec profile` found it.

One profile, one file `results/profiles/<run key>-<run>.json`, with the trace beside it. The newest profile of a run key
is in the figure of the page. A profiled run is slower than a measured one, so it is no point.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from selfspec_cli.record import archive

FOLDER = "profiles"
PARTS = {
    "trunk": "the layers that draft",
    "head": "the exit head",
    "gate": "taking a draft token, and asking the gate",
    "draft": "the rest of drafting; all of a draft loop that is a CUDA graph",
    "verify": "the full model: verify passes and prefill",
    "sampler": "sampling, and accepting or rejecting drafts",
    "scheduler": "vLLM's scheduler",
    "detokenise": "text of the tokens, and making outputs",
    "other": "the rest of an engine step",
    "host": "the GPU waits for the host inside the other parts",
    "idle": "nothing of the above",
}
"""What each moment of a run is counted as."""


@dataclass(frozen=True)
class Profile:
    """Where the time of one arm went.

    arm: columns that name it. seconds: of each part (PARTS), those without any left out. wall: seconds of the run, the
    sum of all parts. rounds: full passes. tokens: generated. tok_s: without the profiler; tok_s_profiled: with it.
    kernels: slowest first, each with name, seconds and calls. gpu: whether kernels of a GPU are what was counted.
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
    gpu: bool
    trace: str
    command: list[str] | None = None
    config: dict[str, Any] | None = None
    versions: dict[str, str] = field(default_factory=dict)
    git: dict[str, Any] | None = None

    @property
    def name(self) -> str:
        return f"{self.key}-{self.run_id}"


def newest(results: str | os.PathLike[str]) -> dict[str, Profile]:
    """The newest profile of each run key of a results folder."""
    saved = archive.documents(Path(results) / FOLDER, Profile)
    return {profile.key: profile for profile in sorted(saved, key=lambda profile: profile.run_id)}
