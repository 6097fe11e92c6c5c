"""Several settings of one live engine, measured so that their ratios survive a machine whose speed drifts.

The arms take turns prompt by prompt, a second or less each, so whatever slows the machine slows all of them. Plain
decoding is an arm like the others: the same engine, drafting nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from selfspec_cli.config.schema import RunConfig
from selfspec_cli.early_exit import counters
from selfspec_cli.early_exit.cost_model import Costs, fit_costs
from selfspec_cli.early_exit.replay import Setting
from selfspec_cli.engine.live import Engine, Generation
from selfspec_cli.progress import Progress, ignore

PLAIN = Setting("none", None, 0)
"""No drafts at all."""


@dataclass
class Arm:
    """One setting and what it did in each repeat."""

    setting: Setting
    repeats: list[list[Generation]] = field(default_factory=list)  # one generation a prompt chunk

    @property
    def tok_s(self) -> list[float]:
        """Generated tokens a second, one number a repeat."""
        return [_tokens(repeat) / sum(part.seconds for part in repeat) for repeat in self.repeats]

    @property
    def median(self) -> float:
        """Tokens a second of a median repeat: each prompt chunk takes the median of its times.

        A machine that stalls spoils one chunk of one arm, and with it that arm's whole repeat; not its median chunk.
        """
        seconds = (statistics.median(part.seconds for part in chunk) for chunk in zip(*self.repeats, strict=True))
        return _tokens(self.repeats[0]) / sum(seconds)

    def outputs(self) -> list[list[int]]:
        """Token ids of the last repeat, one list a prompt."""
        return [output for part in self.repeats[-1] for output in part.outputs]

    def drafted(self) -> tuple[int, int, int]:
        """vLLM's rounds, drafted and accepted tokens over all repeats."""
        counts = [part.drafts for repeat in self.repeats for part in repeat if part.drafts is not None]
        return sum(c.rounds for c in counts), sum(c.drafted for c in counts), sum(c.accepted for c in counts)

    def ratios(self, other: Arm) -> list[float]:
        """Speed over another arm's in the same repeat."""
        return [ours / theirs for ours, theirs in zip(self.tok_s, other.tok_s, strict=True)]

    def to_dict(self, reference: Arm) -> dict[str, Any]:
        """As JSON, with the speed over `reference`."""
        rounds, drafted, accepted = self.drafted()
        ratios = self.ratios(reference)
        return {
            "gate": self.setting.gate,
            "threshold": self.setting.threshold,
            "k": self.setting.k,
            "tok_s": self.tok_s,
            "tok_s_median": self.median,
            "speedup": self.median / reference.median,
            "speedup_min": min(ratios),
            "speedup_max": max(ratios),
            "accept_rate": accepted / drafted if drafted else None,
            "drafted_per_round": drafted / rounds if rounds else None,
            "mean_accepted_len": 1 + accepted / rounds if rounds else None,
        }


def apply(engine: Engine, setting: Setting, calibration: dict[str, Any] | None = None) -> None:
    """Make a live engine draft by `setting`; calibration: the map of gate `calibrated`."""
    engine.set_draft_length(setting.k)
    engine.set_gate(setting.gate, setting.threshold, calibration if setting.gate == "calibrated" else None)


def measure(
    engine: Engine,
    cfg: RunConfig,
    prompts: Sequence[list[int]],
    settings: Sequence[Setting],
    *,
    repeats: int,
    warmup: int = 1,
    calibration: dict[str, Any] | None = None,
    another: Callable[[float], bool] = lambda seconds: True,
    progress: Progress = ignore,
) -> list[Arm]:
    """Run every setting over every prompt `repeats` times, by turns; the order turns around from chunk to chunk.

    another: whether to go on after a repeat that is not the last one, given the seconds that it took.
    """
    work, arms = cfg.workload, [Arm(setting) for setting in settings]
    chunks = [prompts[start : start + work.batch] for start in range(0, len(prompts), work.batch)]
    for number in range(warmup + repeats):
        taken: list[list[Generation]] = [[] for _ in arms]
        # One chunk is enough to warm up: it has run every setting's code.
        for place, chunk in enumerate(chunks if number >= warmup else chunks[:1]):
            order = range(len(arms)) if (place + number) % 2 else reversed(range(len(arms)))
            for index in order:
                apply(engine, arms[index].setting, calibration)
                taken[index].append(
                    engine.generate(
                        chunk, work.output_len, batch=work.batch, temperature=work.temperature, seed=cfg.seed
                    )
                )
        if number >= warmup:
            for arm, generations in zip(arms, taken, strict=True):
                arm.repeats.append(generations)
        progress("repeats", number + 1, warmup + repeats)
        seconds = sum(part.seconds for generations in taken for part in generations)
        if number >= warmup and number + 1 < warmup + repeats and not another(seconds):
            progress("repeats", warmup + repeats, warmup + repeats)
            break
    return arms


def costs(plain: Arm, drafting: Sequence[Arm]) -> Costs:
    """What a step costs here, from arms of fixed draft lengths; seconds of a step of the whole batch."""
    points = []
    for arm in drafting:
        parts = _typical(arm)
        own = counters.total(part.drafting for part in parts)
        assert own is not None
        seconds = sum(part.seconds for part in parts)
        points.append((own["steps"] / own["rounds"], seconds, own.get("seconds"), float(own["rounds"])))
    parts = _typical(plain)
    # A step yields a token for each request of the batch; what one request waits for a token is the step.
    return fit_costs(points, sum(part.seconds for part in parts) / _tokens(parts) * _in_flight(plain))


def _typical(arm: Arm) -> list[Generation]:
    """Of every prompt chunk the repeat that took the median time (the shorter of two): a stall spoils the others."""
    chunks = zip(*arm.repeats, strict=True)
    return [sorted(chunk, key=lambda part: part.seconds)[(len(chunk) - 1) // 2] for chunk in chunks]


def _in_flight(arm: Arm) -> float:
    return statistics.mean(len(part.outputs) for repeat in arm.repeats for part in repeat)


def _tokens(repeat: Sequence[Generation]) -> int:
    return sum(len(output) for part in repeat for output in part.outputs)
