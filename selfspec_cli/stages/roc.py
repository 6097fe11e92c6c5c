"""Which gate to trust: draft without one, log every statistic and every verdict, then ask what each gate was worth.

Thresholds are chosen on one half of the log's requests; areas and expected speedups are of the other.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from selfspec_cli.config import tuned
from selfspec_cli.config.model_files import folder_name
from selfspec_cli.config.schema import ConfigError, RunConfig
from selfspec_cli.early_exit import replay
from selfspec_cli.early_exit.draft_log import DraftLog
from selfspec_cli.early_exit.gates import GATES
from selfspec_cli.early_exit.replay import Outcome
from selfspec_cli.early_exit.settings import AUTO
from selfspec_cli.engine.live import OpenEngine
from selfspec_cli.progress import Progress, ignore
from selfspec_cli.stages import exits
from selfspec_cli.stages.exits import Exit
from selfspec_cli.whole import atomic_write

COMPARED = tuple(gate for gate in GATES if gate != AUTO)  # logged drafts have no times for `auto` to decide by
MOST = 150  # points of a curve
LAYER_PARTS = (4,)  # where the user names no layer, a quarter of them is looked at as well as the default


@dataclass(frozen=True)
class Judgement:
    """What is said of the gates at one exit. exit: its outcomes are the best setting of each gate, chosen on one half
    of the requests, with what it does on the other. judged: that other half. oracle: what no gate can exceed."""

    exit: Exit
    judged: DraftLog
    oracle: Outcome

    @property
    def best(self) -> dict[str, Outcome]:
        """By gate, in the order in which gates are listed."""
        return {outcome.setting.gate: outcome for outcome in self.exit.outcomes}


@dataclass
class RocResult:
    """Rows of the table, the files written, and the best gate over all exits."""

    rows: list[replay.AucRow]
    exits: list[Judgement]
    files: dict[str, str] = field(default_factory=dict)

    @property
    def best(self) -> Judgement:
        """The exit layer with the greatest expected speedup."""
        return max(self.exits, key=lambda found: found.exit.best.speedup)

    @property
    def config(self) -> RunConfig:
        """The best exit with its best gate, threshold and draft length."""
        return tuned.apply(self.best.exit.cfg, self.best.exit.best.setting)

    def choice(self) -> dict[str, Any]:
        """What to use, as JSON: the command line's words, and what is expected of them."""
        best = self.best
        fixed = best.best["none"]
        return {
            "overrides": tuned.overrides(self.config),
            "expected_speedup": best.exit.best.speedup,
            "best_fixed_k": fixed.setting.k,
            "best_fixed_speedup": fixed.speedup,
            "oracle_speedup": best.oracle.speedup,
        }


def facts(cfgs: Sequence[RunConfig], longest: int, prompts: int) -> dict[str, Any]:
    """What `run` would do with these, for --dry-run."""
    plan = exits.distinct(cfgs, longest)
    return {
        "model": plan[0].model.path,
        "layers": [cfg.layer for cfg in plan],
        "exits": [exits.name_of(cfg) for cfg in plan],
        "gates": list(COMPARED),
        "k": f"1 to {longest}",
        "prompts": max(prompts, plan[0].workload.batch),
    }


def run(
    cfgs: Sequence[RunConfig],
    *,
    open_engine: OpenEngine,
    longest: int,
    prompts: int,
    progress: Progress = ignore,
) -> RocResult:
    """Record and judge every exit of `cfgs` (they differ in layer, head or vocabulary), one engine each; write files.
    longest: tokens a draft. prompts: requests recorded. Raises ConfigError: fewer than two, or nothing was drafted."""
    if prompts < 2:
        raise ConfigError(f"prompts={prompts}: must be at least 2, one half chooses and the other judges")
    plan = exits.distinct(cfgs, longest)
    found = []
    for number, cfg in enumerate(plan):
        found.append(exits.survey(cfg, open_engine, prompts, progress))
        progress("exits", number + 1, len(plan))
    judged = [judge(one) for one in exits.level(found)]
    result = RocResult([row for one in judged for row in table(one)], judged)
    result.files = write(result, Path(plan[0].results_dir) / "roc" / folder_name(plan[0]))
    return result


def judge(exit_: Exit) -> Judgement:
    """Choose on one half of the requests, evaluate on the other."""
    costs, (fit, judged) = exit_.costs, exit_.log.halves()
    lengths = range(1, exit_.log.k + 1)
    best = []
    for gate in COMPARED:
        settings = replay.settings_for(fit, [gate], lengths)
        if settings:
            chosen = max((replay.replay(fit, setting, costs) for setting in settings), key=lambda o: o.speedup)
            best.append(replay.replay(judged, chosen.setting, costs))
    return Judgement(replace(exit_, outcomes=tuple(best)), judged, replay.oracle(judged, exit_.log.k, costs))


def table(judgement: Judgement) -> list[replay.AucRow]:
    """One row a gate."""
    log, fixed = judgement.judged, judgement.best["none"].speedup
    return [
        replay.AucRow(
            model=judgement.exit.cfg.model.name,
            E=int(judgement.exit.cfg.layer or 0),
            head=exits.exit_name(judgement.exit.cfg),
            k=log.k,
            gate=gate,
            drafted=int(log.drafted.sum()),
            accepted=int(log.accepted.sum()),
            auc=replay.auc(log, gate),
            auc_at_stake=replay.auc(log, gate, at_stake=True),
            threshold=outcome.setting.threshold,
            best_k=outcome.setting.k,
            expected_speedup=outcome.speedup,
            best_fixed_speedup=fixed,
        )
        for gate, outcome in judgement.best.items()
    ]


def write(result: RocResult, folder: Path) -> dict[str, str]:
    """The table and the curves to `folder`."""
    panels = folder / "curves.json"
    atomic_write(panels, json.dumps({"panels": drawn(result.exits)}) + "\n")
    return {"table": str(replay.write_table(result.rows, folder / "auc.csv")), "curves": str(panels)}


ASKED = {
    False: "every drafted token, as the gate meets it in the draft",
    True: "tokens whose predecessors were right, each by itself",
}


def drawn(judgements: Sequence[Judgement]) -> list[dict[str, Any]]:
    """The ROC curves of every gate, for a figure: of each exit those of all drafted tokens, and of those at stake."""
    panels = []
    for judgement in judgements:
        log, exit_ = judgement.judged, judgement.exit
        drafted = int(log.drafted.sum())
        taken = int(log.accepted.sum()) / max(drafted, 1)
        title = f"{exit_.cfg.model.name} {exits.name_of(exit_.cfg)}, {drafted:,} drafted, {taken:.0%} accepted"
        for at_stake, asked in ASKED.items():
            areas = {name: replay.auc(log, name, at_stake=at_stake) for name in GATES if name in log.features}
            lines = []
            for area, name in sorted(((area, name) for name, area in areas.items() if area is not None), reverse=True):
                false, true = replay.curve(log, name, at_stake=at_stake)
                lines.append({"gate": name, "auc": area, "false": _thinned(false), "true": _thinned(true)})
            panels.append({"title": title, "of": asked, "curves": lines})
    return panels


def _thinned(values: Sequence[float]) -> list[float]:
    """At most MOST points of a curve, both ends included."""
    step = max(1, (len(values) - 1) / (MOST - 1))
    places = [round(step * number) for number in range(min(MOST, len(values)))]
    return [round(values[place], 5) for place in places]
