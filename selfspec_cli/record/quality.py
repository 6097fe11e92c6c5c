"""What was found about an arm besides its points: the quality of its output, and where its time went.

One finding (a perplexity, an evaluation), one file `results/quality/<kind>-<arm key>-<run>.json`; the newest of an arm
(`Keys.arm`) are columns of all its rows. A verdict of `selfspec verify` is a file `verify/<key>-<run>.json`, and names
an arm or the key of one point. A profile of `selfspec profile` is a file `profiles/<run key>-<run>.json`, with its
trace; the newest of a run key is in a figure of the page. A profiled run is slower, so it is no point.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from selfspec_cli import load_patterns
from selfspec_cli.early_exit import view
from selfspec_cli.record import archive
from selfspec_cli.record.statistics import Interval, perplexity_interval

FOLDER, VERDICTS = "quality", "verify"
TEXT, GENERATED, EVAL = "text", "generated", "eval"
GREEDY, SAMPLED = "greedy", "sampled"
_LIMITS = ("ttft_limit_ms", "tpot_limit_ms", "e2e_limit_ms")  # the last in older results
_WORKLOAD = ("workload", "batch", "input_len", "output_len", "temperature", "seed", "repeats")
NO_NAMES = (*_WORKLOAD, *load_patterns.COLUMNS, *_LIMITS)  # columns of a row that say nothing of an arm


@dataclass
class Quality:
    """What is known of an arm's output, by the newest findings; `ppl` and `delta_ppl` are columns of summary.csv."""

    verdict: str | None = None  # of `selfspec verify`
    delta_ppl_low: float | None = None  # 95 % intervals, by bootstrap over documents or prompts
    delta_ppl_high: float | None = None
    delta_ppl_of_greedy: float | None = None  # PPL of what it generates under the plain model, less the baseline's
    delta_ppl_of_greedy_low: float | None = None
    delta_ppl_of_greedy_high: float | None = None
    delta_ppl_of_sampled: float | None = None
    delta_ppl_of_sampled_low: float | None = None
    delta_ppl_of_sampled_high: float | None = None
    scores: str | None = None  # of `selfspec eval`, each with its standard error


@dataclass(frozen=True)
class Scores:
    """nats, tokens: negative log-likelihood and scored tokens of each document, or continuation of a prompt."""

    nats: list[float]
    tokens: list[int]

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-likelihood a token."""
        return math.exp(math.fsum(self.nats) / sum(self.tokens))

    def interval(self, other: Scores | None = None) -> Interval | None:
        """The 95 % interval of the perplexity, or of what it is above another's of the same documents."""
        return perplexity_interval(self.nats, self.tokens, *((other.nats, other.tokens) if other else ()))


@dataclass(frozen=True)
class Finding:
    """One finding about one arm. arm_key: `Keys.arm`. arm: columns that name it. baseline: arm key of what it is
    compared with; None for a baseline. protocol: what was asked, in plain values. found: by kind

        text         documents (names), scores, and the baseline's scores of the same documents (baseline)
        generated    greedy and sampled, each with scores of the plain model and the baseline's of the same prompts
                     (baseline), and how many outputs are identical to the baseline's; drafted, accepted: tokens
        eval         scores: task, metric, value, stderr, samples, drafted (whether the task goes through drafting), and
                     same: how many of the samples have the baseline's answer
    """

    kind: str
    arm_key: str
    run_id: str
    time: str
    device: str
    arm: dict[str, Any]
    baseline: str | None
    protocol: dict[str, Any]
    found: dict[str, Any]
    command: list[str] | None = None
    config: dict[str, Any] | None = None
    digests: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    git: dict[str, Any] | None = None

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.arm_key}-{self.run_id}"

    def scores(self, part: str | None = None, baseline: bool = False) -> Scores | None:
        """The scores of a perplexity: of the text, or of the greedy or sampled part; the arm's or the baseline's."""
        inner = self.found if part is None else self.found.get(part) or {}
        values = inner.get("baseline" if baseline else "scores")
        return None if values is None else Scores(**values)


@dataclass
class Book:
    """The newest findings of a results folder, by arm and kind; verdicts by what they name."""

    findings: dict[tuple[str, str], Finding] = field(default_factory=dict)
    verdicts: dict[str, dict[str, Any]] = field(default_factory=dict)

    def columns(self, arm_key: str | None, key: str) -> dict[str, Any]:
        """What is known of an arm, by the names of a row's columns. key: of the point, which a verdict may name."""
        verdict = self.verdicts.get(arm_key or "") or self.verdicts.get(key)
        values: dict[str, Any] = {} if verdict is None else {"verdict": str(verdict["verdict"])}
        for kind in PROTOCOLS:
            if (finding := self.findings.get((kind, arm_key or ""))) is not None:
                values |= _columns(finding)
        return values


def read(results: str | os.PathLike[str]) -> Book:
    """The findings of a results folder. Files that hold none are left alone."""
    findings = archive.documents(Path(results) / FOLDER, Finding)
    book = Book({(finding.kind, finding.arm_key): finding for finding in findings})
    for data in archive.json_objects(Path(results) / VERDICTS):
        # Not of a run that was to find one planted fault; with "all" the verdict is that of the clean runs.
        if "verdict" in data and data.get("planted") in (None, "all"):
            book.verdicts |= {str(data[name]): data for name in ("arm_key", "key") if data.get(name)}
    return book


PROTOCOLS = {TEXT: "ppl_protocol", GENERATED: "generated_protocol", EVAL: "scores_protocol"}
PERPLEXITIES = {None: "ppl", GREEDY: "ppl_of_greedy", SAMPLED: "ppl_of_sampled"}
"""The perplexity of each part of a finding (None: of the text), by its name; `delta_` before it is the difference."""


def _columns(finding: Finding) -> dict[str, Any]:
    """What a finding says, by the names of a row's columns and of the perplexities that only a command shows."""
    columns: dict[str, Any] = {PROTOCOLS[finding.kind]: in_words(finding.protocol)}
    if finding.kind == EVAL:  # such as `stdlib_line exact_match 0.31 ± 0.05 (drafted)`
        scores = []
        for score in finding.found["scores"]:
            error = "" if score["stderr"] is None else f" ± {score['stderr']:.3f}"
            drafted = " (drafted)" if score["drafted"] else ""  # only that can differ for a verified arm
            scores.append(f"{score['task']} {score['metric']} {score['value']:.3f}{error}{drafted}")
        return columns | {"scores": "; ".join(scores)}
    for part, name in PERPLEXITIES.items():
        ours, theirs = finding.scores(part), finding.scores(part, baseline=True)
        if ours is not None:
            columns |= _with_ends(name, ours.perplexity, ours.interval()) | {f"delta_{name}": None}
        if ours is not None and theirs is not None:
            columns |= _with_ends(f"delta_{name}", ours.perplexity - theirs.perplexity, ours.interval(theirs))
    return columns


def _with_ends(name: str, value: float, interval: Interval | None) -> dict[str, Any]:
    low, high = interval or (None, None)
    return {name: value, f"{name}_low": low, f"{name}_high": high}


def arm_in_words(arm: Mapping[str, Any]) -> str:
    """An arm by the settings that make it one."""
    names = dict.fromkeys(("speculative", "E", "k", *view.all_columns(), "draft_sample_method", "gate", "threshold"))
    given = {name: arm[name] for name in names if arm.get(name) not in (None, "full", "shared")}
    return " ".join([str(arm["arm"]), *(f"{name}={value}" for name, value in given.items())])


def in_words(protocol: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in protocol.items() if value is not None)


PROFILES = "profiles"
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
    """Where the time of one arm went. arm: columns that name it. seconds: of each part (PARTS) that took any. wall:
    seconds of the run, the sum of all parts. rounds: full passes. tokens: generated. tok_s: without the profiler;
    tok_s_profiled: with it. kernels: slowest first, each with name, seconds and calls. gpu: whether kernels of a GPU
    were counted. trace: name of the file beside this one."""

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


def newest_profiles(results: str | os.PathLike[str]) -> dict[str, Profile]:
    """The newest profile of each run key of a results folder."""
    saved = archive.documents(Path(results) / PROFILES, Profile)
    return {profile.key: profile for profile in sorted(saved, key=lambda profile: profile.run_id)}
