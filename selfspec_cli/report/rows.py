"""Which rows a report shows, in which groups, under which names, beside which targets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from selfspec_cli.early_exit.gates import GATES
from selfspec_cli.record.records import OK, Record


@dataclass(frozen=True)
class Target:
    """A figure that users were promised; the baseline there was 400 tok/s."""

    name: str
    tok_s: float
    accept_rate: float | None = None
    delta_ppl: float | None = None

    @property
    def speedup(self) -> float:
        """Over the baseline's 400 tok/s."""
        return self.tok_s / 400


SKIP_TARGET = Target("skip E=12 · lsq", 610, 0.37, 1.1)
MAXP_TARGET = Target("maxp ≥ 0.35", 720, 0.40)
VARH_TARGET = Target("varH ≤ 5", 820, 0.50)
TARGETS = (Target("baseline", 400), SKIP_TARGET, MAXP_TARGET, VARH_TARGET)


def target_for(row: Record) -> Target | None:
    """The target that `row` is to be held against, if it is one of the promised arms and its acceptance is real."""
    if row.acceptance_length is not None:
        return None
    if row.arm == "skip" and row.head == "lsq" and row.E == 12:
        return SKIP_TARGET
    if row.arm == "layer_skip" and row.gate == "maxp" and row.threshold == 0.35:
        return MAXP_TARGET
    if row.arm == "layer_skip" and row.gate == "varH" and row.threshold == 5:
        return VARH_TARGET
    return None


def gate_label(row: Record) -> str:
    """The gate as a condition to go on drafting."""
    if row.gate in (None, "none"):
        return "no gate"
    rule = GATES.get(row.gate or "")
    sign = "at" if rule is None else "≥" if rule.direction == "at_least" else "≤"
    return f"{row.gate} {sign} {row.threshold:g}" if row.threshold is not None else str(row.gate)


def acceptance(row: Record) -> str:
    """That the accepted length was set and not found, to end a text with; empty where acceptance is real."""
    return "" if row.acceptance_length is None else f"acceptance set to {row.acceptance_length:g}"


def label(row: Record) -> str:
    """An arm in a few words."""
    return " · ".join(filter(None, (_arm(row), acceptance(row))))


def _arm(row: Record) -> str:
    if row.arm == "baseline":
        return "baseline"
    runner = f" ({row.runner})" if row.runner else ""
    if row.arm == "ngram":
        return f"vLLM n-gram k={row.k}{runner}"
    if row.arm == "draft_model":
        return f"vLLM draft_model of {'half the' if row.E is None else row.E} layers k={row.k}{runner}"
    layer = f"E={row.E}" if row.E is not None else "E=half"
    head = f"{row.head}" + (f" V'={row.vocab}" if row.vocab not in (None, "full") else "")
    head += f" · {row.draft_weights} draft" if row.draft_weights not in (None, "shared") else ""
    tail = " · adaptive verification" if row.verification == "adaptive" else ""
    if row.arm == "skip":
        return f"skip {layer} · {head}"
    return f"{layer} k={row.k} · {head} · {gate_label(row)}{tail}"


def latest(rows: Iterable[Record]) -> list[Record]:
    """One row for each run key: the last measured one, or the last failed one where none was measured.

    Rows stand in the order of first appearance, so a sweep keeps its own order.
    """
    kept: dict[str, Record] = {}
    for row in rows:
        before = kept.get(row.key)
        if before is None or row.status == OK or before.status != OK:
            kept[row.key] = row
    return list(kept.values())


def group_title(row: Record) -> str:
    """What all rows of a group share."""
    sampling = "greedy" if not row.temperature else f"temperature {row.temperature:g}"
    return f"{row.model}, {row.input_len} tokens in, {row.output_len} out, batch {row.batch}, {sampling}"


def groups(rows: Iterable[Record]) -> list[tuple[str, list[Record]]]:
    """Rows that may stand in one table: same model, workload and device, and an acceptance that is real, or set to the
    same length; the baseline first, in each."""
    found: dict[tuple[object, ...], list[Record]] = {}
    for row in rows:
        key = (row.model, row.workload, row.batch, row.input_len, row.output_len, row.temperature, row.device)
        found.setdefault(key, []).append(row)
    return [group for members in found.values() for group in _by_acceptance(members)]


def _by_acceptance(rows: list[Record]) -> Iterator[tuple[str, list[Record]]]:
    baselines = [row for row in rows if row.arm == "baseline"]
    arms = [row for row in rows if row.arm != "baseline"]
    for length in list(dict.fromkeys(row.acceptance_length for row in arms)) or [None]:
        members = [*baselines, *(row for row in arms if row.acceptance_length == length)]
        yield ", ".join(filter(None, (group_title(members[0]), acceptance(members[-1])))), members


def span(row: Record) -> tuple[float, float] | None:
    """Speedup of the slowest and of the fastest repeat over the baseline's median; None where not measured."""
    if not row.tok_s_median or row.tok_s_min is None or row.tok_s_max is None or row.speedup is None:
        return None
    baseline = row.tok_s_median / row.speedup
    return row.tok_s_min / baseline, row.tok_s_max / baseline


def headline(rows: Iterable[Record]) -> str:
    """One sentence: the fastest lossless arm. One whose acceptance was set is named only where there is no other."""
    verified = [row for row in rows if row.arm == "layer_skip" and row.status == OK and row.speedup is not None]
    if not verified:
        return "No verified arm has been measured yet."
    best = max(verified, key=lambda row: (row.acceptance_length is None, row.speedup or 0))
    accept = f", {best.accept_rate:.0%} of its drafts accepted" if best.accept_rate is not None else ""
    same = f", {best.identical} of {best.outputs} outputs identical" if best.identical is not None else ""
    return f"Fastest verified arm: {best.speedup:.2f}x the baseline ({label(best)}{accept}{same})."
