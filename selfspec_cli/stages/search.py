"""Optuna's part in tuning: a study over gate, threshold and draft length of one exit, kept in a journal file.

A threshold is searched as the share of logged drafts that it lets pass, which means the same for every gate.
"""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna
import torch
from optuna.storages.journal import JournalFileBackend, JournalStorage
from optuna.trial import TrialState

from selfspec_cli.early_exit.draft_log import DraftLog
from selfspec_cli.early_exit.gates import GATES
from selfspec_cli.early_exit.replay import Outcome, Setting

WORTHWHILE = 0.97  # gates whose expected speedup is at least so much of the best one's are searched on
FIRST = 6  # trials that the cost model names


def gates(features: Sequence[str]) -> tuple[str, ...]:
    """Gates that tuning considers: none, and each of the statistics that are logged."""
    return ("none", *features)


def open_study(journal: Path, name: str, outcomes: Sequence[Outcome], log: DraftLog, seed: int) -> Any:
    """The study called `name`, new or as an earlier run left it. outcomes: the cost model's, best first.

    Only gates that the cost model finds worth it are in its space; a new study begins with each one's best setting.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        storage = JournalStorage(JournalFileBackend(str(journal)))
        sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=FIRST, constant_liar=True)
        study = optuna.create_study(
            storage=storage, study_name=name, sampler=sampler, direction="maximize", load_if_exists=True
        )
    if "gates" not in study.user_attrs:
        study.set_user_attr("gates", worthwhile(outcomes))
        study.set_user_attr("longest", log.k)
        for setting in first_settings(outcomes):
            study.enqueue_trial(_parameters(setting, log))
    return study


def worthwhile(outcomes: Sequence[Outcome]) -> list[str]:
    """Gates near the best, in the order of their best outcome."""
    enough = WORTHWHILE * outcomes[0].speedup
    return list(dict.fromkeys(outcome.setting.gate for outcome in outcomes if outcome.speedup >= enough))


def first_settings(outcomes: Sequence[Outcome]) -> list[Setting]:
    """The best setting of each worthwhile gate, then the best of what is left."""
    best = {outcome.setting.gate: outcome.setting for outcome in reversed(outcomes)}
    first = [best[gate] for gate in worthwhile(outcomes)]
    rest = [outcome.setting for outcome in outcomes if outcome.setting not in first]
    return [*first, *rest][:FIRST]


def ask(study: Any, log: DraftLog, count: int) -> dict[int, Setting]:
    """The next settings to measure, by trial number."""
    asked = {}
    for _ in range(count):
        trial = study.ask()
        gate = trial.suggest_categorical("gate", study.user_attrs["gates"])
        k = trial.suggest_int("k", 1, study.user_attrs["longest"])
        passing = trial.suggest_float("passing", 0.02, 0.98)
        asked[trial.number] = _setting(gate, k, passing, log)
    return asked


def tell(study: Any, speedups: Mapping[int, float]) -> None:
    """What was measured, by trial number."""
    for number, speedup in speedups.items():
        study.tell(number, speedup)


def completed(study: Any) -> int:
    """Trials that were measured."""
    return len(study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)))


def best(study: Any, log: DraftLog, count: int) -> list[Setting]:
    """The settings of the fastest trials, each once."""
    trials = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    ranked = sorted(trials, key=lambda trial: -trial.value)
    settings = [_setting(trial.params["gate"], trial.params["k"], trial.params["passing"], log) for trial in ranked]
    return list(dict.fromkeys(settings))[:count]


def _setting(gate: str, k: int, passing: float, log: DraftLog) -> Setting:
    """A share of drafts that pass -> the threshold that lets it pass, to three digits."""
    if gate == "none":
        return Setting("none", None, k)
    at_least = GATES[gate].direction == "at_least"
    threshold = float(torch.quantile(_values(gate, log), 1 - passing if at_least else passing))
    return Setting(gate, min(max(float(f"{threshold:.3g}"), GATES[gate].low), GATES[gate].high), k)


def _parameters(setting: Setting, log: DraftLog) -> dict[str, Any]:
    passing = 0.5
    if setting.threshold is not None:
        values = _values(setting.gate, log)
        at_least = GATES[setting.gate].direction == "at_least"
        passes = values >= setting.threshold if at_least else values <= setting.threshold
        passing = min(max(float(passes.float().mean()), 0.02), 0.98)
    return {"gate": setting.gate, "k": setting.k, "passing": passing}


def _values(gate: str, log: DraftLog) -> torch.Tensor:
    values = log.feature(gate)
    return values[log.was_drafted & torch.isfinite(values)][:1_000_000]
