"""Which gate to trust: draft without one, log every statistic and every verdict, then ask what each gate was worth.

The log's requests are dealt into two halves. The calibrated gate is fitted, and every threshold chosen, on one; areas
and expected speedups are of the other.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from selfspec_cli.artifacts import calibrations, tuned
from selfspec_cli.artifacts.calibrations import SavedGate
from selfspec_cli.config import paths
from selfspec_cli.config.model_digest import folder_name
from selfspec_cli.config.schema import ConfigError, GateConfig, Method, RunConfig
from selfspec_cli.early_exit import replay
from selfspec_cli.early_exit import roc as curves
from selfspec_cli.early_exit.calibration import Calibration, fit_calibration
from selfspec_cli.early_exit.cost_model import Costs
from selfspec_cli.early_exit.draft_log import DraftLog
from selfspec_cli.early_exit.gates import GATES
from selfspec_cli.early_exit.replay import Outcome, Setting
from selfspec_cli.engine.live import Engine
from selfspec_cli.progress import Progress, ignore
from selfspec_cli.stages import arms, preflight
from selfspec_cli.texts import prompts as workload

LONGEST = 12  # tokens a draft while recording
PROMPTS = 32  # requests recorded
TIMED_PROMPTS, TIMED_REPEATS = 4, 2
OpenEngine = Any  # Callable[[RunConfig], AbstractContextManager[Engine]]


@dataclass
class Exit:
    """What was found at one exit layer."""

    cfg: RunConfig
    log: DraftLog
    judged: DraftLog  # the half that nothing was chosen on
    costs: Costs
    calibration: Calibration
    tau: float  # where the calibrated gate breaks even
    best: dict[str, Outcome]  # by gate: its best setting, chosen on one half, with what it does on the other
    oracle: Outcome  # what no gate can exceed

    @property
    def choice(self) -> Outcome:
        """The gate that one would choose here."""
        return max(self.best.values(), key=lambda outcome: outcome.speedup)


@dataclass
class RocResult:
    """Rows of the table, the files written, and the best gate over all exits."""

    rows: list[curves.AucRow]
    exits: list[Exit]
    files: dict[str, str] = field(default_factory=dict)

    @property
    def best(self) -> Exit:
        """The exit layer with the greatest expected speedup."""
        return max(self.exits, key=lambda found: found.choice.speedup)

    @property
    def panels(self) -> list[tuple[str, DraftLog, Calibration | None]]:
        """What a figure shows of each exit: its title, the drafts that were judged, its calibration."""
        return [(_title(found), found.judged, found.calibration) for found in self.exits]

    def choice(self) -> dict[str, Any]:
        """What to use, as JSON: the command line's words, and what is expected of them."""
        best = self.best
        outcome = best.choice
        words = tuned.overrides(tuned.apply(best.cfg, outcome.setting))
        fixed = best.best["none"]
        return {"overrides": words, "expected_speedup": outcome.speedup, "best_fixed_k": fixed.setting.k,
                "best_fixed_speedup": fixed.speedup, "oracle_speedup": best.oracle.speedup}  # fmt: skip


def default_layers(cfg: RunConfig) -> list[int]:
    """Exit layers to look at where the user names none: the model's own choice, a quarter and half of the layers.

    Raises:
        ConfigError: nothing here says how many layers the model has.
    """
    layers = preflight.num_layers(cfg, Path(paths.model_path(cfg.model)).expanduser())
    if layers is None:
        raise ConfigError(f"model={cfg.model.name}: how many layers it has is not known here; name some: layer=4,8")
    wanted = [cfg.model.exit_layer, layers // 4, layers // 2]
    return sorted({layer for layer in wanted if layer and layer < layers})


def run(
    cfgs: Sequence[RunConfig],
    *,
    open_engine: OpenEngine,
    longest: int = LONGEST,
    prompts: int = PROMPTS,
    progress: Progress = ignore,
) -> RocResult:
    """Record and judge every exit of `cfgs` (they differ in layer, head or vocabulary), one engine each; write files.

    Args:
        longest: tokens a draft. prompts: requests recorded; half of them choose, half of them judge.

    Raises:
        ConfigError: fewer than two prompts, or nothing was drafted.
    """
    if prompts < 2:
        raise ConfigError(f"prompts={prompts}: must be at least 2, one half chooses and the other judges")
    exits = []
    for number, cfg in enumerate(cfgs):
        plain = replace(cfg, k=longest, gate=GateConfig(), method=Method.layer_skip)
        context: AbstractContextManager[Engine] = open_engine(plain)
        with context as engine:
            log = record(engine, plain, prompts)
            exits.append(judge(replace(plain, layer=engine.layer), log, time_steps(engine, plain, longest)))
        progress("exits", number + 1, len(cfgs))
    rows = [row for found in exits for row in table(found)]
    result = RocResult(rows, exits)
    result.files = write(result, Path(cfgs[0].results_dir) / "roc" / folder_name(cfgs[0]))
    return result


def record(engine: Engine, cfg: RunConfig, prompts: int) -> DraftLog:
    """Draft without a gate and log it, on other prompts than the workload's own, which stay unseen.

    Raises:
        ConfigError: nothing was drafted.
    """
    other = replace(cfg, seed=cfg.seed + 1, workload=replace(cfg.workload, num_prompts=prompts))
    arms.apply(engine, Setting("none", None, int(cfg.k or 0)))
    with engine.recording() as read:
        engine.generate(
            workload.prompts(other, engine),
            cfg.workload.output_len,
            batch=cfg.workload.batch,
            temperature=cfg.workload.temperature,
            seed=other.seed,
        )
        log = read()
    if not len(log.drafted):
        raise ConfigError(f"workload.output_len={cfg.workload.output_len}: nothing was drafted; generate more tokens")
    return log


def time_steps(engine: Engine, cfg: RunConfig, longest: int) -> Costs:
    """What plain, draft and verify steps cost on this engine, at the workload's batch size."""
    few = replace(cfg, workload=replace(cfg.workload, num_prompts=max(TIMED_PROMPTS, cfg.workload.batch)))
    lengths = sorted({1, (longest + 1) // 2, longest})
    settings = [arms.PLAIN, *(Setting("none", None, k) for k in lengths)]
    plain, *drafting = arms.measure(engine, few, workload.prompts(few, engine), settings, repeats=TIMED_REPEATS)
    return arms.costs(plain, drafting)


def judge(cfg: RunConfig, log: DraftLog, costs: Costs) -> Exit:
    """Fit and choose on one half of the requests, evaluate on the other."""
    fit, judged = log.halves()
    feature = max(log.features, key=lambda name: curves.auc(fit, name) or 0.0)
    drafted = fit.was_drafted
    calibration = fit_calibration(feature, fit.feature(feature)[drafted], fit.was_accepted[drafted])
    tau = break_even_tau(fit, costs, calibration)
    lengths = range(1, log.k + 1)
    best: dict[str, Outcome] = {}
    for gate in GATES:
        settings = replay.settings_for(fit, [gate], lengths, calibration)
        if gate == "calibrated":
            settings += [Setting(gate, tau, k) for k in lengths]
        if settings:
            chosen = max((replay.replay(fit, one, costs, calibration) for one in settings), key=lambda o: o.speedup)
            best[gate] = replay.replay(judged, chosen.setting, costs, calibration)
    return Exit(cfg, log, judged, costs, calibration, tau, best, replay.oracle(judged, log.k, costs))


def break_even_tau(log: DraftLog, costs: Costs, calibration: Calibration) -> float:
    """The calibrated acceptance at which one more draft step just pays (`Costs.break_even`).

    A step pays if its own token is taken, and the gate knows only the token before it, so the probability asked of that
    one is larger by the acceptance of one token given all before it. The speedup in the formula is the one that the
    threshold brings about; a few rounds of substitution settle it.
    """
    rates = log.conditional_acceptance()
    following = sum(rates) / len(rates) if rates else 1.0
    speedup, tau = 1.0, 1.0
    for _ in range(8):
        share = costs.break_even(speedup)
        tau = round(min(share / following, 1.0), 4) if following else 1.0
        speedup = max(replay.replay(log, Setting("calibrated", tau, log.k), costs, calibration).speedup, 1.0)
    return tau


def table(found: Exit) -> list[curves.AucRow]:
    """One row a gate."""
    log, fixed = found.judged, found.best["none"].speedup
    return [
        curves.AucRow(
            model=found.cfg.model.name,
            E=int(found.cfg.layer or 0),
            head=calibrations.exit_name(found.cfg),
            k=log.k,
            gate=gate,
            drafted=int(log.drafted.sum()),
            accepted=int(log.accepted.sum()),
            auc=curves.auc(log, gate, found.calibration),
            auc_at_stake=curves.auc(log, gate, found.calibration, at_stake=True),
            threshold=outcome.setting.threshold,
            best_k=outcome.setting.k,
            expected_speedup=outcome.speedup,
            best_fixed_speedup=fixed,
        )
        for gate, outcome in found.best.items()
    ]


def write(result: RocResult, folder: Path) -> dict[str, str]:
    """The table and the choice to `folder`; each calibration beside the model's heads."""
    files = {"table": str(curves.write_table(result.rows, folder / "auc.csv"))}
    for found in result.exits:
        path = calibrations.path_for(found.cfg, int(found.cfg.layer or 0))
        about = {"rounds": len(found.log.drafted), "k": found.log.k, "costs": asdict(found.costs)}
        calibrations.save(path, SavedGate(found.calibration, found.tau, about))
        files[f"calibration {_name(found)}"] = str(path)
    choice = folder / "choice.json"
    exits = [
        {"E": found.cfg.layer, "head": calibrations.exit_name(found.cfg), "costs": asdict(found.costs),
         "oracle_speedup": found.oracle.speedup, "conditional_acceptance": found.log.conditional_acceptance(),
         "calibrated_on": found.calibration.feature, "break_even_tau": found.tau,
         "gates": {name: outcome.to_dict() for name, outcome in found.best.items()}}
        for found in result.exits
    ]  # fmt: skip
    choice.write_text(json.dumps({"choice": result.choice(), "exits": exits}, indent=2) + "\n", encoding="utf-8")
    return files | {"choice": str(choice)}


def _name(found: Exit) -> str:
    return f"E={found.cfg.layer} {calibrations.exit_name(found.cfg)}"


def _title(found: Exit) -> str:
    log = found.judged
    taken = int(log.accepted.sum()) / max(int(log.drafted.sum()), 1)
    return f"{found.cfg.model.name} {_name(found)}, {int(log.drafted.sum()):,} drafted, {taken:.0%} accepted"
