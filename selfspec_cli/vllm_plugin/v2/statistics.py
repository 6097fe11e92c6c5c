"""The device function that computes every gate's statistic for a row, written from the gates' own expressions.

Triton compiles source text, and the registry of gates is known when this module is imported, so the function is written
then: one line a gate, and no limit to their number. It computes all of them at every step, because a gate that changes
on a live engine is a number in device memory, and no kernel is compiled again for it.
"""

from __future__ import annotations

import linecache
from collections.abc import Iterable
from typing import Any

import triton
import triton.language as tl

from selfspec_cli.early_exit.gates import GATES, Gate, device_features
from selfspec_cli.early_exit.gates.base import DEVICE_NAMES

FILE = "<gate statistics>"
_NUMBERS = [name for name in DEVICE_NAMES if name != "previous"]


def source(gates: Iterable[Gate]) -> str:
    """The Triton function `statistics`: float32 [PADDED], the statistic of the gate number c in place c.

    columns: 0, 1, ..., PADDED - 1. confidence and so on: `DEVICE_NAMES`. before: pointer to the row's statistics of the
    step before, read only where `later` (a step that is not the first).
    """
    lines = [
        "@triton.jit",
        f"def statistics(columns, {', '.join(_NUMBERS)}, before, later):",
        "    values = tl.full(columns.shape, 0.0, tl.float32)",
    ]
    for column, gate in enumerate(gates):
        if gate.cumulative:
            lines.append(f"    previous = tl.load(before + {column}, mask=later, other=1.0)")
        lines.append(f"    values = tl.where(columns == {column}, ({gate.device}), values)  # {gate.name}")
    return "\n".join([*lines, "    return values", ""])


def compiled(text: str) -> Any:
    """The function of `source`, ready to be called by a kernel. Triton reads the text of what it compiles through
    `inspect`, and that reads it from `linecache`, which must know it: there is no file."""
    linecache.cache[FILE] = (len(text), None, text.splitlines(keepends=True), FILE)
    names: dict[str, Any] = {"triton": triton, "tl": tl, "__name__": __name__}
    exec(compile(text, FILE, "exec"), names)
    return names["statistics"]


FEATURES = device_features()
statistics = compiled(source(GATES[name] for name in FEATURES))
WIDTH = tl.constexpr(len(FEATURES))
PADDED = tl.constexpr(triton.next_power_of_2(len(FEATURES)))
