"""vLLM's V2 model runner on a CPU, its kernels in Triton's interpreter: for tests, not for measuring.

vLLM's CPU build has a V2 runner and takes it where Triton has a backend called "cpu". Triton has none of its own, but
its interpreter needs none: a stand-in that says it is active is enough. With a real backend for CPUs installed
(triton-cpu), kernels are compiled, and nothing here is needed."""

import os
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from types import SimpleNamespace
from typing import Any

from selfspec_cli.early_exit.errors import SettingsError

SWITCH = "TRITON_INTERPRET"
"""Environment variable of Triton's, read when a function is defined, so before Triton itself is imported."""


def interpret_kernels() -> None:
    """Let vLLM find a Triton backend for CPUs in this process: one that is installed, or the interpreter.
    Once is enough. Raises SettingsError if vLLM or Triton is imported already and has none, for both look once."""
    if "vllm.triton_utils" in sys.modules and sys.modules["vllm.triton_utils"].HAS_TRITON:
        return
    installed = entry_points(group="triton.backends", name="cpu")
    if "vllm.triton_utils" in sys.modules or ("triton" in sys.modules and not installed):
        raise SettingsError(
            "vLLM's V2 model runner on a CPU needs a process that has not imported vLLM or Triton "
            "without it; start it by itself, or unset VLLM_USE_V2_MODEL_RUNNER=1"
        )
    if installed:
        return
    os.environ[SWITCH] = "1"
    from triton.backends import backends

    launch_quickly()
    behave_like_a_device()  # after the interpreter has put its own functions in place
    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)


def behave_like_a_device() -> None:
    """Mend what Triton's interpreter (3.9.0) does otherwise than a device, or not at all.

    - A comparison keeps the type of what it compared, so a scalar one is broadcast to numbers, which are no mask.
    - There is no place of the largest element among NaN alone: rows that do no work have length 0, and attention over
      nothing is NaN on a CPU. NumPy's warnings of such numbers go too.
    - `tl.range` counts in Python's integers, which kernels cannot cast.
    - Functions of libdevice return nothing; log1p is the one that vLLM's sampling calls."""
    import numpy as np
    from triton import language
    from triton.language.extra import libdevice
    from triton.runtime import interpreter

    splat, min_max = interpreter.InterpreterBuilder.create_splat, interpreter.ReduceOps.min_max
    values = {np.nanmax: np.fmax.reduce, np.nanmin: np.fmin.reduce}
    run, count = interpreter.GridExecutor.__call__, language.range

    def splat_truth(self: Any, kind: Any, value: Any) -> Any:
        truth = value.data.dtype == np.bool_
        return splat(self, kind, interpreter.TensorHandle(value.data, language.int1) if truth else value)

    def among_nan(self: Any, given: Any, val_reduce_op: Any, idx_reduce_op: Any = None) -> Any:
        def place(data: Any, **along: Any) -> Any:
            if data.dtype.kind == "f":
                data = np.where(np.isnan(data), -np.inf if idx_reduce_op is np.nanargmax else np.inf, data)
            return idx_reduce_op(data, **along)

        return min_max(self, given, values.get(val_reduce_op, val_reduce_op), idx_reduce_op and place)

    def without_warnings(self: Any, *args: Any, **kwargs: Any) -> Any:
        with np.errstate(all="ignore"):
            return run(self, *args, **kwargs)

    def count_in_tensors(*args: Any, **kwargs: Any) -> Iterator[Any]:
        for number in count(*args, **kwargs):
            yield language.tensor(
                interpreter.TensorHandle(np.array([number], np.int32), language.int32), language.int32
            )

    interpreter.InterpreterBuilder.create_splat = splat_truth
    interpreter.ReduceOps.min_max = among_nan
    interpreter.GridExecutor.__call__ = without_warnings
    language.range = count_in_tensors
    libdevice.log1p = lambda value: language.log(1.0 + value)


def launch_quickly() -> None:
    """Replace the functions of Triton's language once, and remember the types of arrays: the same results sooner. The
    interpreter does both in each launch of a kernel, and again in each function that a kernel calls."""
    from triton import language
    from triton.runtime import interpreter

    interpreter._patch_lang(SimpleNamespace(__globals__={"language": language, "core": language.core}))
    interpreter._patch_lang = lambda function: interpreter._LangPatchScope()
    type_of, known = interpreter._get_np_dtype, dict[str, Any]()

    def known_type_of(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in known:
            known[name] = type_of(kind)
        return known[name]

    interpreter._get_np_dtype = known_type_of
