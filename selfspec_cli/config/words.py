"""What a user types, KEY=VALUE, read by the grammar of Hydra's own parser: keys are checked, lists become values.

Text needs no quotes, whatever letters and spaces it has; a comma inside it is written \\, or the text is quoted.
"""

import json
import math
import random
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, IntervalSweep, Override, QuotedString, RangeSweep
from hydra.errors import HydraException

from selfspec_cli.config.choices import EXPERIMENT, TUNED
from selfspec_cli.config.options import OTHER_NAMES, SETTINGS
from selfspec_cli.config.schema import GROUPS, ConfigError
from selfspec_cli.config.speculative import KEY as SPECULATIVE
from selfspec_cli.early_exit.contexts import FULL, own_keys
from selfspec_cli.early_exit.errors import closest
from selfspec_cli.early_exit.rule import WIDTHS
from selfspec_cli.early_exit.view import own_names

_FUNCTION = re.compile(r"(int|str|bool|float|choice|range|interval|tag|sort|shuffle|glob)\(.*\)\s*")
_SPECIAL = re.compile(r"\\([\\()\[\]{}:=, \t])")
_GRAMMAR = re.compile(r"""'.*'|".*"|[\[{].*|null""", re.S | re.I)
"""Of a text setting: a value that Hydra's grammar reads, and that is not the text itself."""
_PIECES = re.compile(r"""\\.|'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|\$\{|.""", re.S)
"""Of a value: an escaped sign, quoted text, the beginning of an interpolation, or any other sign."""
_RANGES = re.compile(r"\s*\d+(-\d+)?(\s*,\s*\d+(-\d+)?)*\s*")
_FREE_FORM = tuple(key for key, option in SETTINGS.items() if getattr(option.type, "__origin__", None) is dict)
"""Settings that are mappings with keys of vLLM's."""


@dataclass(frozen=True)
class Word:
    """One override: what was typed, its key, and its values in Python."""

    typed: str
    key: str
    values: tuple[Any, ...]


def parse(words: Iterable[str]) -> list[Word]:
    """Read overrides; raises ConfigError for one that cannot be read, or a key that there is not."""
    return [_known(_parse(text)) for text in _written_out(list(words))]


def _known(word: Word) -> Word:
    """A word by its setting's own name; raises ConfigError for a key that there is not."""
    key = OTHER_NAMES.get(word.key, word.key)
    if key not in (EXPERIMENT, TUNED):
        check_key(key)
    if (kind := own_keys().get(word.key)) is None:
        return replace(word, key=key)
    return replace(word, key=key, values=tuple(FULL if one is None else f"{kind}:{one}" for one in word.values))


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


def is_free_form(key: str) -> bool:
    """Whether `key` is a mapping with any keys, or one of its keys."""
    return any(key == mapping or key.startswith(f"{mapping}.") for mapping in _FREE_FORM)


def check_key(key: str) -> None:
    """Refuse a key that there is not by a ConfigError that names the nearest."""
    if key in SETTINGS or key in GROUPS or is_free_form(key):
        return
    if leaf := next((name for name in SETTINGS if key.startswith(f"{name}.")), None):
        raise ConfigError(f"{key}: {leaf} has no keys below it")
    names = [name for name in SETTINGS if name.startswith(f"{key.partition('.')[0]}.")]
    top = dict.fromkeys(name.partition(".")[0] for name in SETTINGS)
    homes = [name for name in SETTINGS if name.endswith(f".{key.rpartition('.')[2]}")]
    meant = homes[0] if len(homes) == 1 else None
    raise ConfigError(closest(key, names or [*top, EXPERIMENT, TUNED, *OTHER_NAMES], "key", meant=meant))


def _parse(text: str) -> Word:
    key, equals, value = text.partition("=")
    if documents := _documents(key, value):
        return Word(text, key, documents)
    if equals and _takes_text(key) and not _FUNCTION.fullmatch(value):
        return Word(text, key, tuple(_text(key, part, text) for part in _parts(key, value)))
    override = _override(text, text)
    if override.is_delete() or override.package is not None or override.is_hydra_override():
        raise ConfigError(f"{text}: only key=value overrides can be used here")
    _check_sweep(override, text)
    found = override.value()
    if isinstance(found, RangeSweep):
        values = _numbers(found)
    else:
        values = tuple(map(_plain, override.sweep_iterator() if override.is_sweep_override() else [found]))
    return Word(text, override.key_or_group, values)


_parser = cache(OverridesParser.create)


def _override(text: str, typed: str) -> Override:
    """What Hydra's parser makes of `text`, a part of what was typed."""
    try:
        return _parser().parse_override(text)
    except HydraException as error:
        is_mapping = typed.startswith(f"{SPECULATIVE}=")
        form = """speculative='{"method": "ngram"}'""" if is_mapping else "tau_v=4,5,6"
        reason = f"write key=value, for example {form}"
        if "=" in typed and not is_mapping and not typed.startswith("="):
            said = [line for line in str(error).splitlines() if line and not line.startswith(("Error parsing", "See "))]
            reason = said[0] if said else "it has no value"
        raise ConfigError(f"cannot read the override {typed!r}: {reason}") from error


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


def _documents(key: str, value: str) -> tuple[dict[str, Any], ...]:
    """The mappings of speculative={...},{...}, in JSON as vLLM takes it, which Hydra's grammar is not; else empty."""
    if key != SPECULATIVE or not value.lstrip().startswith("{"):
        return ()
    try:
        found = json.loads(f"[{value}]")
    except ValueError:
        return ()
    return tuple(found) if all(isinstance(one, dict) for one in found) else ()


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(_plain(name)): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [*map(_plain, value)]
    return value.text if isinstance(value, QuotedString) else value


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


def _takes_text(key: str) -> bool:
    """Whether values are text, of which Hydra's grammar, with its ASCII and few signs, reads quotes and lists alone."""
    option = SETTINGS.get(OTHER_NAMES.get(key, key))
    if option is None:
        return key in (*GROUPS, EXPERIMENT, TUNED)
    return option.type in (str, str | None, Any) and not option.knob.words()


def _parts(key: str, value: str) -> list[str]:
    """A value split at its commas, but not at those of quoted text, of interpolations, and of a list or a mapping."""
    if key == "skip_layers" and _RANGES.fullmatch(value):
        return [value]  # one set of layers; several sets are quoted: '10-15','10-15,20'
    parts, depth = [""], 0
    for piece in _PIECES.findall(value):
        begins = piece == "${" or (piece in "[{" and (depth or not parts[-1].strip()))
        depth += begins - (piece in "]}" and depth > 0)
        if piece == "," and not depth:
            parts.append("")
        else:
            parts[-1] += piece
    parts = [part.strip() for part in parts]
    if len(parts) > 1 and not all(parts):
        raise ConfigError(f"cannot read the override '{key}={value}': a list with nothing between two commas")
    return parts


def _text(key: str, part: str, typed: str) -> Any:
    if _GRAMMAR.fullmatch(part):
        return _plain(_override(f"{key}={part}", typed).value())
    return _SPECIAL.sub(r"\1", part)
