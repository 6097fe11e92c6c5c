"""Plain functions of arithmetic as device code, so that a rule is written once."""

from __future__ import annotations

from types import FunctionType
from typing import Any

import triton
import triton.language as tl


def on_device(function: Any) -> Any:
    """`function` for a kernel to call. Triton wants its own language among what the function can see."""
    return triton.jit(FunctionType(function.__code__, {**function.__globals__, "tl": tl}, function.__name__))
