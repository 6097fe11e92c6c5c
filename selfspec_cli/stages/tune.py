"""Find exit layer, head, draft length, gate and threshold for a model and a workload, and write them down.

First the cost model: each exit's real drafts are logged once, and replaying the log under every gate, threshold and
length, with the step times measured there, says what each is worth. Then Optuna, over the exits, gates and thresholds
that this leaves, on live engines (one for each exit and head; everything else changes between two rounds). The
finalists run once more, longer and by turns, because the best of many noisy trials is mostly a lucky one.

Everything is kept under results/tune/<key>/: logs, costs, trials. The same command goes on from there.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from selfspec_cli.artifacts import calibrations, tuned
from selfspec_cli.config import paths
from selfspec_cli.config.keys import KEY_LENGTH, baseline_of, engine_key, run_key
from selfspec_cli.config.model_digest import head_folder, safe_name
from selfspec_cli.config.schema import ConfigError, GateConfig, HeadConfig, HeadKind, Method, RunConfig
from selfspec_cli.early_exit import replay
from selfspec_cli.early_exit.cost_model import Costs
from selfspec_cli.early_exit.draft_log import DraftLog
from selfspec_cli.early_exit.draft_vocab import COUNTS_FILE
from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.early_exit.replay import Outcome
from selfspec_cli.engine.live import Engine
from selfspec_cli.progress import Progress, ignore
from selfspec_cli.stages import arms, preflight, roc, search
from selfspec_cli.texts import prompts as workload

LONGEST = 12  # tokens a draft, at most
RECORDED = 24  # requests logged at each exit
NEAR = 0.95  # exits whose expected speedup is at least so much of the best one's are searched on
ENGINES = 2  # and at most so many of them
BATCH = 6  # trials measured by turns
FINALISTS, FINAL_REPEATS = 4, 3
SURE_REPEATS = 2  # of these, how many the trials leave time for
DRIFT = 0.15  # plain decoding may differ by so much between the finalists' engines before the result says so
CLOSING = 5.0  # seconds kept for shutting the last engine down and writing the choice


@dataclass
class Budget:
    """How long the search may take, from the moment this is made. clock: seconds, never going back."""

    minutes: float
    trials: int  # on each engine
    clock: Callable[[], float] = time.monotonic
    started: float = field(init=False)

    def __post_init__(self) -> None:
        self.started = self.clock()

    @property
    def spent(self) -> float:
        """Seconds."""
        return self.clock() - self.started

    @property
    def left(self) -> float:
        """Seconds, may be negative."""
        return self.minutes * 60 - CLOSING - self.spent


@dataclass
class Exit:
    """One exit and head: what the cost model says of it."""

    cfg: RunConfig
    study: str  # names its trials and its file of drafts, see `draft_key`
    log: DraftLog
    costs: Costs
    outcomes: list[Outcome]  # best first
    seconds: float  # what the survey took

    @property
    def name(self) -> str:
        """For people."""
        return _name(self.cfg)


@dataclass
class Finalist:
    """A setting, measured with others by turns against plain decoding on its own engine."""

    cfg: RunConfig
    measured: dict[str, Any]

    @property
    def speedup(self) -> float:
        """Median over the repeats."""
        return float(self.measured["speedup"])

    @property
    def plain_tok_s(self) -> float:
        """What plain decoding reached beside it, on the same engine; tokens a second, median."""
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

    @property
    def warnings(self) -> list[str]:
        """What makes the choice uncertain, for people; empty where nothing does."""
        return doubts(self.finalists)


def run(
    cfgs: Sequence[RunConfig],
    *,
    open_engine: Any,
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
    exits = survey(cfgs, folder, open_engine, budget, progress)
    for other in [cfg for found in promising(exits) for cfg in with_heads(found.cfg, heads)]:
        if _may_survey(exits, budget):
            exits.append(_surveyed(other, folder, open_engine, budget))
    finalists: list[Finalist] = []
    trials = 0
    remaining = promising(exits)
    opening = 0.0
    for number, found in enumerate(remaining):
        if number and budget.left < opening + batch_seconds(found):
            break
        until = budget.left - budget.left / (len(remaining) - number)
        before = budget.spent
        with open_engine(replace(found.cfg, gate=GateConfig())) as engine:
            opening = budget.spent - before
            trials += _search(engine, found, folder, budget, until, progress)
            finalists += _final(engine, found, folder, budget, until, progress)
    choice = max(finalists, key=lambda finalist: finalist.speedup)
    words = [*model_words, *tuned.overrides(choice.cfg)]
    about = f"{choice.speedup:.2f}x plain decoding: {choice.cfg.workload.name}, batch {choice.cfg.workload.batch}"
    file = tuned.write(conf, first, words, about)
    expected = [{"exit": found.name, **found.outcomes[0].to_dict()} for found in level(exits)]
    result = TuneResult(choice, finalists, expected, trials, budget.spent, str(file), words)
    (folder / "choice.json").write_text(json.dumps(document(result), indent=2) + "\n", encoding="utf-8")
    return result


def document(result: TuneResult) -> dict[str, Any]:
    """The result as JSON."""
    finalists = [
        {"E": finalist.cfg.layer, "head": calibrations.exit_name(finalist.cfg), **finalist.measured}
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
        "warnings": result.warnings,
    }


def doubts(finalists: Sequence[Finalist]) -> list[str]:
    """Whether the machine's pace moved from one engine to the next: then the order of their exits is uncertain.

    A finalist is compared with plain decoding on its own engine; that two of those go at one pace is an assumption.
    """
    slow, fast = (end(finalists, key=lambda one: one.plain_tok_s) for end in (min, max))
    change = fast.plain_tok_s / slow.plain_tok_s - 1
    if change <= DRIFT:
        return []
    paces = " and ".join(f"{one.plain_tok_s:.0f} tok/s beside {_name(one.cfg)}" for one in (slow, fast))
    return [f"plain decoding reached {paces}: the machine's pace changed by {change:.0%} between their engines, so the "
            "order of the exits is uncertain; tune again when nothing else runs here"]  # fmt: skip


def draft_key(cfg: RunConfig) -> str:
    """Names what a config drafts, apart from its gate: another for every other setting that matters, and for a head or
    a vocabulary whose file holds something else now."""
    digest = hashlib.sha256(engine_key(cfg).encode())
    for path in _draft_files(cfg):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:KEY_LENGTH]


def candidate_layers(cfg: RunConfig) -> list[int]:
    """Exit layers to try where the user names none: a twelfth to a half of the layers, and the model's own choice.

    Raises:
        ConfigError: nothing here says how many layers the model has.
    """
    layers = preflight.num_layers(cfg, Path(paths.model_path(cfg.model)).expanduser())
    if layers is None:
        return roc.default_layers(cfg)
    wanted = {max(layers // part, 1) for part in (12, 8, 6, 4, 2)} | {cfg.model.exit_layer or 1}
    return sorted(layer for layer in wanted if layer < layers)


def with_heads(cfg: RunConfig, heads: Iterable[HeadConfig]) -> list[RunConfig]:
    """An exit with each of `heads` that is fitted for its layer and is not its own."""
    others = (replace(cfg, head=head) for head in heads if head != cfg.head and head.kind is not HeadKind.lens)
    return [other for other in others if _is_fitted(other)]


def survey(
    cfgs: Sequence[RunConfig], folder: Path, open_engine: Any, budget: Budget, progress: Progress = ignore
) -> list[Exit]:
    """Log and time each exit once, from the shallowest on, until two in a row expect less than the best before."""
    found: list[Exit] = []
    worse = 0
    for number, cfg in enumerate(cfgs):
        plain = replace(cfg, k=LONGEST, gate=GateConfig(), method=Method.layer_skip)
        exit_ = _surveyed(plain, folder, open_engine, budget)
        best = max((known.outcomes[0].speedup for known in found), default=0.0)
        found.append(exit_)
        worse = worse + 1 if exit_.outcomes[0].speedup < best else 0
        progress("exits", number + 1, len(cfgs))
        if worse == 2 or not _may_survey(found, budget):
            break
    progress("exits", len(cfgs), len(cfgs))
    return found


def level(exits: Sequence[Exit]) -> list[Exit]:
    """The exits as if plain decoding had taken the same time on every engine, the median.

    Plain decoding knows nothing of exits; where the machine stalled under it, that exit would look fast.
    """
    plain = statistics.median(found.costs.plain for found in exits)
    return [
        replace(
            found,
            costs=replace(found.costs, plain=plain),
            outcomes=[replace(one, speedup=one.speedup * plain / found.costs.plain) for one in found.outcomes],
        )
        for found in exits
    ]


def promising(exits: Sequence[Exit]) -> list[Exit]:
    """The exits to search on, best first."""
    ranked = sorted(level(exits), key=lambda found: -found.outcomes[0].speedup)
    return [found for found in ranked if found.outcomes[0].speedup >= NEAR * ranked[0].outcomes[0].speedup][:ENGINES]


def _may_survey(exits: Sequence[Exit], budget: Budget) -> bool:
    """Whether another exit can be surveyed in the first half of the time: the other half belongs to the search."""
    return budget.left - max(found.seconds for found in exits) > budget.minutes * 30


def _surveyed(cfg: RunConfig, folder: Path, open_engine: Any, budget: Budget) -> Exit:
    """Drafts and costs of one exit, from the folder if an earlier run left them there."""
    import torch

    began = budget.spent
    study = f"{_name(cfg)}-{draft_key(cfg)}"
    file = folder / f"drafts-{study}.pt"
    if file.is_file():
        saved = torch.load(file, weights_only=True)
        log, costs = DraftLog(**saved["log"]), Costs(**saved["costs"])
    else:
        with open_engine(cfg) as engine:
            log = roc.record(engine, cfg, max(RECORDED, cfg.workload.batch))
            costs = roc.time_steps(engine, cfg, LONGEST)
        part = file.with_suffix(".part")
        torch.save(
            {"log": {name: getattr(log, name) for name in DraftLog.__annotations__}, "costs": asdict(costs)}, part
        )
        part.replace(file)
    settings = replay.settings_for(log, search.gates(log), range(1, LONGEST + 1))
    outcomes = sorted((replay.replay(log, one, costs) for one in settings), key=lambda outcome: -outcome.speedup)
    return Exit(cfg, study, log, costs, outcomes, budget.spent - began)


def batch_seconds(found: Exit) -> float:
    """Expected time of a batch of trials, plain decoding with them; a repeat of the final race takes less."""
    work = found.cfg.workload
    plain = found.costs.plain * work.output_len * math.ceil(work.num_prompts / work.batch)
    # What is tried lies between plain decoding and the best that is expected.
    return plain * (1 + BATCH / max((1 + found.outcomes[0].speedup) / 2, 1.0))


def _search(engine: Engine, found: Exit, folder: Path, budget: Budget, until: float, progress: Progress) -> int:
    """Trials on one live engine, in batches that take turns; returns how many this exit's study now has.

    until: seconds of the budget that must be left when the final race, too, is over. Another batch starts only if it
    and that race fit, as long as the slowest batch says they take.
    """
    study = search.open_study(folder / "trials.journal", found.study, found.outcomes, found.log, found.cfg.seed)
    prompts = workload.prompts(found.cfg, engine)
    slowest = batch_seconds(found)
    warmup = 1
    while (done := search.completed(study)) < budget.trials and budget.left - (1 + SURE_REPEATS) * slowest > until:
        asked = search.ask(study, found.log, min(BATCH, budget.trials - done))
        before = budget.spent
        plain, *measured = arms.measure(
            engine, found.cfg, prompts, [arms.PLAIN, *asked.values()], repeats=1, warmup=warmup
        )
        slowest, warmup = max(slowest, budget.spent - before), 0
        search.tell(study, {number: arm.median / plain.median for number, arm in zip(asked, measured, strict=True)})
        progress(f"trials {found.name}", search.completed(study), budget.trials)
    progress(f"trials {found.name}", budget.trials, budget.trials)
    return search.completed(study)


def _final(
    engine: Engine, found: Exit, folder: Path, budget: Budget, until: float, progress: Progress
) -> list[Finalist]:
    """The best trials and the cost model's own choice once more: `FINAL_REPEATS`, or as many as end with `until`
    seconds of the budget left, but one at least."""
    study = search.open_study(folder / "trials.journal", found.study, found.outcomes, found.log, found.cfg.seed)
    settings = list(dict.fromkeys([*search.best(study, found.log, FINALISTS), found.outcomes[0].setting]))
    prompts = workload.prompts(found.cfg, engine)
    plain, *measured = arms.measure(
        engine,
        found.cfg,
        prompts,
        [arms.PLAIN, *settings],
        repeats=FINAL_REPEATS,
        another=lambda seconds: budget.left - seconds > until,
        progress=progress,
    )
    return [
        Finalist(tuned.apply(found.cfg, arm.setting), {**arm.to_dict(plain), "plain_tok_s": plain.median})
        for arm in measured
    ]


def _name(cfg: RunConfig) -> str:
    return f"E{cfg.layer}-{calibrations.exit_name(cfg)}"


def _draft_files(cfg: RunConfig) -> list[Path]:
    """The head, and what its draft vocabulary comes from: a list, or the token counts that a fit left."""
    files = [preflight.head_file(cfg, int(cfg.layer or 0))]
    if cfg.vocab != "full":
        files.append(head_folder(cfg) / COUNTS_FILE if cfg.vocab.isdigit() else Path(cfg.vocab))
    return [file for file in files if file is not None and file.is_file()]


def _is_fitted(cfg: RunConfig) -> bool:
    try:
        preflight.head_file(cfg, int(cfg.layer or 0))
    except (ConfigError, SettingsError):
        return False
    return True
