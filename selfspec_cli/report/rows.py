"""Which rows a report shows, in which groups, under which names; and what they say in a sentence."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from selfspec_cli import load_patterns
from selfspec_cli.early_exit import view
from selfspec_cli.early_exit.gates import GATES
from selfspec_cli.record.columns import Record, disturbed
from selfspec_cli.record.point import OK
from selfspec_cli.record.statistics import overlap
from selfspec_cli.record.tables import UNVERIFIED, asked

RIVALS = ("vllm", "ngram", "draft_model")  # arms that draft by vLLM's own methods


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
    return " · ".join(filter(None, (_arm(row), acceptance(row))))


def _arm(row: Record) -> str:
    if row.arm in ("baseline", "server"):  # an older version asked servers that ran already
        return row.arm
    runner = f" ({row.runner})" if row.runner else ""
    drawn = f" · {row.draft_sample_method} drafts" if row.draft_sample_method is not None else ""
    length = "" if row.k is None else f" k={row.k}"  # a line through several lengths has none
    if row.arm == "vllm":
        words = (row.speculative or "").split()
        method = " ".join(word for word in words if "=" not in word)
        return " · ".join([f"vLLM {method}{length}{runner}", *(word for word in words if "=" in word)])
    if row.arm == "ngram":  # in results from before there was arm vllm
        return f"vLLM n-gram{length}{runner}"
    if row.arm == "draft_model":
        return f"vLLM draft_model of {'half the' if row.E is None else row.E} layers{length}{runner}{drawn}"
    layer, head, context = view.label(row)
    tail = f" · {context}" if context else ""
    tail += f" · {row.free_drafts} free drafts" if row.free_drafts else ""
    tail += " · launched first" if row.read_first is False else ""
    tail += drawn
    if row.arm == "skip":
        return f"skip {layer} · {head}"
    table = re.sub(r"\*[^ ]+", "", row.length_table or "")  # without the costs behind its entries
    lengths = f", by load {table}" if table else ""
    return f"{layer} k={row.k}{lengths} · {head} · {gate_label(row)}{tail}"


def latest(rows: Iterable[Record]) -> list[Record]:
    """One row for each run key, in order of first appearance: the last measured one, or else the last failed one."""
    kept: dict[str, Record] = {}
    for row in rows:
        before = kept.get(row.key)
        if before is None or row.status == OK or before.status != OK:
            kept[row.key] = row
    return list(kept.values())


def group_title(row: Record) -> str:
    return f"{task(row)}, {asked(row)}, {sampling(row)}"


def task(row: Record) -> str:
    """Model and workload, such as: m, chat: 32 tokens in, 128 out."""
    prompts = "" if row.input_len is None else f"{row.input_len} tokens in, "
    return f"{row.model}, {row.workload}: {prompts}{row.output_len} out"


def sampling(row: Record) -> str:
    return "greedy" if not row.temperature else f"temperature {row.temperature:g}"


@dataclass
class Group:
    """Arms of one model, workload, device, baseline and acceptance. rows: the baseline's first, where it is known."""

    title: str
    rows: list[Record]

    @property
    def headline(self) -> str:
        return headline(self.rows)


def groups(rows: Iterable[Record]) -> list[Group]:
    """Rows by what they may be compared with, each arm beside the baseline that its speedup was computed from. Of each
    run key the row is `latest`'s, but a baseline stays with the arms that were compared with it. Failed arms stand with
    the newest baseline of their model, workload and device. Groups of these are in the order of baselines."""
    rows = list(rows)
    by_point = {row.point: row for row in rows if row.point}
    places = {name: place for place, name in enumerate(by_point)}
    by_task: dict[tuple[object, ...], dict[str | None, list[Record]]] = {}
    for row in latest(rows):
        alike = by_task.setdefault(_alike(row), {})
        alike.setdefault(row.point if row.arm == "baseline" else row.baseline, []).append(row)
    result: list[Group] = []
    for alike in by_task.values():
        measured = [name for name in alike if name in by_point]
        if None in alike and measured:  # failed arms were compared with nothing
            newest = max(measured, key=lambda name: by_point[name or ""].run_id)
            alike[newest] += alike.pop(None)
        for baseline, members in sorted(alike.items(), key=lambda item: places.get(item[0] or "", len(places))):
            shown = by_point.get(baseline or "")
            arms = [row for row in members if row is not shown]
            result += _by_acceptance([shown] if shown is not None else [], arms, several=len(alike) > 1)
    return result


def _alike(row: Record) -> tuple[object, ...]:
    names = ("model", "workload", "batch", "input_len", "output_len", "temperature", "device")
    values = (getattr(row, name) for name in names)
    return (row.model_fingerprint or row.model, *values, *load_patterns.comparable(row))


def _by_acceptance(baselines: list[Record], arms: list[Record], *, several: bool) -> Iterator[Group]:
    for length in list(dict.fromkeys(row.acceptance_length for row in arms)) or [None]:
        members = [*baselines, *(row for row in arms if row.acceptance_length == length)]
        which = f"baseline of {baselines[0].time[:16].replace('T', ' ')}" if several and baselines else ""
        yield Group(", ".join(filter(None, (group_title(members[0]), acceptance(members[-1]), which))), members)


def interval(row: Record) -> tuple[float, float] | None:
    """The 95 % interval of a row's speedup; None where repeats were not kept."""
    low, high = row.speedup_low, row.speedup_high
    return None if low is None or high is None else (low, high)


def fastest(rows: Iterable[Record]) -> tuple[list[Record], bool]:
    """(the verified arms that may be the fastest, the one of greatest speedup first; whether intervals say so). Rows
    share a baseline. An arm may be the fastest if its interval overlaps that of the greatest speedup; without intervals
    all verified arms may be. An arm whose acceptance was set counts only where no other is."""
    verified = [row for row in rows if row.arm not in UNVERIFIED and row.status == OK and row.speedup is not None]
    real = [row for row in verified if row.acceptance_length is None] or verified
    ranked = sorted(real, key=lambda row: -(row.speedup or 0))
    if not ranked:
        return [], False
    best = interval(ranked[0])
    if best is None or any(interval(row) is None for row in ranked):
        return ranked, False
    return [row for row in ranked if overlap(best, interval(row) or best)], True


def headline(rows: Iterable[Record]) -> str:
    """About arms that share a baseline: which is the fastest, or that this cannot be said; and of whom that speaks."""
    rows = list(rows)
    candidates, have_intervals = fastest(rows)
    sentences = [_fastest_in_words(candidates, have_intervals, rows), _of_the_host(rows)] if candidates else [NOTHING]
    return " ".join(filter(None, [*sentences, _of_others(rows)]))


NOTHING = "No verified arm has been measured yet."
LITTLE_BUSY = 0.5
"""Share of the time for which the multiprocessors of a GPU are busy. Plain decoding at the cost of 5 to 8 B parameters
keeps them busy for 0.7 of it on an H100, and at the cost of 1.8 B for 0.3 to 0.4, where the host decided how fast it
was (results/published/gpu/smollm2.jsonl.xz/slow_host_h100)."""


def _of_the_host(rows: Iterable[Record]) -> str:
    busy = next((row.sm_util for row in rows if row.arm == "baseline" and row.sm_util is not None), 1.0)
    said = (
        f"While plain decoding was timed the GPU's multiprocessors were busy {busy:.0%} of the time, so the "
        "speedup says as much of the host as of the GPU."
    )
    return said if busy < LITTLE_BUSY else ""


def _of_others(rows: Sequence[Record]) -> str:
    measured = [row for row in rows if row.status == OK]
    shares = [row.cpu_others or 0 for row in measured if disturbed(row.cpu_own, row.cpu_others)]
    if not shares:
        return ""
    return (
        f"Do not trust these figures: other programs had up to {max(shares):.0%} of the processor while {len(shares)} "
        f"of {len(measured)} arms were timed. Measure again when nothing else runs here."
    )


def _fastest_in_words(candidates: Sequence[Record], have_intervals: bool, rows: Sequence[Record]) -> str:
    best = candidates[0]
    base = next((row for row in rows if row.point == best.baseline and row.identical is not None), None)
    control = "" if base is None else f"; plain decoding with itself: {base.identical} of {base.outputs}"
    accept = f", {best.accept_rate:.0%} of its drafts accepted" if best.accept_rate is not None else ""
    same = f", {best.identical} of {best.outputs} outputs identical{control}" if best.identical is not None else ""
    what = f"{times(best)} the baseline ({label(best)}{accept}{same})"
    if not have_intervals:
        return f"Greatest speedup measured: {what}; no interval, because repeats were not kept."
    slower = "" if (best.speedup_low or 0) > 1 else "; its interval holds 1, so it may be no faster than the baseline"
    if (best.speedup_high or 1) < 1:
        slower = "; its whole interval is below 1, so it is slower than the baseline"
    if len(candidates) > 1:
        others = "one other arm" if len(candidates) == 2 else f"{len(candidates) - 1} other arms"
        return f"No arm is clearly the fastest: {what} and {others} have intervals that overlap{slower}."
    return f"Fastest verified arm: {what}{slower}."


def times(row: Record) -> str:
    """A speedup with its interval, such as 2.02x (1.85x to 2.20x); empty where there is none."""
    if row.speedup is None:
        return ""
    pair = interval(row)
    return f"{row.speedup:.2f}x" + (f" ({pair[0]:.2f}x to {pair[1]:.2f}x)" if pair else "")


def overview(tables: list[Group]) -> str:
    """What a whole report says: its one table's headline, or in how many of its tables an arm is surely faster."""
    if len(tables) == 1:
        return tables[0].headline
    ranked = [(best[0], have_intervals) for group in tables for best, have_intervals in [fastest(group.rows)] if best]
    if not ranked:
        return NOTHING
    unsure = sum(not have_intervals for _, have_intervals in ranked)
    surely = [row for row, have_intervals in ranked if have_intervals and (row.speedup_low or 0) > 1]
    parts = [f"{len(tables)} tables, each with a baseline of its own, so arms of different tables are not compared."]
    if len(surely) + unsure < len(ranked) or surely:
        parts.append(
            f"In {len(surely)} of {len(ranked) - unsure} whose repeats were kept, an arm is faster than plain "
            "decoding beyond the noise of its repeats."
        )
    if unsure:
        parts.append(f"{unsure} kept no repeats, so nothing says how sure their speedups are.")
    return " ".join(parts)
