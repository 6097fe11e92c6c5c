"""Find exit layer, head, draft length, gate and threshold for a model and a workload, and write them down.

First the cost model: each exit's real drafts are logged once, and replaying the log under every gate, threshold and
length, with the step times measured there, says what each is worth. Then Optuna, over the exits, gates and thresholds
that this leaves, on live engines (one for each exit and head; everything else changes between two rounds). The
finalists run a second time, longer and alternating, because the best of many noisy trials is mostly a lucky one.

Everything is kept under results/tune/<key>/: logs, costs, trials. The same command goes on from there.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from selfspec_cli import interrupts
from selfspec_cli.artifacts import tuned
from selfspec_cli.config.facts import device_of
from selfspec_cli.config.keys import baseline_of, run_key
from selfspec_cli.config.model_digest import safe_name
from selfspec_cli.config.schema import ConfigError, HeadConfig, RunConfig, WorkloadConfig
from selfspec_cli.early_exit import replay
from selfspec_cli.early_exit.draft_weights import DRAFT_WEIGHTS
from selfspec_cli.early_exit.errors import on_one_line
from selfspec_cli.early_exit.gates import features
from selfspec_cli.early_exit.replay import Setting
from selfspec_cli.early_exit.view import DraftView
from selfspec_cli.engine.live import Engine
from selfspec_cli.progress import Progress, ignore
from selfspec_cli.stages import exits, measure, preflight, search
from selfspec_cli.stages.budget import Budget
from selfspec_cli.stages.exits import Exit, OpenEngine
from selfspec_cli.texts.prompts import workload_prompts
from selfspec_cli.whole import written

LONGEST = 12  # tokens a draft, at most
RECORDED = 24  # requests logged at each exit
NEAR = 0.95  # exits whose expected speedup is at least so much of the best one's are searched on
BY_HAND = 0.9  # the longest drafts without a gate run in the final race if so much of the best speedup is expected
ENGINES = 2  # and at most this number of them
BATCH = 6  # trials that alternate
FINALISTS, FINAL_REPEATS = 4, 3
SURE_REPEATS = 2  # of these, how many the trials leave time for
SHARE = 1 / 3  # of what is left of the first half of the time: what an exit's logging and timing may take
DRIFT = 0.15  # plain decoding may differ by so much between the finalists' engines before the result says so
LAYER_PARTS = (12, 8, 6, 4)  # where the user names no layer, these parts of them are tried as well as the default


@dataclass
class Finalist:
    """A setting, measured alternating with others, against plain decoding on its own engine."""

    cfg: RunConfig
    measured: dict[str, Any]

    @property
    def speedup(self) -> float:
        """Median over the repeats."""
        return float(self.measured["speedup"])

    @property
    def plain_tok_s(self) -> float:
        """Plain decoding on the same engine, measured alternately with it: tokens a second, median."""
        return float(self.measured["plain_tok_s"])


@dataclass
class TuneResult:
    """The choice, what it was chosen from, and where it is written."""

    choice: Finalist
    finalists: list[Finalist]
    expected: list[dict[str, Any]]  # of each exit: its best setting by the cost model
    trials: int
    seconds: float
    file: str
    overrides: list[str]
    untried: Sequence[str] = ()  # exits for which there was no time
    failed: Sequence[str] = ()  # exits that could not be had, each with the reason

    @property
    def warnings(self) -> list[str]:
        """What makes the choice uncertain, for people; empty where nothing does."""
        few = short_of_time(self.finalists, self.choice.cfg.workload, self.untried)
        return [*self.failed, *few, *pace_warnings(self.finalists)]


def facts(cfgs: Sequence[RunConfig], minutes: float, trials: int, heads: Sequence[HeadConfig] = ()) -> dict[str, Any]:
    """What `run` would do with these, for --dry-run. minutes, trials, heads: as `run` and `Budget` take them."""
    plan = exits.distinct(cfgs, LONGEST)
    more = {exits.name_of(other): None for cfg in plan for other in with_heads(cfg, heads)}
    return {
        "model": plan[0].model.path,
        "layers": [cfg.layer for cfg in plan],
        "exits": [exits.name_of(cfg) for cfg in plan],
        "also": list(more),  # tried at the exits that look promising
        "gates": list(search.gates(features())),
        "k": f"1 to {LONGEST}",
        "minutes": minutes,
        "trials": f"at most {trials} on each of {min(ENGINES, len(plan) + len(more))} engine(s)",
        "recorded": max(RECORDED, plan[0].workload.batch),  # requests whose drafts are logged at each exit
    }


def run(
    cfgs: Sequence[RunConfig],
    *,
    open_engine: OpenEngine,
    budget: Budget,
    conf: Path,
    heads: Sequence[HeadConfig] = (),
    model_words: Sequence[str] = (),
    progress: Progress = ignore,
) -> TuneResult:
    """Choose among `cfgs`, which differ in exit layer or head; writes the file that `tuned=MODEL` reads.

    Args:
        conf: the folder of choices to write to. model_words: the overrides that name the model. heads: tried too, where
            they are fitted for a layer that looks promising.

    Raises:
        ConfigError: nothing was drafted.
    """
    first = cfgs[0]
    folder = Path(first.results_dir) / "tune" / f"{safe_name(first.model.name)}-{run_key(baseline_of(first))}"
    folder.mkdir(parents=True, exist_ok=True)
    with exits.one_at_a_time(open_engine) as opened:
        found, late, failed = survey(exits.distinct(cfgs, LONGEST), folder, opened, budget, progress)
        others = [other for one in promising(found) for other in with_heads(one.cfg, heads)]
        if others:
            found, later, refused = survey(others, folder, opened, budget, progress, found)
            late, failed = late + later, failed + refused
        finalists, trials = _searched(found, folder, opened, budget, progress)
        choice = max(finalists, key=lambda finalist: finalist.speedup)
        choice = replace(choice, cfg=replace(choice.cfg, workload=first.workload))
    words = [*model_words, *tuned.overrides(choice.cfg)]
    work = choice.cfg.workload
    about = (
        f"{choice.speedup:.2f}x plain decoding, the greatest of {len(finalists)} finalists: {work.name}, "
        f"batch {work.batch}"
    )
    file = tuned.write(conf, first, words, about)
    expected = [{"exit": one.name, **one.best.to_dict()} for one in exits.level(found)]
    untried = [exits.name_of(cfg) for cfg in late]
    result = TuneResult(choice, finalists, expected, trials, budget.spent, str(file), words, untried, failed)
    with written(folder / "choice.json") as part:
        part.write_text(json.dumps(document(result), indent=2) + "\n", encoding="utf-8")
    return result


def document(result: TuneResult) -> dict[str, Any]:
    """The result as JSON."""
    finalists = [
        {"E": finalist.cfg.layer, "head": exits.exit_name(finalist.cfg), **finalist.measured}
        for finalist in result.finalists
    ]
    return {
        "overrides": result.overrides,
        "file": result.file,
        "tuned": safe_name(result.choice.cfg.model.name),
        "speedup": result.choice.speedup,
        "seconds": result.seconds,
        "trials": result.trials,
        "finalists": finalists,
        "expected": result.expected,
        "untried": list(result.untried),
        "warnings": result.warnings,
    }


def costly_copies(cfgs: Sequence[RunConfig]) -> list[str]:
    """What to know of copies on the CPU, for people; empty where no exit asks for them."""
    kinds = dict.fromkeys(cfg.draft_weights for cfg in cfgs if DRAFT_WEIGHTS[cfg.draft_weights].copies)
    if not kinds or device_of(cfgs[0]) != "cpu":
        return []
    return [
        f"draft_weights={','.join(kinds)}: the CPU dequantises copies, so drafts take as long on them as on the "
        "model's own weights; selfspec views predicts what they save where they are not dequantised"
    ]


def pace_warnings(finalists: Sequence[Finalist]) -> list[str]:
    """Whether the machine's pace moved from one engine to the next: then the order of their exits is uncertain.

    A finalist is compared with plain decoding on its own engine; that two of those go at one pace is an assumption.
    """
    slow, fast = (end(finalists, key=lambda one: one.plain_tok_s) for end in (min, max))
    change = fast.plain_tok_s / slow.plain_tok_s - 1
    if change <= DRIFT:
        return []
    paces = " and ".join(f"{one.plain_tok_s:.0f} tok/s beside {exits.name_of(one.cfg)}" for one in (slow, fast))
    return [
        f"plain decoding reached {paces}: the machine's pace changed by {change:.0%} between their engines, so the "
        "order of the exits is uncertain; tune again when nothing else runs here"
    ]


def short_of_time(finalists: Sequence[Finalist], workload: WorkloadConfig, untried: Sequence[str]) -> list[str]:
    """What there was no time for: all of the workload, other exits."""
    few = min((one.cfg.workload for one in finalists), key=lambda work: (work.num_prompts, work.output_len))
    cut, sentences = [], []
    if few.num_prompts < workload.num_prompts:
        cut.append(f"{few.num_prompts} of the workload's {workload.num_prompts} requests")
    if few.output_len < workload.output_len:
        cut.append(f"{few.output_len} of the {workload.output_len} tokens of a request")
    if cut:
        sentences.append(
            f"there was time for {' and for '.join(cut)}, so the speedups are rough; with more --minutes the "
            "same command goes on"
        )
    if untried:
        sentences.append(
            f"there was no time for {', '.join(untried)}; with more --minutes the same command tries them too"
        )
    return sentences


def with_heads(cfg: RunConfig, heads: Iterable[HeadConfig]) -> list[RunConfig]:
    """An exit with each of `heads` that is fitted for its layer and is not its own."""
    others = (replace(cfg, head=head) for head in heads if head != cfg.head and head.kind != "lens")
    return [other for other in others if _is_fitted(other)]


def survey(
    cfgs: Sequence[RunConfig],
    folder: Path,
    open_engine: OpenEngine,
    budget: Budget,
    progress: Progress = ignore,
    earlier: Sequence[Exit] = (),
) -> tuple[list[Exit], list[RunConfig], list[str]]:
    """Log and time each exit once, in the order given, after those that are `known`; also the exits for which there
    was no time, and those that could not be had, each with the reason.

    Of one view apart from its depth, and one way to take tokens, no more are looked at once two in a row expect less
    than the best before. Where the first exit of all cannot be had, the others are not tried.
    """
    surveyed: list[Exit] = list(earlier)
    worse: dict[tuple[DraftView, str], int] = {}
    late: list[RunConfig] = []
    failed: list[str] = []
    total = len(earlier) + len(cfgs)
    for cfg in cfgs:
        view = replace(DraftView.of(cfg), layer=None), cfg.draft_sample_method
        if worse.get(view, 0) >= 2:
            pass
        elif surveyed and not _may_survey(surveyed, budget):
            late.append(cfg)
        else:
            try:
                exit_ = _surveyed(cfg, folder, open_engine, budget, progress)
            except Exception as error:
                interrupts.check()  # an engine whose processes got the interrupt too fails, which says nothing of it
                if not surveyed:
                    raise
                reason = on_one_line(error)[:300]
                failed.append(f"{exits.name_of(cfg)} was left out: {reason}")
                progress.failed(exits.name_of(cfg), reason)
                continue
            best = max((other.best.speedup for other in surveyed), default=0.0)
            surveyed.append(exit_)
            worse[view] = worse.get(view, 0) + 1 if exit_.best.speedup < best else 0
            progress("exits", len(surveyed), total)
    progress.ended("exits", len(surveyed), total)
    return surveyed, late, failed


def promising(surveyed: Sequence[Exit]) -> list[Exit]:
    """The exits to search on, best first."""
    ranked = sorted(exits.level(surveyed), key=lambda exit_: -exit_.best.speedup)
    return [exit_ for exit_ in ranked if exit_.best.speedup >= NEAR * ranked[0].best.speedup][:ENGINES]


def _may_survey(surveyed: Sequence[Exit], budget: Budget) -> bool:
    """Whether another exit can be surveyed in the first half of the time: the other half belongs to the search."""
    return _survey_left(budget) > max((exit_.starting + exit_.seconds) / 2 for exit_ in surveyed)


def _survey_left(budget: Budget) -> float:
    """Seconds left of the first half of the time."""
    return max(budget.left - budget.minutes * 30, 0.0)


def _affordable(exit_: Exit, seconds: float) -> Exit:
    """Shrink the workload so that one batch of trials plus the final comparison fits into `seconds`."""
    work = exit_.cfg.workload
    pace = batch_seconds(exit_) / (work.output_len * math.ceil(work.num_prompts / work.batch))
    return replace(exit_, cfg=exits.sized(exit_.cfg, seconds / (2 + SURE_REPEATS), pace))


def _study(cfg: RunConfig) -> str:
    """Names the trials of an exit and the file of its drafts."""
    return f"{exits.name_of(cfg)}-{exits.draft_key(cfg)}"


def _surveyed(
    cfg: RunConfig, folder: Path, open_engine: OpenEngine, budget: Budget, progress: Progress = ignore
) -> Exit:
    """One exit with everything that the cost model expects of it, best first; its drafts and costs come from the folder
    if an earlier run left them there, unless that one was short of time and this one has twice as much."""
    file = folder / f"drafts-{_study(cfg)}.pt"
    exit_ = exits.load(cfg, file) if file.is_file() else None
    if exit_ is None or 2 * (exit_.seconds_allowed or math.inf) < SHARE * _survey_left(budget):
        began = budget.spent
        started: list[float] = []  # seconds since then, and what may be spent until logging and timing are over

        def left() -> float:
            if not started:
                started.extend((budget.spent - began, budget.spent + SHARE * _survey_left(budget)))
            return started[1] - budget.spent

        exit_ = exits.survey(cfg, open_engine, RECORDED, left, progress)
        exit_ = replace(exit_, starting=started[0], seconds=budget.spent - began)
        exits.save(exit_, file)
    settings = replay.settings_for(exit_.log, search.gates(exit_.log.features), range(1, LONGEST + 1))
    outcomes = (replay.replay(exit_.log, setting, exit_.costs) for setting in settings)
    ranked = tuple(sorted(outcomes, key=lambda outcome: -outcome.speedup))
    return replace(exit_, outcomes=ranked)


def _searched(
    surveyed: Sequence[Exit], folder: Path, open_engine: OpenEngine, budget: Budget, progress: Progress
) -> tuple[list[Finalist], int]:
    """The finalists of the exits that look promising, and the number of trials. Another engine than the first is opened
    only if half of the time is enough for its start, for a batch of trials and for a race."""
    best, *others = promising(surveyed)
    chosen = [best, *(exit_ for exit_ in others if budget.left / 2 > exit_.starting + 2 * batch_seconds(exit_))]
    finalists: list[Finalist] = []
    trials = 0
    for number, exit_ in enumerate(chosen):
        if number and budget.left < exit_.starting + batch_seconds(exit_):
            break
        until = budget.left - budget.left / (len(chosen) - number)
        with open_engine(exit_.cfg) as engine:
            exit_ = _affordable(exit_, budget.left - until)
            trials += _search(engine, exit_, folder, budget, until, progress)
            finalists += _final(engine, exit_, folder, budget, until, progress)
    return finalists, trials


def batch_seconds(exit_: Exit) -> float:
    """Expected time of a batch of trials, plain decoding with them; a repeat of the final race takes less."""
    work = exit_.cfg.workload
    plain = exit_.costs.plain * work.output_len * math.ceil(work.num_prompts / work.batch)
    # What is tried lies between plain decoding and the best that is expected.
    return plain * (1 + BATCH / max((1 + exit_.best.speedup) / 2, 1.0))


def _search(engine: Engine, exit_: Exit, folder: Path, budget: Budget, until: float, progress: Progress) -> int:
    """Trials on one live engine, in batches that take turns; returns how many this exit's study now has.

    until: seconds of the budget that must be left when the final race, too, is over. Another batch starts only if it
    and that race fit, as long as the slowest batch says they take.
    """
    study = search.open_study(folder / "trials.journal", _study(exit_.cfg), exit_.outcomes, exit_.log, exit_.cfg.seed)
    prompts = workload_prompts(exit_.cfg, engine)
    slowest = batch_seconds(exit_)
    warmup = 1
    while (done := search.completed(study)) < budget.trials and budget.left - (1 + SURE_REPEATS) * slowest > until:
        settings = search.ask(study, exit_.log, min(BATCH, budget.trials - done))
        before = budget.spent
        plain, *measured = measure.run(
            engine, exit_.cfg, prompts, [measure.PLAIN, *settings.values()], repeats=1, warmup=warmup
        )
        slowest, warmup = max(slowest, budget.spent - before), 0
        search.tell(study, {number: arm.median / plain.median for number, arm in zip(settings, measured, strict=True)})
        progress(f"trials {exit_.name}", search.completed(study), budget.trials)
    progress.ended(f"trials {exit_.name}", search.completed(study), budget.trials)
    return search.completed(study)


def _final(
    engine: Engine, exit_: Exit, folder: Path, budget: Budget, until: float, progress: Progress
) -> list[Finalist]:
    """The best trials, the cost model's own choice and what one would choose by hand once more: `FINAL_REPEATS`, or as
    many as end with `until` seconds of the budget left, but one at least."""
    study = search.open_study(folder / "trials.journal", _study(exit_.cfg), exit_.outcomes, exit_.log, exit_.cfg.seed)
    settings = list(dict.fromkeys([*search.best(study, exit_.log, FINALISTS), exit_.best.setting, *_plainest(exit_)]))
    prompts = workload_prompts(exit_.cfg, engine)
    plain, *measured = measure.run(
        engine,
        exit_.cfg,
        prompts,
        [measure.PLAIN, *settings],
        repeats=FINAL_REPEATS,
        another=lambda seconds: budget.left - seconds > until,
        progress=progress,
    )
    return [
        Finalist(tuned.apply(exit_.cfg, arm.setting), {**arm.to_dict(plain), "plain_tok_s": plain.median})
        for arm in measured
    ]


def _plainest(exit_: Exit) -> list[Setting]:
    """The longest drafts without a gate, unless they are expected to be far behind."""
    by_hand = [outcome for outcome in exit_.outcomes if outcome.setting == Setting("none", None, exit_.log.k)]
    return [outcome.setting for outcome in by_hand if outcome.speedup >= BY_HAND * exit_.best.speedup]


def _is_fitted(cfg: RunConfig) -> bool:
    try:
        preflight.head_file(cfg, int(cfg.layer or 0))
    except ConfigError:
        return False
    return True
