"""Which layers draft: the first E, or those of them that are not skipped. Free of torch."""

import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from numbers import Integral

from selfspec_cli.early_exit.errors import SettingsError

FORM = "layers counted from 0, and ranges of them, such as 10-15,20"
_PART = re.compile(r"(\d+)(?:-(\d+))?")


def skipped_layers(value: object, key: str = "skip_layers") -> tuple[int, ...]:
    """Layers to skip, ascending, each once: from text such as "10-15,20" (ends included), or from a list of integers.

    None and "" skip none. Raises SettingsError, naming the part that is neither.
    """
    if value is None:
        return ()
    if isinstance(value, str):
        parts = [part.strip() for part in value.split(",")] if value.strip() else []
        return tuple(sorted({layer for part in parts for layer in _range(part, value, key)}))
    if not isinstance(value, Iterable) or isinstance(value, (bytes, dict)):
        raise SettingsError(f"{key} = {value!r} must be {FORM}")
    layers = list(value)
    for layer in layers:
        if isinstance(layer, bool) or not isinstance(layer, Integral) or layer < 0:
            raise SettingsError(f"{key} = {layers!r}: {layer!r} is no layer; allowed: {FORM}")
    return tuple(sorted({int(layer) for layer in layers}))


def as_text(layers: Sequence[int]) -> str | None:
    """Layers as `skipped_layers` reads them: (10, 11, 12, 20) -> "10-12,20"; None for no layer at all."""
    runs = [[layer for _, layer in run] for _, run in groupby(enumerate(sorted(set(layers))), lambda at: at[1] - at[0])]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs) or None


def drafting_layers(layer: int, skipped: Sequence[int]) -> tuple[int, ...]:
    """The layers that a draft step runs, in order: the first `layer`, without `skipped`."""
    return tuple(index for index in range(layer) if index not in set(skipped))


def check_skipped(skipped: Sequence[int], layer: int) -> None:
    """Raises SettingsError where `skipped` is not below the exit layer, or leaves no layer to draft with."""
    beyond = [index for index in skipped if index >= layer]
    if beyond:
        raise SettingsError(
            f"skip_layers = {as_text(skipped)}: layer {beyond[0]} does not draft; allowed: 0 to "
            f"{layer - 1}, for layers 0 to {layer - 1} draft"
        )
    if len(skipped) >= layer:
        raise SettingsError(f"skip_layers = {as_text(skipped)} leaves none of {layer} layers to draft with; skip fewer")


def _range(part: str, value: str, key: str) -> range:
    match = _PART.fullmatch(part)
    if match is None:
        raise SettingsError(f"{key} = {value!r}: {part!r} is no layer and no range; write {FORM}")
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first:
        raise SettingsError(f"{key} = {value!r}: the range {part!r} runs backwards; write {last}-{first}")
    return range(first, last + 1)
