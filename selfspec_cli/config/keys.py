"""What a config measures, as short keys: which points are equal, which share an engine, and whose baseline is whose."""

from __future__ import annotations

import hashlib
import json
from dataclasses import fields, replace
from typing import Any

from selfspec_cli import load_patterns
from selfspec_cli.config import digests as files
from selfspec_cli.config import machine, speculative
from selfspec_cli.config.facts import device_of
from selfspec_cli.config.schema import (
    EARLY_EXIT,
    SPECULATIVE,
    Method,
    RunConfig,
    Runner,
    gate_threshold,
    to_plain,
)
from selfspec_cli.early_exit.gates import GATES
from selfspec_cli.early_exit.settings import AUTO, OPTIONS, SPECULATIVE_LENGTH, DraftSettings, arm_settings
from selfspec_cli.early_exit.view import DraftView

KEY_LENGTH = 12  # hex digits of a run key; 48 bits are far more than any results folder needs
MEASURING = ("seed", "repeats", "warmup", "perplexity_tokens")
STILL_IN_A_KEY: dict[str, dict[str, Any]] = {
    "model": {"pipeline_parallel_size": 1},
    "engine": {"nvtx": False, "enable_chunked_prefill": None, "async_scheduling": None},
    "load": {"e2e_limit": None, "category": "category"},
}
"""Settings that are gone, with the value that they had in every key, so that measured points keep their keys."""
_DEFAULT = RunConfig()
_JSON = json.JSONEncoder(sort_keys=True, separators=(",", ":"))


def baseline_of(cfg: RunConfig) -> RunConfig:
    """The baseline that `cfg` is compared with: same model, workload, engine and seed; nothing of how to draft."""
    drafting = {item.name: getattr(_DEFAULT, item.name) for item in fields(DraftSettings)}
    others = {"method": Method.baseline, "speculative": {}}
    return replace(cfg, runner=cfg.runner if _interpreted(cfg) else _DEFAULT.runner, **drafting | others)


def _interpreted(cfg: RunConfig) -> bool:
    """Whether kernels run in Triton's interpreter, in all engines of a process and many times slower."""
    return cfg.runner is Runner.v2 and device_of(cfg) == "cpu"


def method_settings(cfg: RunConfig) -> dict[str, Any]:
    """Only those method knobs that can change what this run does; a knob that has no effect is not in it."""
    settings: dict[str, Any] = {"method": str(cfg.method)}
    if cfg.method is Method.baseline:
        return settings | ({"runner": str(cfg.runner)} if _interpreted(cfg) else {})
    if cfg.method is Method.vllm:
        named = {name: value for name, value in cfg.speculative.items() if name != SPECULATIVE_LENGTH}  # that is `k`
        settings |= {speculative.KEY: named}
    else:
        settings |= {"layer": files.layer_in_force(cfg)}
    if cfg.method in EARLY_EXIT:
        settings |= DraftView.of(cfg).facts()
        if not cfg.head.path:
            settings["head_dir"] = cfg.head_dir if cfg.head.kind != "lens" else None
    settings |= arm_settings(cfg)
    if "free_drafts" in settings:
        settings["draft_cost"] = None  # nobody can set it any more, but finished rows have it in their keys
    if cfg.method is Method.layer_skip and cfg.gate.kind == AUTO:
        settings["widths"] = "measured"  # each has graphs, captured at the start
    if cfg.method in SPECULATIVE:
        settings["k"] = cfg.k
    return settings | ({"runner": str(cfg.runner)} if cfg.runner is not Runner.auto else {})


def uses(cfg: RunConfig, key: str) -> bool:
    """Whether the method and the gate of `cfg` look at `key` at all; True for what is no setting of either. key: of a
    setting, or of a group of them such as gate."""
    if key.partition(".")[0] == speculative.KEY:
        return cfg.method is Method.vllm
    about = [option.knob for name, option in OPTIONS.items() if name == key or name.startswith(f"{key}.")]
    if not about or not any(knob.methods for knob in about):
        return True
    if not any(cfg.method in knob.methods for knob in about):
        return False
    return key != "threshold" or GATES[cfg.gate.kind].key is not None


def _gate_facts(cfg: RunConfig) -> dict[str, Any]:
    if cfg.method is not Method.layer_skip:
        return {}
    return {"gate": str(cfg.gate.kind), "threshold": gate_threshold(cfg)}


def _load(cfg: RunConfig) -> tuple[str, ...]:
    """The group of settings that only a load test looks at."""
    return ("load",) if cfg.load.kind else ()


def _seed_of_weights(cfg: RunConfig) -> dict[str, int]:
    return {"seed": cfg.seed} if cfg.model.load_format == "dummy" else {}


def engine_key(cfg: RunConfig) -> str:
    """Runs with equal keys can share one live engine; gate, threshold, workload and seed are no part of it."""
    return Keys().engine(cfg)


def run_key(cfg: RunConfig) -> str:
    """Names what `cfg` measures: its settings, what the files that it names hold, the device and the versions."""
    return Keys().run(cfg)


class Keys:
    """The keys of many configs of one command. What they share (a model, a workload, files) is read and hashed once.
    One object is of one moment: a file that changes later has the digest that it had."""

    def __init__(self) -> None:
        self._parts: dict[tuple[str, str], str] = {}
        self._digests: dict[str, dict[str, str]] = {}
        self._versions = {name: one for name, one in machine.versions().items() if name in machine.DECISIVE}
        self._baselines: dict[str, tuple[str, RunConfig]] = {}

    def run(self, cfg: RunConfig) -> str:
        return digest([self.settings(cfg), self.digests(cfg), self.device(cfg), self._versions])

    def device(self, cfg: RunConfig) -> str:
        return machine.device(cfg)

    def baseline(self, cfg: RunConfig) -> tuple[str, RunConfig]:
        """The key and the config of the baseline that a config is compared with."""
        parts = [self._part(cfg, name) for name in ("model", "engine", "workload", *_load(cfg))]
        name = repr([device_of(cfg), _interpreted(cfg), *parts, *(getattr(cfg, name) for name in MEASURING)])
        if name not in self._baselines:
            baseline = baseline_of(cfg)
            self._baselines[name] = (self.run(baseline), baseline)
        return self._baselines[name]

    def settings(self, cfg: RunConfig) -> str:
        """Equal for two configs exactly when no knob that has an effect differs; reads no file and asks no machine."""
        facts = {"engine": self.engine(cfg), "workload": self._part(cfg, "workload")} | _gate_facts(cfg)
        facts |= {name: self._part(cfg, name) for name in _load(cfg)}
        return digest(facts | {name: getattr(cfg, name) for name in MEASURING})

    def arm(self, cfg: RunConfig) -> str:
        """Names the arm that a config measures: what findings about the quality of its output belong to. It is the same
        whatever the workload, and whatever the engine's settings for speed and memory (eager or compiled, batch and
        cache sizes), which change the rounding of numbers and nothing else."""
        digests = {name: digest for name, digest in self.digests(cfg).items() if name != "prompts"}
        facts: dict[str, Any] = {"model": self._part(cfg, "model"), "extra": cfg.engine.extra, "device": device_of(cfg)}
        facts |= {name: value for name, value in method_settings(cfg).items() if name != "head_dir"} | _gate_facts(cfg)
        return digest(["arm", facts | _seed_of_weights(cfg), digests, self.device(cfg), self._versions])

    def engine(self, cfg: RunConfig) -> str:
        facts: dict[str, Any] = {name: self._part(cfg, name) for name in ("model", "engine")}
        return digest(facts | method_settings(cfg) | {"device": device_of(cfg)} | _seed_of_weights(cfg))

    def digests(self, cfg: RunConfig) -> dict[str, str]:
        """What the files that a config names hold, see `digests.digests`."""
        named: list[Any] = [self._part(cfg, "model"), cfg.workload.prompts, _seed_of_weights(cfg)]
        if cfg.method in EARLY_EXIT:
            named += [self._part(cfg, "head"), cfg.head_dir, cfg.vocab, cfg.layer, cfg.draft_weights_path]
        if cfg.method is Method.vllm:
            named.append(cfg.speculative)
        name = repr(named)
        if name not in self._digests:
            self._digests[name] = files.digests(cfg)
        return self._digests[name]

    def _part(self, cfg: RunConfig, name: str) -> str:
        """Digest of a group of settings, worked out once for all configs in which the group is the same."""
        part = getattr(cfg, name)
        text = (name, repr(vars(part)))
        if text not in self._parts:
            facts, without = to_plain(part) | STILL_IN_A_KEY.get(name, {}), []
            if name == "engine":
                without = ["device"]  # it is resolved, see `facts.device_of`
            if name == "load":  # settings that came later, and are not used: the key is what it was before them
                without = [*load_patterns.unused_settings(part), *(["slo"] if part.slo is None else [])]
            self._parts[text] = digest({key: facts[key] for key in facts if key not in without})
        return self._parts[text]


def digest(facts: Any) -> str:
    """Facts that JSON can hold -> a key of KEY_LENGTH hex digits; the order of names does not count."""
    return hashlib.sha256(_JSON.encode(facts).encode()).hexdigest()[:KEY_LENGTH]
