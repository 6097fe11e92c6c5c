"""Values that cannot mean anything are refused before an engine starts, each with what is allowed instead."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

from selfspec_cli import load_patterns
from selfspec_cli.config import schema, speculative
from selfspec_cli.config.facts import device_of
from selfspec_cli.config.keys import uses
from selfspec_cli.config.schema import ConfigError, GateConfig, LauncherConfig, Method, RunConfig, Runner
from selfspec_cli.early_exit.draft_weights import DRAFT_WEIGHTS, WeightFacts
from selfspec_cli.early_exit.gates import GATES, check_threshold
from selfspec_cli.early_exit.gates.base import THRESHOLD_KEYS, Gate
from selfspec_cli.early_exit.knobs import out_of_range, refusal
from selfspec_cli.early_exit.resolved import checked_table
from selfspec_cli.early_exit.settings import DRAFT_LENGTH, SPECULATIVE_LENGTH
from selfspec_cli.early_exit.view import DraftView

if TYPE_CHECKING:
    from selfspec_cli.config.words import Word


def validate(cfg: RunConfig) -> None:
    """Refuse (ConfigError) what cannot mean anything; stages/preflight.py looks at the model's facts and files."""
    for option, value in out_of_range(cfg):
        raise ConfigError(refusal(option, value))
    for key in ("results_dir", "head_dir"):
        if not getattr(cfg, key).strip():
            raise ConfigError(f"{key}=: it must name a folder, such as {key}={getattr(RunConfig, key)}")
    check_threshold(cfg.gate.kind, schema.gate_threshold(cfg))
    _validate_engine(cfg)
    _validate_method(cfg)
    _validate_view(cfg)
    checked_table(cfg.length_table, cfg.k or DRAFT_LENGTH)
    _validate_load(cfg)
    _validate_launcher(cfg.launcher)
    schema.head_spec(cfg.head)
    if not re.fullmatch(r"full|[1-9]\d*", cfg.vocab) and not Path(cfg.vocab).is_file():
        raise ConfigError(f'vocab={cfg.vocab}: must be "full", a number of tokens, 1 or more, or a file of token ids')


def validate_command(points: Sequence[RunConfig], given: Mapping[str, str]) -> None:
    """Refuse (ConfigError) what one point alone does not show: several values of what a command has one of, and
    settings, other than a default, that no point's method uses (a baseline's count only where nothing else is
    measured). given: what was typed for each key, such as {"threshold": "tau_v=4,5,6"}."""
    launcher = (f"launcher.{item.name}" for item in fields(LauncherConfig))
    for key in ("results_dir", "head_dir", "tracker.kind", *launcher):
        values = dict.fromkeys(str(attrgetter(key)(cfg)) for cfg in points)
        if len(values) > 1:
            raise ConfigError(f"{key}={','.join(values)}: one command takes one value of it")
    drafting = [cfg for cfg in points if cfg.method is not Method.baseline] or points
    for key, typed in given.items():
        if any(uses(cfg, key) for cfg in drafting):
            continue
        place = speculative.KEY if key.startswith(f"{speculative.KEY}.") else key  # a mapping has no attributes
        idle = [cfg for cfg in drafting if attrgetter(place)(cfg) != attrgetter(place)(RunConfig())]
        if idle:
            raise ConfigError(f"{typed} is not used by {_why_unused(key, typed, idle)}")
    # A draft length by its name and by vLLM's is one setting.
    lengths = [text for key, text in given.items() if key.startswith(speculative.KEY) and SPECULATIVE_LENGTH in text]
    if lengths and "k" in given:
        raise ConfigError(f"{lengths[0]} and {given['k']}: both are the draft length; give one of them")


def refuse_names_of_other_gates(points: Sequence[RunConfig], words: Sequence[Word]) -> None:
    """Refuse a threshold by the name that it has for other gates than those of these points: tau_v is varH's alone."""
    typed = next((word.typed for word in reversed(words) if word.key == "threshold"), "")
    for cfg in points:
        rule = GATES[cfg.gate.kind]
        if cfg.method is Method.layer_skip and rule.key is not None and not _takes(rule, typed):
            raise ConfigError(f"{typed} is not used by {_why_unused('threshold', typed, [cfg])}")


def _takes(rule: Gate, typed: str) -> bool:
    """Whether a gate takes a threshold by the name that was typed; True for any other setting."""
    name = typed.partition("=")[0]
    return name not in THRESHOLD_KEYS or name in ("threshold", rule.key)


def _why_unused(key: str, typed: str, idle: Sequence[RunConfig]) -> str:
    """Who does not use `key`, and who would; `idle` are the points that set it for nothing."""
    every = [RunConfig(method=method, gate=GateConfig(kind)) for method, kind in itertools.product(Method, GATES)]
    able = [cfg for cfg in every if uses(cfg, key) and _takes(GATES[cfg.gate.kind], typed)]
    name = typed.partition("=")[0] if key == "threshold" else key
    methods, kinds = (dict.fromkeys(cfg.method for cfg in able), dict.fromkeys(cfg.gate.kind for cfg in able))
    # The point that comes nearest to using it tells the user most.
    cfg = max(idle, key=lambda cfg: (cfg.method in methods, cfg.gate.kind in kinds))
    if cfg.method not in methods:
        return f"method {cfg.method.value!r}; methods that use {name}: {', '.join(methods)}"
    names = (GATES[cfg.gate.kind].key or "threshold", "threshold")
    takes = " or ".join(dict.fromkeys(names)) if uses(cfg, "threshold") else "no threshold"
    return f"gate {cfg.gate.kind!r}, which takes {takes}; gates that use {name}: {', '.join(kinds)}"


def _validate_method(cfg: RunConfig) -> None:
    speculative.check_words(cfg)
    if cfg.method is Method.draft_model and cfg.model.load_format != "dummy":
        raise ConfigError(
            f"method=draft_model with model.load_format={cfg.model.load_format}: it measures what a separate draft of "
            "E layers costs, and such a draft exists with dummy weights only; model.load_format=dummy"
        )
    length, k = cfg.acceptance_length, cfg.k or DRAFT_LENGTH
    if length is not None and not 1 <= length <= k + 1:
        raise ConfigError(f"acceptance_length={length}: tokens a verify step yields, must lie in [1, k + 1 = {k + 1}]")
    if length is not None and device_of(cfg) == "cpu":
        raise ConfigError(
            f"acceptance_length={length}: vLLM's CPU build has no synthetic acceptance; choose a GPU: engine=gpu"
        )
    if cfg.draft_sample_method != RunConfig.draft_sample_method and cfg.method is Method.vllm:
        given = f"draft_sample_method={cfg.draft_sample_method}"
        raise ConfigError(
            f"{given} with method=vllm: what vLLM's own methods take is said in their mapping; use "
            f"{speculative.KEY}.{given}"
        )
    if cfg.runner is Runner.v1 and cfg.method is Method.layer_skip and device_of(cfg) != "cpu":
        raise ConfigError(
            f"runner={cfg.runner} with method={cfg.method}: early exit on CUDA is written for the other "
            "one; use runner=v2, or runner=auto"
        )


def _validate_view(cfg: RunConfig) -> None:
    """What a config alone tells; `spec_config` asks vLLM again once it has read the model's own."""
    if cfg.method is not Method.layer_skip:
        return
    if cfg.draft_weights_path is not None:
        path = Path(cfg.draft_weights_path).expanduser()
        if not path.is_file():
            raise ConfigError(f"draft_weights_path={path}: there is no such file; make it with: selfspec fit-weights")
    if not (DRAFT_WEIGHTS[cfg.draft_weights].drafts or cfg.free_drafts):
        raise ConfigError(f"draft_weights={cfg.draft_weights}: nothing would draft with free_drafts=0; use 1 or more")
    DraftView.of(cfg).check()
    check_weights(cfg, WeightFacts(device_of(cfg), quantization=cfg.model.quantization))


def check_weights(cfg: RunConfig, known: WeightFacts) -> None:
    """Refuse draft weights that cannot be made or run, as far as that is known; raises ConfigError."""
    reason = DRAFT_WEIGHTS[cfg.draft_weights].reason_against(known)
    if reason is not None and cfg.method is Method.layer_skip:
        raise ConfigError(f"draft_weights={cfg.draft_weights}: {reason}; use draft_weights=shared")


def _validate_engine(cfg: RunConfig) -> None:
    if (ranks := cfg.engine.extra.get("pipeline_parallel_size", 1)) != 1:
        raise ConfigError(
            f"engine.extra.pipeline_parallel_size={ranks}: pipeline parallelism is not supported, the draft and the "
            "target share every layer in one worker; use model.tensor_parallel_size"
        )
    if cfg.load.kind:
        return  # clients may be more than an engine runs at once: they wait
    if cfg.workload.batch > cfg.engine.max_num_seqs:
        raise ConfigError(
            f"workload.batch={cfg.workload.batch}: the engine runs engine.max_num_seqs={cfg.engine.max_num_seqs} "
            "requests at once; raise that too"
        )
    if cfg.workload.batch > cfg.workload.num_prompts:
        raise ConfigError(
            f"workload.batch={cfg.workload.batch} with workload.num_prompts={cfg.workload.num_prompts}: fewer requests "
            f"than are to be in flight at once; use workload.num_prompts={cfg.workload.batch} or more"
        )


def _validate_load(cfg: RunConfig) -> None:
    load = cfg.load
    if (reason := load_patterns.problem(load)) is not None:
        raise ConfigError(reason)
    if load.column is not None and Path(cfg.workload.prompts).suffix not in schema.PROMPT_TABLES:
        raise ConfigError(
            f"load.column={load.column} with workload.prompts={cfg.workload.prompts}: only the rows of "
            f"a {', '.join(schema.PROMPT_TABLES)} file have columns"
        )


def _validate_launcher(launcher: LauncherConfig) -> None:
    """A setting that the launcher does not use would be passed over without a word."""
    for name, kinds in schema.LAUNCHERS_WITH.items():
        value = getattr(launcher, name)
        if launcher.kind not in kinds and value != getattr(LauncherConfig, name):
            raise ConfigError(
                f"launcher.{name}={value} with launcher={launcher.kind}: it is not used there; leave it "
                f"out, or choose launcher={'|'.join(kinds)}"
            )
