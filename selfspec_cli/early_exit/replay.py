"""What a gate would have done: logged drafts, cut where it would have stopped them, and what the rest had cost.

A log of ungated drafts of k tokens tells, for every gate, threshold and shorter draft length, how many steps a round
takes and how many of its tokens are accepted, without timing noise. A run differs in two ways: there rounds begin after
drafts of its own length, and a batch drafts as long as its longest draft. So `selfspec tune` measures the best ones.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from selfspec_cli.early_exit.cost_model import Costs
from selfspec_cli.early_exit.draft_log import DraftLog
from selfspec_cli.early_exit.gates import GATES


@dataclass(frozen=True)
class Setting:
    """A gate with its threshold, and the draft length."""

    gate: str
    threshold: float | None
    k: int

    def label(self) -> str:
        rule = GATES[self.gate]
        if rule.key is None or self.threshold is None:
            return f"k={self.k} no gate"
        return f"k={self.k} {self.gate} {'≥' if rule.direction == 'at_least' else '≤'} {self.threshold:.3g}"


@dataclass(frozen=True)
class Outcome:
    """What a setting makes of a log."""

    setting: Setting
    rounds: int
    drafted: int
    accepted: int
    speedup: float  # over plain decoding, by the costs

    def to_dict(self) -> dict[str, object]:
        values = asdict(self)
        return values.pop("setting") | values


def draft_lengths(log: DraftLog, setting: Setting) -> Tensor:
    """Steps that each logged round would have taken, int64 [rounds], at most what was drafted."""
    longest = log.drafted.clamp_max(setting.k)
    rule = GATES[setting.gate].rule(setting.threshold)
    if rule.feature is None:
        return longest
    open_ = rule.is_open(log.feature(rule.feature))  # [rounds, k]; NaN, beyond the draft, is closed
    return torch.minimum(open_.long().cumprod(1).sum(1) + 1, longest)


def replay(log: DraftLog, setting: Setting, costs: Costs) -> Outcome:
    return _outcome(log, setting, draft_lengths(log, setting), costs)


def oracle(log: DraftLog, k: int, costs: Costs) -> Outcome:
    """An upper bound for gates: one that stops a draft just after its first wrong token."""
    return _outcome(log, Setting("none", None, k), torch.minimum(log.accepted + 1, log.drafted.clamp_max(k)), costs)


def thresholds(log: DraftLog, gate: str, count: int = 16) -> list[float]:
    """Thresholds worth trying: evenly spaced quantiles of the gate's finite statistics in the log."""
    value = log.feature(gate)
    value = value[log.was_drafted & torch.isfinite(value)]
    if not len(value):
        return []
    quantiles = torch.quantile(value[:1_000_000], torch.linspace(0, 1, count + 2)[1:-1])
    low, high = GATES[gate].low, GATES[gate].high
    return sorted({round(min(max(item, low), high), 4) for item in quantiles.tolist()})


def settings_for(log: DraftLog, names: Iterable[str], lengths: Sequence[int]) -> list[Setting]:
    """Every gate of `names` whose statistic is in the log, at each of its `thresholds`, with every draft length."""
    settings: list[Setting] = []
    for name in names:
        if GATES[name].rule().feature is None:
            settings += [Setting(name, None, k) for k in lengths]
        elif name in log.features:
            settings += [Setting(name, limit, k) for limit in thresholds(log, name) for k in lengths if k > 1]
    return settings


def _outcome(log: DraftLog, setting: Setting, steps: Tensor, costs: Costs) -> Outcome:
    rounds, drafted = len(steps), int(steps.sum())
    accepted = int(torch.minimum(log.accepted, steps).sum())
    speedup = costs.speedup((rounds + accepted) / rounds, drafted / rounds) if rounds else 1.0
    return Outcome(setting, rounds, drafted, accepted, speedup)
