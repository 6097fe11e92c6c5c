"""Find exit layer, head, draft length, gate and threshold for a model and a workload, and write them down.

First the cost model: each exit's real drafts are logged once, and replaying the log under every gate, threshold and
length, with the step times measured there, says what each is worth. Then a race on live engines: the best settings of
the most promising exits take turns with plain decoding, because a log knows neither how rounds begin under another
setting nor how a batch waits for its longest draft. The same command goes on from results/tune/<key>/.
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from selfspec_cli import interrupts
from selfspec_cli.config import model_files, tuned
from selfspec_cli.config.keys import baseline_of, run_key
from selfspec_cli.config.model_files import safe_name
from selfspec_cli.config.schema import ConfigError, HeadConfig, RunConfig
from selfspec_cli.early_exit import replay
from selfspec_cli.early_exit.errors import on_one_line
from selfspec_cli.early_exit.gates import features
from selfspec_cli.early_exit.replay import Setting
from selfspec_cli.early_exit.view import DraftView
from selfspec_cli.engine.live import OpenEngine
from selfspec_cli.progress import Progress, ignore
from selfspec_cli.stages import exits, measure
from selfspec_cli.stages.exits import Exit
from selfspec_cli.texts.prompts import workload_prompts
from selfspec_cli.whole import atomic_write

LONGEST = 12  # tokens a draft, at most
RECORDED = 24  # requests logged at each exit
NEAR = 0.95  # exits whose expected speedup is at least this share of the best one's race
WORTHWHILE = 0.97  # gates whose expected speedup is at least this share of the exit's best race
BY_HAND = 0.9  # the longest drafts without a gate race if at least this share of the best speedup is expected of them
ENGINES = 2  # exits that race, at most
FINALISTS, REPEATS = 5, 5  # of each exit: settings, and repeats of each
LAYER_PARTS = (12, 8, 6, 4)  # where the user names no layer, these parts of them are tried as well as the default


class Budget:
    """The seconds after which tuning begins nothing new, from the moment this is made. clock: monotonic seconds."""

    def __init__(self, minutes: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds, self._clock, self._began = 60 * minutes, clock, clock()

    @property
    def spent(self) -> float:
        return self._clock() - self._began

    @property
    def left(self) -> float:
        """May be negative."""
        return self.seconds - self.spent

    @property
    def is_for_the_race(self) -> bool:
        """Whether what is left is the half that belongs to the race."""
        return self.left < self.seconds / 2


def facts(cfgs: Sequence[RunConfig], minutes: float, heads: Sequence[HeadConfig] = ()) -> dict[str, Any]:
    """What `run` would do with these, for --dry-run. minutes, heads: as `Budget` and `run` take them."""
    plan = exits.distinct(cfgs, LONGEST)
    more = {exits.name_of(other): None for cfg in plan for other in with_heads(cfg, heads)}
    return {
        "model": plan[0].model.path,
        "layers": [cfg.layer for cfg in plan],
        "exits": [exits.name_of(cfg) for cfg in plan],
        "also": list(more),  # tried at the exits that look promising
        "gates": ["none", *features()],
        "k": f"1 to {LONGEST}",
        "minutes": minutes,
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
) -> tuple[RunConfig, dict[str, Any]]:
    """Choose among `cfgs`, which differ in exit layer or head, and write the file that `tuned=MODEL` reads; the choice,
    and what it was chosen from. conf: folder of choices. model_words: overrides that name the model. heads: tried too,
    where they are fitted for a layer that looks promising. Raises ConfigError: nothing was drafted."""
    first = cfgs[0]
    folder = Path(first.results_dir) / "tune" / f"{safe_name(first.model.name)}-{run_key(baseline_of(first))}"
    folder.mkdir(parents=True, exist_ok=True)
    with exits.one_at_a_time(open_engine) as opened:
        found, late, failed = survey(exits.distinct(cfgs, LONGEST), folder, opened, budget, progress)
        others = [other for one in promising(found) for other in with_heads(one.cfg, heads)]
        if others:
            found, later, refused = survey(others, folder, opened, budget, progress, found)
            late, failed = late + later, failed + refused
        finalists = _raced(found, opened, budget, progress)
    choice, measured = max(finalists, key=lambda finalist: finalist[1]["speedup"])
    words, work = [*model_words, *tuned.overrides(choice)], choice.workload
    about = (
        f"{measured['speedup']:.2f}x plain decoding, the greatest of {len(finalists)} finalists: {work.name}, "
        f"batch {work.batch}"
    )
    untried = [exits.name_of(cfg) for cfg in late]
    if untried:
        failed.append(
            f"there was no time for {', '.join(untried)}; with more --minutes the same command tries them too"
        )
    document = {
        "overrides": words,
        "file": str(tuned.write(conf, first, words, about)),
        "tuned": safe_name(choice.model.name),
        "speedup": measured["speedup"],
        "seconds": budget.spent,
        "finalists": [row for _, row in finalists],
        "expected": [{"exit": exits.name_of(one.cfg), **one.best.to_dict()} for one in exits.level(found)],
        "untried": untried,  # exits for which there was no time
        "warnings": failed,  # what makes the choice uncertain, for people
    }
    atomic_write(folder / "choice.json", json.dumps(document, indent=2) + "\n")
    return choice, document


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
    """Log and time each exit once, in the order given, after those of `earlier`; also the exits for which there was no
    time (half of it belongs to the race), and why others could not be had; the first must be. Exits of one view and way
    to take tokens are no more looked at once two in a row expect less than the best before."""
    surveyed: list[Exit] = list(earlier)
    worse: Counter[tuple[DraftView, str]] = Counter()
    late: list[RunConfig] = []
    failed: list[str] = []
    total = len(earlier) + len(cfgs)
    for cfg in cfgs:
        name, view = exits.name_of(cfg), (replace(DraftView.of(cfg), layer=None), cfg.draft_sample_method)
        file = folder / f"drafts-{name}-{exits.draft_key(cfg)}.pt"
        if worse[view] >= 2:
            continue
        if surveyed and budget.is_for_the_race and not file.is_file():
            late.append(cfg)
            continue
        try:
            exit_ = _surveyed(cfg, file, open_engine, budget, progress)
        except Exception as error:
            interrupts.check()  # an engine whose processes got the interrupt too fails, which says nothing of it
            if not surveyed:
                raise
            reason = on_one_line(error)[:300]
            failed.append(f"{name} was left out: {reason}")
            progress.failed(name, reason)
            continue
        best = max((other.best.speedup for other in surveyed), default=0.0)
        surveyed.append(exit_)
        worse[view] = worse[view] + 1 if exit_.best.speedup < best else 0
        progress("exits", len(surveyed), total)
    progress.ended("exits", len(surveyed), total)
    return surveyed, late, failed


def promising(surveyed: Sequence[Exit]) -> list[Exit]:
    """The exits that race, best first."""
    ranked = sorted(exits.level(surveyed), key=lambda exit_: -exit_.best.speedup)
    return [exit_ for exit_ in ranked if exit_.best.speedup >= NEAR * ranked[0].best.speedup][:ENGINES]


def _surveyed(cfg: RunConfig, file: Path, open_engine: OpenEngine, budget: Budget, progress: Progress) -> Exit:
    """One exit with all outcomes expected of it, best first; from the file, if an earlier run left it there. Where
    requests take long, those of the time before the race are enough, and the next run logs all."""
    left_out = False

    def enough() -> bool:
        nonlocal left_out
        left_out = budget.is_for_the_race
        return left_out

    if file.is_file():
        exit_ = exits.load(cfg, file)
    else:
        exit_ = exits.survey(cfg, open_engine, RECORDED, progress, enough)
        if not left_out:
            exits.save(exit_, file)
    settings = replay.settings_for(exit_.log, ("none", *exit_.log.features), range(1, LONGEST + 1))
    outcomes = (replay.replay(exit_.log, setting, exit_.costs) for setting in settings)
    ranked = tuple(sorted(outcomes, key=lambda outcome: -outcome.speedup))
    return replace(exit_, outcomes=ranked)


def _raced(
    surveyed: Sequence[Exit], open_engine: OpenEngine, budget: Budget, progress: Progress
) -> list[tuple[RunConfig, dict[str, Any]]]:
    """The best settings of promising exits, with what was measured; a second exit races only if there is time."""
    chosen = promising(surveyed)
    finalists = []
    for number, exit_ in enumerate(chosen):
        if number and budget.left <= 0:
            break
        until = budget.left - budget.left / (len(chosen) - number)
        with open_engine(exit_.cfg) as engine:
            plain, *measured = measure.run(
                engine,
                exit_.cfg,
                workload_prompts(exit_.cfg, engine),
                [measure.PLAIN, *finalists_of(exit_)],
                repeats=REPEATS,
                another=lambda took, until=until: budget.left - took > until,  # type: ignore[misc]
                progress=progress,
            )
        for arm in measured:
            row = {
                "E": exit_.cfg.layer,
                "head": exits.exit_name(exit_.cfg),
                **arm.to_dict(plain),
                "plain_tok_s": plain.median,
            }
            finalists.append((tuned.apply(exit_.cfg, arm.setting), row))
    return finalists


def finalists_of(exit_: Exit) -> list[Setting]:
    """The best setting of each gate that is worth it, then the best of what is left; and the longest drafts without a
    gate, which one would choose by hand, unless they are expected to be far behind."""
    fastest = exit_.best.speedup
    best = {outcome.setting.gate: outcome for outcome in reversed(exit_.outcomes)}
    worthwhile = sorted(
        (one for one in best.values() if one.speedup >= WORTHWHILE * fastest), key=lambda one: -one.speedup
    )
    ranked = [outcome.setting for outcome in (*worthwhile, *exit_.outcomes)]
    by_hand = Setting("none", None, exit_.log.k)
    expected = {outcome.setting: outcome.speedup for outcome in exit_.outcomes}
    more = [by_hand] if expected.get(by_hand, 0.0) >= BY_HAND * fastest else []
    return list(dict.fromkeys([*list(dict.fromkeys(ranked))[:FINALISTS], *more]))


def _is_fitted(cfg: RunConfig) -> bool:
    try:
        model_files.full_head(cfg, int(cfg.layer or 0))
    except ConfigError:
        return False
    return True
