"""What a user types, KEY=VALUE, read by the grammar of Hydra's own parser: keys are checked, lists become values.

Text needs no quotes, whatever letters and spaces it has; a comma inside it is written \\, or the text is quoted.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Iterable
from dataclasses import dataclass, is_dataclass, replace
from fractions import Fraction
from functools import cache
from typing import Any, get_type_hints

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, IntervalSweep, Override, Quote, QuotedString, RangeSweep
from hydra.errors import HydraException

from selfspec_cli.config.choices import EXPERIMENT, TUNED
from selfspec_cli.config.schema import GROUPS, ConfigError, RunConfig
from selfspec_cli.config.speculative import KEY as SPECULATIVE
from selfspec_cli.early_exit.contexts import FULL, own_keys
from selfspec_cli.early_exit.contexts import SETTING as CONTEXT
from selfspec_cli.early_exit.errors import closest
from selfspec_cli.early_exit.gates.base import THRESHOLD_KEYS
from selfspec_cli.early_exit.knobs import Option, options
from selfspec_cli.early_exit.rule import WIDTHS
from selfspec_cli.early_exit.view import own_names

_FUNCTION = re.compile(r"(int|str|bool|float|choice|range|interval|tag|sort|shuffle|glob)\(.*\)\s*")
_SPECIAL = re.compile(r"\\([\\()\[\]{}:=, \t])")
_PIECES = re.compile(r"""\\.|'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|\$\{|.""", re.S)
"""Of a value: an escaped sign, quoted text, the beginning of an interpolation, or any other sign."""

_RANGES = re.compile(r"\s*\d+(-\d+)?(\s*,\s*\d+(-\d+)?)*\s*")


@dataclass(frozen=True)
class Word:
    """One override: what was typed, its key, its values in Python, and each as Hydra reads it."""

    typed: str
    key: str
    values: tuple[Any, ...]
    texts: tuple[str, ...]
    is_sweep: bool


def parse(words: Iterable[str]) -> list[Word]:
    """Read overrides.

    Raises:
        ConfigError: one that cannot be read, a key that there is not, a word that is no choice of its setting.
    """
    return [_by_its_own_name(_parse(text)) for text in _written_out(list(words))]


_OTHER_NAMES = dict.fromkeys(THRESHOLD_KEYS[1:], THRESHOLD_KEYS[0]) | {"workload.path": "workload.prompts"}
"""Other names of a setting whose values are the same."""


def other_names() -> dict[str, str]:
    """Every other name of a setting, and the setting."""
    return _OTHER_NAMES | dict.fromkeys(own_keys(), CONTEXT)


INSTEAD = {
    "engine.async_scheduling": "engine.extra.async_scheduling",
    "engine.enable_chunked_prefill": "engine.extra.enable_chunked_prefill",
    "head.bias": "head=translator_bias",
    "head.rank": "head=translator_r15",
    "head.target": "head=lsq_argmax",
    "launcher.address": "the variable RAY_ADDRESS",
    "launcher.minutes": "the variable SBATCH_TIMELIMIT",
    "launcher.partition": "the variable SBATCH_PARTITION",
    "load.frontend": "the variable VLLM_USE_RUST_FRONTEND",
    "model.draft_length": "k",
    "model.exit_layer": "layer",
    "tracker.entity": "the variable WANDB_ENTITY",
    "tracker.project": "the variable WANDB_PROJECT",
}
"""What says what a setting said that is gone, where the nearest key is another thing."""


def _by_its_own_name(word: Word) -> Word:
    """A word of a setting by its own name."""
    if word.key in _OTHER_NAMES:
        return replace(word, key=_OTHER_NAMES[word.key])
    if (kind := own_keys().get(word.key)) is None:
        return word
    values = tuple(FULL if value is None else f"{kind}:{value}" for value in word.values)
    return replace(word, key=CONTEXT, values=values, texts=values)


ONE_LINE = "method=selfspec"
_CHOSEN = ("method=layer_skip", "gate=auto", f"k={WIDTHS[0]}", f"free_drafts={WIDTHS[0]}")
_COPIES = "draft_weights=int4"


def _written_out(words: list[str]) -> list[str]:
    """Write `method=selfspec` out as settings, without those that the other words name."""
    if ONE_LINE not in words:
        return words
    named = {word.partition("=")[0].partition(".")[0] for word in words if word != ONE_LINE}
    copies = [] if named & {"layer", "head", "vocab", *own_names()} else [_COPIES]
    chosen = [word for word in (*_CHOSEN, *copies) if word.partition("=")[0] not in named]
    return [*chosen, *(word for word in words if word != ONE_LINE)]


@cache
def type_of(key: str) -> Any:
    """The type of the schema's field `key`, which may be a group; Any below a free-form dict.

    Raises:
        ConfigError: there is no such key, naming the nearest.
    """
    kind: Any = RunConfig
    parts = key.split(".")
    for depth, part in enumerate(parts):
        if getattr(kind, "__origin__", None) is dict:
            return Any
        if not is_dataclass(kind):
            raise ConfigError(f"{key}: {'.'.join(parts[:depth])} has no keys below it")
        hints = get_type_hints(kind)
        hints = {name: hint for name, hint in hints.items() if is_dataclass(hint) or _is_setting(kind, name)}
        if part not in hints and key in INSTEAD:
            raise ConfigError(f"key {key!r} is not known; use {INSTEAD[key]}")
        if part not in hints:
            allowed = [".".join([*parts[:depth], name]) for name in hints]
            top = [EXPERIMENT, TUNED, *other_names()] if depth == 0 else []
            raise ConfigError(closest(key, allowed + top, "key", meant=_home_of(parts[-1])))
        kind = hints[part]
    return kind


def _is_setting(group: Any, name: str) -> bool:
    return any(option.key == name for option in options(group).values())


def option_of(key: str) -> Option | None:
    """The setting of a key; None for a group, and below a free-form dict."""
    return options(RunConfig).get(key)


def is_free_form(key: str) -> bool:
    """Whether `key` is a dict of any keys, or one of its keys."""
    kind = type_of(key)
    return getattr(kind, "__origin__", None) is dict or (kind is Any and option_of(key) is None)


def _parse(text: str) -> Word:
    if documents := _documents(text):
        return Word(text, SPECULATIVE, documents, tuple(map(json.dumps, documents)), len(documents) > 1)
    try:
        override = _parser().parse_override(_quoted(text))
    except HydraException as error:
        raise ConfigError(_unreadable(text, error)) from error
    if override.is_delete() or override.package is not None or override.is_hydra_override():
        raise ConfigError(f"{text}: only key=value overrides can be used here")
    _check_sweep(override, text)
    sweep = override.is_sweep_override()
    key, value = override.key_or_group, override.value()
    if isinstance(value, RangeSweep):
        values: tuple[Any, ...] = _numbers(value)
        texts = [*map(str, values)]
    else:
        found = [*override.sweep_iterator()] if sweep else [value]
        values = tuple(map(_plain, found))
        texts = [*override.sweep_string_iterator()] if sweep else [override.get_value_element_as_str()]
        # Of an interpolation without quotes Hydra would escape the braces.
        refers = [isinstance(one, str) and "${" in one for one in values]
        texts = [_in_quotes(one) if it else text for one, text, it in zip(values, texts, refers, strict=True)]
    if key not in (EXPERIMENT, TUNED, *other_names()):
        type_of(key)
        option = option_of(key)
        for value in values:
            if option and (words := option.knob.words()) and str(value) not in words and value is not None:
                raise ConfigError(option.knob.wrong_word(value, key))
    return Word(text, key, values, tuple(texts), sweep)


def _unreadable(text: str, error: HydraException) -> str:
    """Why an override cannot be read, and what one looks like."""
    if "=" in text and not text.startswith((f"{SPECULATIVE}=", "=")):
        lines = [line for line in str(error).splitlines() if line and not line.startswith(("Error parsing", "See "))]
        return f"cannot read the override {text!r}: {(lines or ['it has no value'])[0]}"
    form = """speculative='{"method": "ngram"}'""" if text.startswith(f"{SPECULATIVE}=") else "tau_v=4,5,6"
    return f"cannot read the override {text!r}: write key=value, for example {form}"


def _numbers(sweep: RangeSweep) -> tuple[int | float, ...]:
    """The numbers of a range as they are written, its stop left out: sums of floats would reach 0.4 from below."""
    whole = all(isinstance(value, int) for value in (sweep.start, sweep.stop, sweep.step))
    start, stop, step = (
        Fraction(value if isinstance(value, int) else f"{value:.12g}")
        for value in (sweep.start or 0, sweep.stop or 0, sweep.step)
    )
    exact = [start + place * step for place in range(math.ceil((stop - start) / step))]
    if sweep.shuffle:
        random.shuffle(exact)
    return tuple(int(value) if whole else float(value) for value in exact)


def _documents(text: str) -> tuple[dict[str, Any], ...]:
    """The mappings of speculative={...}, or of several apart by commas, in JSON as vLLM takes it: Hydra's grammar knows
    no quotes around keys. Empty for anything else."""
    key, _, value = text.partition("=")
    if key != SPECULATIVE or not value.lstrip().startswith("{"):
        return ()
    try:
        found = json.loads(f"[{value}]")
    except ValueError:
        return ()
    return tuple(found) if all(isinstance(one, dict) for one in found) else ()


@cache
def _parser() -> OverridesParser:
    return OverridesParser.create()


def _plain(value: Any) -> Any:
    """A value of Hydra's parser in Python."""
    if isinstance(value, QuotedString):
        return value.text
    if isinstance(value, dict):
        return {str(_plain(name)): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [*map(_plain, value)]
    return value


def _check_sweep(override: Override, typed: str) -> None:
    """Refuse a sweep that is no list of values, and one without any."""
    sweep = override.value()
    if isinstance(sweep, (Glob, IntervalSweep)):
        raise ConfigError(
            f"{typed}: an interval or a pattern has no list of values; write a,b,c or range(start, stop, step)"
        )
    # Written so that NaN is refused too.
    if isinstance(sweep, RangeSweep) and not 0 < ((sweep.stop or 0) - (sweep.start or 0)) * sweep.step < math.inf:
        raise ConfigError(
            f"{typed}: a range without a value, or without an end; it goes from start by step and ends before stop, "
            "such as range(4,13,4)"
        )


def _quoted(text: str) -> str:
    """`text` with quotes around the values of a key that takes text: Hydra's grammar knows ASCII and few signs."""
    key, equals, value = text.partition("=")
    if not equals or not _takes_text(key) or _FUNCTION.fullmatch(value):
        return text
    if key == "skip_layers" and _RANGES.fullmatch(value):
        return f"{key}={_quote(value)}"  # one set of layers; several sets are quoted: '10-15','10-15,20'
    parts = _parts(value)
    if len(parts) > 1 and not all(parts):
        return text  # a list with a hole, which the parser refuses
    return f"{key}={','.join(map(_quote, parts))}"


def _parts(value: str) -> list[str]:
    """A value split at its commas, but not at those of quoted text, of interpolations, and of a list or a mapping."""
    parts, depth = [""], 0
    for piece in _PIECES.findall(value):
        begins = piece == "${" or (piece in "[{" and (depth or not parts[-1].strip()))
        depth += begins - (piece in "]}" and depth > 0)
        if piece == "," and not depth:
            parts.append("")
        else:
            parts[-1] += piece
    return [part.strip() for part in parts]


def _quote(part: str) -> str:
    if re.fullmatch(r"""'.*'|".*"|[\[{].*|null""", part, re.S | re.I):
        return part
    return _in_quotes(_SPECIAL.sub(r"\1", part))


def _in_quotes(text: str) -> str:
    """`text` in quotes; an interpolation may hold single ones of its own."""
    return QuotedString(text, Quote.double if "${" in text and "'" in text else Quote.single).with_quotes()


def _takes_text(key: str) -> bool:
    option = option_of(key)
    if option is None:
        return key in (*GROUPS, EXPERIMENT, TUNED)
    return option.type in (str, str | None, Any) and not option.knob.words()


def _home_of(name: str) -> str | None:
    """The key that `name` has in the one group that knows it: batch -> workload.batch."""
    homes = [key for key in options(RunConfig) if key.rpartition(".")[2] == name and "." in key]
    return homes[0] if len(homes) == 1 else None
