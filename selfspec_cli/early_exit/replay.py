"""What a gate would have done: logged drafts, cut where it would have stopped them, and what the rest had cost.

A log of ungated drafts of k tokens tells, for every gate, threshold and shorter draft length, how many steps a round
takes and how many of its tokens are accepted, without timing noise. In a run rounds begin after drafts of its own
length, and a batch drafts as long as its longest draft. So `selfspec tune` measures the best ones.

And how well each gate's statistic tells drafts that stand from drafts that fall (ROC analysis; scikit-learn is imported
then). The positive class is "the verifier took this token". In the draft: over every drafted token; it passes a gate
that was open on it and on all before it, so its score is the lowest so far. At stake: over the tokens whose
predecessors were right, by their own statistic."""

import csv
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

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


# ---- ROC analysis ----------------------------------------------------------------------------------------------------

_FAR = 1e30  # stands in for infinity, which scikit-learn refuses


@dataclass
class AucRow:
    """One gate at one exit."""

    model: str
    E: int
    head: str
    k: int  # tokens a draft, none of them stopped
    gate: str
    drafted: int  # tokens that the area is over
    accepted: int
    auc: float | None  # in the draft: of every drafted token; None where all of them have one fate
    auc_at_stake: float | None  # of tokens whose predecessors were all accepted, each by itself
    threshold: float | None  # by replay of the log: where this gate is worth most, and with which draft length
    best_k: int
    expected_speedup: float  # by the measured costs of steps, over plain decoding
    best_fixed_speedup: float  # of the best draft length without a gate, likewise


def scores(log: DraftLog, gate: str) -> Tensor:
    """A gate's statistic with the sign by which more means open, float32 [rounds, k]; NaN beyond the drafts."""
    if GATES[gate].rule().feature is None:
        return torch.where(log.was_drafted, 1.0, torch.nan)
    value = log.feature(gate)
    return value if GATES[gate].direction == "at_least" else -value


def auc(log: DraftLog, gate: str, *, at_stake: bool = False) -> float | None:
    """Area under the ROC curve, 0.5 by chance; None where every token has the same fate."""
    truth, score = _labelled(log, gate, at_stake)
    if len(truth) == 0 or bool(truth.all()) or not bool(truth.any()):
        return None
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(truth.numpy(), score.numpy()))


def curve(log: DraftLog, gate: str, *, at_stake: bool = False) -> tuple[list[float], list[float]]:
    """(false positive rates, true positive rates), both rising from 0 to 1."""
    from sklearn.metrics import roc_curve

    truth, score = _labelled(log, gate, at_stake)
    false_rate, true_rate, _ = roc_curve(truth.numpy(), score.numpy())
    return false_rate.tolist(), true_rate.tolist()


def write_table(rows: Sequence[AucRow], path: str | Path) -> Path:
    """Write the table as CSV; a value that is not there is an empty cell."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow([column.name for column in fields(AucRow)])
        for row in rows:
            table.writerow([f"{cell:.4g}" if isinstance(cell, float) else cell for cell in asdict(row).values()])
    return path


def _labelled(log: DraftLog, gate: str, at_stake: bool) -> tuple[Tensor, Tensor]:
    """Truth (bool) and score of the tokens in question, [n] each; tokens without a finite score are left out."""
    score = scores(log, gate)
    if not at_stake:
        score = score.nan_to_num(nan=-torch.inf).cummin(1).values  # NaN closes the gate for the rest of the draft
        score = torch.where(torch.isfinite(score), score, -_FAR)
    kept = (log.was_at_stake if at_stake else log.was_drafted) & torch.isfinite(score)
    return log.was_accepted[kept], score[kept]
