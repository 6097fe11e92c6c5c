"""What a config measures, as short keys: which points are equal, which share an engine, and whose baseline is whose.

A key has digests of the files that a config names: a file that was written anew is another measurement. Digests are
kept by path, modification time and size, so that ten thousand configs that share a model read it once.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from selfspec_cli import load_patterns
from selfspec_cli.config import machine, schema, speculative
from selfspec_cli.config.facts import device_of, exit_layer
from selfspec_cli.config.model_files import LENGTH, full_head, head_folder, model_fingerprint
from selfspec_cli.config.paths import model_path, prompts_file
from selfspec_cli.config.schema import EARLY_EXIT, Method, RunConfig, Runner, to_plain
from selfspec_cli.config.speculative import draft_of
from selfspec_cli.early_exit.errors import SettingsError
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
        settings |= {"layer": layer_in_force(cfg)}
    if cfg.method in EARLY_EXIT:
        settings |= DraftView.of(cfg).facts()
        if not cfg.head.path:
            settings["head_dir"] = cfg.head_dir if cfg.head.kind != "lens" else None
    settings |= arm_settings(cfg)
    if "free_drafts" in settings:
        settings["draft_cost"] = None  # nobody can set it any more, but finished rows have it in their keys
    if cfg.method is Method.layer_skip and cfg.gate.kind == AUTO:
        settings["widths"] = "measured"  # each has graphs, captured at the start
    if cfg.method in schema.SPECULATIVE:
        settings["k"] = cfg.k
    return settings | ({"runner": str(cfg.runner)} if cfg.runner is not Runner.auto else {})


def uses(cfg: RunConfig, key: str) -> bool:
    """Whether method and gate of `cfg` look at `key`, a setting or a group of them; True for settings of neither."""
    if key.partition(".")[0] == speculative.KEY:
        return cfg.method is Method.vllm
    about = [option.knob for name, option in OPTIONS.items() if name == key or name.startswith(f"{key}.")]
    if not about or not any(knob.methods for knob in about):
        return True
    if not any(cfg.method in knob.methods for knob in about):
        return False
    return key != "threshold" or GATES[cfg.gate.kind].key is not None


def _gate_facts(cfg: RunConfig) -> dict[str, Any]:
    is_gated = cfg.method is Method.layer_skip
    return {"gate": str(cfg.gate.kind), "threshold": schema.gate_threshold(cfg)} if is_gated else {}


def _workload(cfg: RunConfig) -> tuple[str, ...]:
    """The groups of settings that say what is asked of an engine."""
    return ("workload", "load") if cfg.load.kind else ("workload",)


def _seed_of_weights(cfg: RunConfig) -> dict[str, int]:
    return {"seed": cfg.seed} if cfg.model.load_format == "dummy" else {}


def engine_key(cfg: RunConfig) -> str:
    """Runs with equal keys can share one live engine; gate, threshold, workload and seed are no part of it."""
    return Keys().engine(cfg)


def run_key(cfg: RunConfig) -> str:
    """Names what `cfg` measures: its settings, what the files that it names hold, the device and the versions."""
    return Keys().run(cfg)


class Keys:
    """The keys of many configs of one command, at one moment: a model, a workload or a file is read and hashed once."""

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
        parts = [self._part(cfg, name) for name in ("model", "engine", *_workload(cfg))]
        name = repr([device_of(cfg), _interpreted(cfg), *parts, *(getattr(cfg, name) for name in MEASURING)])
        if name not in self._baselines:
            baseline = baseline_of(cfg)
            self._baselines[name] = (self.run(baseline), baseline)
        return self._baselines[name]

    def settings(self, cfg: RunConfig) -> str:
        """Equal for two configs exactly when no knob that has an effect differs; reads no file and asks no machine."""
        facts = {"engine": self.engine(cfg)} | {name: self._part(cfg, name) for name in _workload(cfg)}
        return digest(facts | _gate_facts(cfg) | {name: getattr(cfg, name) for name in MEASURING})

    def arm(self, cfg: RunConfig) -> str:
        """Names the arm of a config, to which findings about its output's quality belong. It is the same whatever the
        workload and the engine's settings for speed and memory, which change the rounding of numbers alone."""
        digests = {name: digest for name, digest in self.digests(cfg).items() if name != "prompts"}
        facts: dict[str, Any] = {"model": self._part(cfg, "model"), "extra": cfg.engine.extra, "device": device_of(cfg)}
        facts |= {name: value for name, value in method_settings(cfg).items() if name != "head_dir"} | _gate_facts(cfg)
        return digest(["arm", facts | _seed_of_weights(cfg), digests, self.device(cfg), self._versions])

    def engine(self, cfg: RunConfig) -> str:
        facts: dict[str, Any] = {name: self._part(cfg, name) for name in ("model", "engine")}
        return digest(facts | method_settings(cfg) | {"device": device_of(cfg)} | _seed_of_weights(cfg))

    def digests(self, cfg: RunConfig) -> dict[str, str]:
        named: list[Any] = [self._part(cfg, "model"), cfg.workload.prompts, _seed_of_weights(cfg)]
        if cfg.method in EARLY_EXIT:
            named += [self._part(cfg, "head"), cfg.head_dir, cfg.vocab, cfg.layer, cfg.draft_weights_path]
        if cfg.method is Method.vllm:
            named.append(cfg.speculative)
        name = repr(named)
        if name not in self._digests:
            self._digests[name] = digests(cfg)
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


T = TypeVar("T")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
COUNTS_FILE = "token_counts.safetensors"  # how often each token occurred; a fit writes it next to the heads


def digests(cfg: RunConfig) -> dict[str, str]:
    """Digests of what `cfg` reads, by name: model, tokenizer, prompts, head, vocab, draft_weights, and of
    method vllm the draft. What it does not use, and what is not here (an engine refuses it), is left out."""
    model = _unless_refused(model_fingerprint, cfg)
    found = {"model": model, "tokenizer": _unless_refused(_tokenizer, cfg)}
    if cfg.workload.prompts not in schema.PROMPTS or cfg.workload.prompts == schema.HUMANEVAL:
        found["prompts"] = file_digest(prompts_file(cfg.workload.prompts))
    if cfg.method in EARLY_EXIT and model is not None:
        schema.head_spec(replace(cfg.head, path=None))  # raises SettingsError for a combination that there is not
        layer = layer_in_force(cfg) or 0  # no head is of layer 0: without a layer only a file that is named is found
        head = _unless_refused(lambda cfg: full_head(cfg, layer), cfg)
        found["head"] = None if head is None else file_digest(head)
        if cfg.vocab != "full":  # a list of token ids, or the counts that say which tokens are the most frequent
            listed = head_folder(cfg) / COUNTS_FILE if cfg.vocab.isdigit() else Path(cfg.vocab).expanduser()
            found["vocab"] = file_digest(listed)
    if (draft := draft_of(cfg)) is not None:
        found["draft"] = _unless_refused(model_fingerprint, RunConfig(model=draft))
    if cfg.method == "layer_skip" and cfg.draft_weights_path is not None:
        found["draft_weights"] = file_digest(Path(cfg.draft_weights_path).expanduser())
    return {name: digest for name, digest in found.items() if digest is not None}


def file_digest(path: Path) -> str | None:
    """Digest of a file's whole content; None where it cannot be read."""
    try:
        stat = path.stat()
        return _content_digest(str(path), stat.st_mtime_ns, stat.st_size)
    except OSError:
        return None


def _unless_refused(find: Callable[[RunConfig], T], cfg: RunConfig) -> T | None:
    """What is found; None where the config names something that is not here."""
    try:
        return find(cfg)
    except SettingsError:
        return None


def _tokenizer(cfg: RunConfig) -> str | None:
    folder = Path(cfg.model.tokenizer or model_path(cfg.model)).expanduser()
    found = [digest for name in TOKENIZER_FILES if (digest := file_digest(folder / name)) is not None]
    return hashlib.sha256(" ".join(found).encode()).hexdigest()[:LENGTH] if found else None


def layer_in_force(cfg: RunConfig) -> int | None:
    """The exit layer of a config, half of the layers where none is given; None where nothing here says how many."""
    return _unless_refused(exit_layer, cfg)


@lru_cache(maxsize=4096)
def _content_digest(path: str, mtime_ns: int, size: int) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:LENGTH]
