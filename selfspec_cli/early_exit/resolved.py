"""A speculative_config as users write it -> the draft settings that an engine works with; and what one request may ask,
in vLLM's `extra_args` (over HTTP: `vllm_xargs`). Free of torch."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from numbers import Integral
from pathlib import Path
from typing import Any, get_args

from selfspec_cli.early_exit import knobs
from selfspec_cli.early_exit.contexts import SETTING, Context, as_setting, context_of
from selfspec_cli.early_exit.draft_weights import DRAFT_WEIGHTS
from selfspec_cli.early_exit.errors import SettingsError, closest
from selfspec_cli.early_exit.gates import GATES, check_threshold, number
from selfspec_cli.early_exit.gates.base import THRESHOLD_KEYS
from selfspec_cli.early_exit.head_metadata import HeadMetadata, head_file, read_metadata, spec_of
from selfspec_cli.early_exit.heads import HEADS
from selfspec_cli.early_exit.knobs import Option
from selfspec_cli.early_exit.length_table import KEY, VLLM_KEY, Cell, LengthTable
from selfspec_cli.early_exit.settings import (
    AUTO,
    DRAFT_LENGTH,
    DRAFTING,
    METHOD_ALIASES,
    OPTIONS,
    USER_KEYS,
    DraftSettings,
    GateConfig,
    HeadConfig,
    gate_threshold,
)
from selfspec_cli.early_exit.view import DraftView, as_text, canonical, drafting_layers, skipped_layers

PLACES_AT_HAND = 136
"""Tokens of a verify pass up to which a place more costs hardly anything: 17 places of 8 requests, the most that was
measured ("Do free drafts pay in an engine?" in results/LOG.md)."""


class ResolvedSettings(DraftSettings):
    """Draft settings as an engine works with them: E, k and the threshold are filled in.
    Plain values only, so that they travel as JSON in vLLM's additional_config."""

    layer: int
    k: int

    @property
    def verify(self) -> bool:
        """Whether drafts are verified; False is method "skip"."""
        return self.method == "layer_skip"

    @property
    def view(self) -> DraftView:
        """Which part of the model drafts."""
        return DraftView.of(self)

    @property
    def layers_draft(self) -> bool:
        """Whether layers of the model draft; otherwise prompt lookup alone does."""
        return DRAFT_WEIGHTS[self.draft_weights].drafts

    @property
    def context(self) -> Context:
        return context_of(self)

    @property
    def skipped(self) -> tuple[int, ...]:
        return skipped_layers(self.skip_layers)

    @property
    def drafting_layers(self) -> tuple[int, ...]:
        return drafting_layers(self.layer, self.skipped)

    @property
    def width(self) -> int:
        """Most tokens of any draft: the draft slots of a verify pass."""
        return max(self.k, self.free_drafts)

    @property
    def free_requests(self) -> int:
        """Running requests up to which a verify pass has room for free drafts, whatever a table says; or 0."""
        return PLACES_AT_HAND // (self.free_drafts + 1) if self.free_drafts else 0

    @property
    def table(self) -> LengthTable:
        """The draft length by load; k for every load where the user wrote no table."""
        return LengthTable.fixed(self.k) if self.length_table is None else LengthTable.parse(self.length_table, self.k)

    def assumed_draft_step(self, num_layers: int) -> float:
        """Cost of a draft step in plain decoding steps until times are measured: by the bytes that it reads of a model
        of `num_layers` layers with 16 bits a weight. The head counts as a layer."""
        bits = DRAFT_WEIGHTS[self.draft_weights].bits
        bits = 16.0 if bits is None else bits
        return (len(self.drafting_layers) + 1) / num_layers * bits / 16

    @property
    def measures(self) -> bool:
        """Whether measured times decide something: the width of a step, or when free drafts end it."""
        return self.chooses_width or self.free_drafts > 0

    @property
    def chooses_width(self) -> bool:
        """Whether measured times and acceptance choose the width of each step, up to k."""
        return self.gate.kind == AUTO

    @classmethod
    def from_user(
        cls, spec: Mapping[str, Any], num_layers: int, *, passthrough: Collection[str] = ()
    ) -> ResolvedSettings:
        """Settings from a speculative_config as users write it, for a model of `num_layers` layers.
        A key whose value is None counts as not given. Keys in `passthrough` (vLLM's own) are left alone, except its
        list of lengths by batch size, which becomes the table of lengths. Raises SettingsError for an unknown key, a
        wrong type, or a value out of range."""
        if spec.get("method") in METHOD_ALIASES:
            spec = {**spec, "method": METHOD_ALIASES[spec["method"]]}
        for key in spec:
            if key not in USER_KEYS and key not in passthrough:
                raise SettingsError(closest(key, USER_KEYS, "speculative_config key"))
        settings = cls()
        for option in OPTIONS.values():
            found = _found(spec, option.knob.spec_keys)
            if found is not None:
                knobs.write(settings, option.key, _checked(option, *found))
        settings._resolve(spec, num_layers)
        return settings

    def to_dict(self) -> dict[str, Any]:
        document = asdict(self)
        document["head"] = {"kind": self.head.kind, "path": self.head.path}  # its file says the rest
        return document

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ResolvedSettings:
        """The inverse of `to_dict`, whose values were checked when they were read from a user."""
        return cls(**{**data, "gate": GateConfig(**data["gate"]), "head": HeadConfig(**data["head"])})

    def _check_head(self) -> None:
        """Raise SettingsError for a fitted kind of head without a file, or with a file that holds another kind."""
        kind, path = self.head.kind, self.head.path
        if path is None and HEADS[kind].targets:
            raise SettingsError(
                f"head = {kind!r} is fitted to a model, and no head_path names its file; make it with `selfspec fit "
                f"model=MODEL head={kind} layer={self.layer}` and give head_path = the file that it writes"
            )
        held = None if path is None or kind == type(self.head).kind else spec_of(path, self.layer)
        if held is not None and held.kind != kind:
            raise SettingsError(f"head = {kind!r} and head_path = {path!r}, which holds {held.name}: leave head out")

    def _resolve(self, spec: Mapping[str, Any], num_layers: int) -> None:
        """Fill in what was left open; raise SettingsError for settings that do not go together."""
        if self.method == "skip":
            for option in OPTIONS.values():
                value = knobs.read(self, option.key)
                if option.knob.methods == DRAFTING and value != option.default:
                    raise SettingsError(
                        f"{option.knob.spec_keys[0]} {value!r} is not used by method 'skip', which drafts nothing; "
                        f"allowed: {'none' if option.default is None else option.default}"
                    )
        canonical(self)
        view = replace(self.view, layer=None)
        view.check()
        self.layer = _exit_layer(spec.get("layer_skip"), num_layers, view)
        self.view.check()
        self._check_head()
        if not (self.layers_draft or self.free_drafts):
            raise SettingsError(
                f"draft_weights = {self.draft_weights!r} and free_drafts = 0: nothing would draft; allowed: "
                "free_drafts of 1 or more, or other draft_weights"
            )
        self.k = DRAFT_LENGTH if self.k is None else self.k
        self.threshold = _threshold(spec, self.gate.kind)
        if spec.get(VLLM_KEY) is not None:
            if self.length_table is not None:
                raise SettingsError(f"{KEY} and {VLLM_KEY} mean the same setting; give one")
            self.length_table = str(LengthTable.from_vllm(spec[VLLM_KEY], self.k))
        self.length_table = checked_table(self.length_table, self.k)


def _vocabulary(value: object, key: str) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return str(value)
    if isinstance(value, str) and value and not (value.isdigit() and int(value) < 1):
        return value
    raise SettingsError(f"{key} = {value!r}: must be 'full', a number of tokens, 1 or more, or a file of token ids")


def checked_table(text: str | None, k: int) -> str | None:
    """A table of lengths as it is kept, for an engine that drafts at most `k` tokens. Raises SettingsError."""
    return None if text is None else str(LengthTable.parse(text, k))


def _found(spec: Mapping[str, Any], keys: tuple[str, ...]) -> tuple[str, Any] | None:
    """The one of `keys` that is given, with its value."""
    given = [key for key in keys if spec.get(key) is not None]
    if len({str(spec[key]) for key in given}) > 1:
        values = " and ".join(f"{key} = {spec[key]!r}" for key in given)
        raise SettingsError(f"{values} mean the same setting; give one")
    return (given[0], spec[given[0]]) if given else None


def _checked(option: Option, key: str, value: Any) -> Any:
    """`value` in the type of its setting, which the user called `key`. Raises SettingsError."""
    about, types = option.knob, {option.type, *get_args(option.type)}
    if option.key == "layer":  # checked where the model is known
        return value
    if option.key == SETTING:
        return as_setting(key, value)
    if option.key == "vocab":
        return _vocabulary(value, key)
    if option.key == "skip_layers":
        return as_text(skipped_layers(value))
    words = about.words()
    if words and value not in words:
        raise SettingsError(about.wrong_word(value, key))
    if int in types:
        _require_integer(key, value)
    if float in types:
        value = number(value, key)
    if bool in types and not isinstance(value, bool):
        raise SettingsError(f"{key} = {value!r} must be true or false")
    if str in types and not (isinstance(value, str) and value):
        raise SettingsError(f"{key} = {value!r} must be text, a path or words")
    if option.is_number and option.key != "threshold" and not about.admits(value):
        because = f", because {about.because}" if about.because else ""
        raise SettingsError(f"{key} = {value!r} is out of range; allowed: {about.allowed()}{because}")
    return value


def _require_integer(key: str, value: object, hint: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise SettingsError(f"{key} = {value!r} must be an integer, not {type(value).__name__}{hint}")


def _exit_layer(value: Any, num_layers: int, view: DraftView) -> int:
    if num_layers < 2:
        raise SettingsError(f"a model of {num_layers} layer(s) has no exit layer; at least 2 layers are needed")
    if value is None:
        return view.default_layer(num_layers)
    deepest = view.deepest_layer(num_layers)
    inside = f"allowed: 1 to {deepest} (the model has {num_layers} layers)"
    _require_integer("layer_skip", value, f"; {inside}")
    if not 1 <= int(value) <= deepest:
        raise SettingsError(f"layer_skip = {value!r} is out of range; {inside}")
    return int(value)


def _threshold(spec: Mapping[str, Any], gate: str) -> float | None:
    """The threshold in force for `gate`, from whichever key of a speculative_config gives it."""
    rule = GATES[gate]
    key = next((key for key in THRESHOLD_KEYS if spec.get(key) is not None), None)
    if key is None:
        return rule.default
    if rule.key is not None and key not in (rule.key, "threshold"):
        users = [name for name, other in GATES.items() if other.key == key]
        allowed = " or ".join(dict.fromkeys((rule.key, "threshold")))
        raise SettingsError(
            f"{key} = {spec[key]!r} is not used by gate {gate!r}, which takes {allowed}; "
            f"gates that use {key}: {', '.join(users)}"
        )
    return check_threshold(gate, spec[key], key)


def warnings_for(settings: DraftSettings, vocab_size: int | None = None) -> list[str]:
    """A warning of a threshold that can never close, or (but for rounding) never open, its gate.
    vocab_size: size of the draft vocabulary, which bounds entropy and varentropy; unknown is taken as very large."""
    rule, threshold = GATES[settings.gate.kind], gate_threshold(settings)
    if rule.key is None or threshold is None:
        return []
    least, greatest = rule.statistic_range(vocab_size)
    start = f"gate {rule.name!r} with {rule.key} = {threshold:g}"
    end = f"{rule.meaning} lies between {least:.3g} and {greatest:.3g}"
    if rule.direction == "at_most":
        threshold, least, greatest = -threshold, -greatest, -least
    if threshold <= least:
        return [f"{start} never closes ({end}): it is the same as gate 'none'"]
    if threshold > greatest:
        return [f"{start} never opens ({end}): every draft ends after its first step"]
    if threshold == greatest:
        return [f"{start} never opens but for ties by rounding ({end}): drafts end after their first step"]
    return []


FLAT_PERPLEXITY, FLAT_VOCABULARY = 3850, 4096  # of a least-squares head without a scale; the lens has 8 to 20


def metadata_of(file: Path) -> HeadMetadata:
    """The metadata of a head, from a .safetensors file's header, or from a .pt file, for which torch is imported.
    Raises HeadError for a file that is missing, damaged or foreign."""
    if file.suffix == ".pt":
        from selfspec_cli.early_exit.artifact import load_head

        return load_head(file).metadata
    return read_metadata(file)


def flat_head_warning(gate: str, path: str | os.PathLike[str] | None, layer: int | None = None) -> str | None:
    """A warning of a gate that meets a head whose outputs are no distribution; None where that cannot be said either.
    Such a head has rows of its own and was solved by least squares, without a scale in its file (`fitting.py`). path: a
    head file, or a directory of heads for `layer`; None is the lens."""
    if path is None or GATES[gate].key is None:
        return None
    try:
        file = head_file(path, layer)
        metadata = metadata_of(file)
    except SettingsError:
        return None  # whoever loads the head says what is wrong
    if not HEADS[metadata.kind].rows or metadata.fit.get("scale") is not None:
        return None
    return (
        f"gate {gate!r} reads a distribution, and the outputs of head {file} are none: a least-squares head without a "
        f"scale had a perplexity of {FLAT_PERPLEXITY:,} over {FLAT_VOCABULARY:,} tokens (results/LOG.md, "
        "results/published/quality.jsonl.xz); fit it again with `selfspec fit-lsq`, which fits a scale"
    )


# ---- one request's own -----------------------------------------------------------------------------------------------

PREFIX = "selfspec_"
K, THRESHOLD = REQUEST_KEYS = (f"{PREFIX}k", f"{PREFIX}threshold")


@dataclass(frozen=True)
class RequestSettings:
    """A request's own. k: most tokens a round, 0 for no drafts; threshold: of the engine's gate. None: the engine's."""

    k: int | None = None
    threshold: float | None = None

    @classmethod
    def of(cls, extra_args: Mapping[str, Any] | None, settings: ResolvedSettings) -> RequestSettings:
        """A request's own settings. Keys that do not begin with `selfspec_` are somebody else's.
        Raises SettingsError for an unknown key, a wrong type, or a value out of range."""
        given = {key: value for key, value in (extra_args or {}).items() if str(key).startswith(PREFIX)}
        if not given:
            return NOTHING
        for key in given:
            if key not in REQUEST_KEYS:
                raise SettingsError(closest(key, REQUEST_KEYS, "request setting"))
        k, threshold = given.get(K), given.get(THRESHOLD)
        whole = isinstance(k, Integral) and not isinstance(k, bool)
        if k is not None and not (whole and 0 <= int(k) <= settings.k):
            raise SettingsError(
                f"{K} = {k!r} is out of range; allowed: whole numbers from 0 (no drafts) to the "
                f"engine's k, {settings.k}"
            )
        if threshold is not None:
            threshold = check_threshold(settings.gate.kind, threshold, THRESHOLD)
        return cls(None if k is None else int(k), threshold)


NOTHING = RequestSettings()


def switched_off_by(cell: Cell, own: RequestSettings) -> str | None:
    """Which of `counters.REASONS` keeps a request from being drafted for: the table's entry before its own wish."""
    if not cell.k:
        return "context" if cell.context else "load"
    return "request" if own.k == 0 else None
