"""Configs for a command: what a user's words span, checked."""

import re
from collections.abc import Sequence
from pathlib import Path

from selfspec_cli.commands.screen import warn
from selfspec_cli.config.facts import device_of, model_facts
from selfspec_cli.config.schema import ConfigError, HeadConfig, RunConfig, own_drafts
from selfspec_cli.early_exit.draft_weights import DRAFT_WEIGHTS
from selfspec_cli.early_exit.view import DraftView, own_names
from selfspec_cli.stages import preflight

LONG = 8192  # tokens of a prompt, from which on drafts over a part of the context are tried too


def results_dir(overrides: list[str] | None) -> Path:
    """The results folder that a command reads."""
    return Path(one(overrides, None).results_dir if overrides else RunConfig().results_dir)


def several(overrides: list[str] | None, *, sweep: bool = True, config: Path | None = None) -> list[RunConfig]:
    """The points that a user's words span, and warnings for what in ./conf nobody reads."""
    from selfspec_cli.config.choices import unread_files
    from selfspec_cli.config.compose import compose_runs

    runs = compose_runs(None, overrides or [], sweep=sweep, config=config)
    warn(unread_files())
    return runs


def one(overrides: list[str] | None, config: Path | None) -> RunConfig:
    return several(overrides, sweep=False, config=config)[0]


def exits(overrides: list[str], parts: Sequence[int]) -> list[RunConfig]:
    """Configs that name the exits (layer, head, vocabulary, weights) to look at; gate and draft length are not the
    user's to choose here. parts: where no layer is named, these parts of the model's layers are looked at."""
    idle = [word for word in overrides if re.match(r"(gate|k|tau|tau_v|threshold|method)[.=]", word)]
    warn([f"not looked at: {' '.join(idle)}; every gate and draft length is tried here"] if idle else [])
    if not any(word.partition("=")[0] == "layer" for word in overrides):
        from selfspec_cli.config.compose import compose_runs
        from selfspec_cli.stages.exits import candidate_layers

        views = {repr(DraftView.of(cfg).options()): cfg for cfg in compose_runs(None, overrides)}
        plain = [word for word in overrides if word.partition("=")[0] not in own_names()]
        each = [
            [
                *plain,
                f"layer={','.join(map(str, candidate_layers(cfg, parts)))}",
                *(f"{name}={value!r}" for name, value in DraftView.of(cfg).options().items()),
            ]
            for cfg in views.values()
        ]
    else:
        each = [overrides]
    found = runnable([cfg for words in each for cfg in several(words)])
    preflight.check_folder(found[0].head_dir, "head_dir")
    return found


def runnable(cfgs: Sequence[RunConfig]) -> list[RunConfig]:
    """Configs as this machine can run them; says where that is eagerly. Raises ConfigError where one could not run."""
    for cfg in cfgs:
        preflight.check(cfg)
    runs = preflight.for_this_machine(cfgs)
    eager = "no C++ compiler is here (g++ or clang++): this runs eagerly, and is slower"
    warn([eager] if runs != list(cfgs) else [])
    return runs


def copies_of_all_layers(overrides: list[str]) -> list[RunConfig]:
    """An ordinary model's drafts, where the user names no layers, weights or context: copies of all its layers. None on
    a CPU, which gains nothing by copies, for a model that says where it exits, and for one that cannot have any."""
    first = several(overrides)[0]
    named = {word.partition("=")[0] for word in overrides}
    layers = model_facts(first).layers
    if named & {"layer", *own_names()} or own_drafts(first.model)[0] or not layers or device_of(first) == "cpu":
        return []
    found, kinds = [], sorted((kind.bits or 0, name) for name, kind in DRAFT_WEIGHTS.items() if kind.kernels)
    # The one that reads least, and the one that is closest to the model.
    least, closest = (f"draft_weights={name}" for _, name in (kinds[0], kinds[-1]))
    tokens = first.workload.input_len
    # Copies save no keys and values, which at long contexts outweigh them.
    part = [[least, f"draft_context=blocks:{tokens // 8}"]] if tokens >= LONG else []
    for words in ([least], *part, [closest]):
        try:
            found += exits([*overrides, f"layer={layers}", *words], ())
        except ConfigError:
            continue
    return found


def known_heads() -> list[HeadConfig]:
    """The heads of every kind that are worth comparing, and those that ./conf/head names."""
    from selfspec_cli.config.choices import choices
    from selfspec_cli.config.compose import compose_runs

    return [cfg.head for cfg in compose_runs(None, [f"head={','.join(choices('head'))}"])]
