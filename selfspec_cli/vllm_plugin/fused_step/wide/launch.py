"""Arguments of the kernel for many tokens; ../launch.py compiles and launches it."""

import ctypes

POINTERS = (
    "stream",
    "offsets",
    "norms",
    "bias",
    "head_norms",
    "final_norm",
    "embedding",
    "rope",
    "caches",
    "memory",
    "stamps",
    "ids",
    "positions",
    "lengths",
    "slots",
    "table",
    "out",
)
STRIDES = ("cache_block", "cache_head", "cache_token", "cache_value", "table_row")


class Arguments(ctypes.Structure):
    """`struct Arguments` of memory.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in POINTERS),
        *((name, ctypes.c_longlong) for name in STRIDES),
        ("tokens", ctypes.c_int),
        ("scale", ctypes.c_float),
    ]
