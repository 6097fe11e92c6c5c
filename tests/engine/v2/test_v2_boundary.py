"""Names of vLLM that early exit replaces are in patches.py, and no others are replaced."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine

HERE = Path(__file__).parent


def ours(value: Any) -> bool:
    """Whether a function, a class or an object is made by selfspec, whatever it says that it wraps."""
    if isinstance(value, (staticmethod, classmethod, types.MethodType)):
        value = value.__func__
    if isinstance(value, types.FunctionType):
        file = Path(value.__code__.co_filename)
        return "selfspec_cli" in file.parts and file.name != "interpreted.py"  # Triton's, which kernels' modules hold
    kind = value if isinstance(value, type) else type(value)
    return str(kind.__module__).startswith("selfspec_cli")


def replaced_names() -> set[str]:
    """ "module:name" or "module:Class.name" of what is ours in vLLM's modules and in its classes."""
    found = set()
    for name, module in list(sys.modules.items()):
        if not name.startswith("vllm") or module is None:
            continue
        for key, value in list(vars(module).items()):
            if ours(value):
                found.add(f"{name}:{key}")
            elif isinstance(value, type) and value.__module__ == name:
                found |= {f"{name}:{value.__name__}.{own}" for own, one in list(vars(value).items()) if ours(one)}
    return found


NAMES = """
from selfspec_cli.vllm_plugin.interpreted import interpret_kernels

interpret_kernels()
from test_v2_boundary import replaced_names
import vllm.engine.arg_utils, vllm.v1.worker.gpu.model_runner, vllm.v1.worker.gpu_worker
from selfspec_cli.vllm_plugin import compat, register
from selfspec_cli.vllm_plugin.patches import PATCHES
from selfspec_cli.vllm_plugin.v2 import widths

register()
everywhere = {compat.target_of(patch) for patch in PATCHES if patch.stage == "config"}
assert 0 < len(replaced_names()) and replaced_names() <= everywhere, replaced_names() - everywhere
for stage in ("config", "scheduler", "worker"):
    compat.apply(stage)
listed = {compat.target_of(patch) for patch in PATCHES}
assert replaced_names() == listed, replaced_names() ^ listed
vllm.v1.worker.gpu_worker.Worker.more = widths.plan_drafts
print(sorted(replaced_names() - listed))
"""


def test_names_that_are_replaced_are_those_of_the_list_and_one_more_is_found():
    """In a process of its own, where no engine has started. A plain engine has some of them."""
    paths = [str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    run = subprocess.run([sys.executable, "-c", NAMES], env=environment, capture_output=True, text=True, check=False)
    assert run.stdout.strip().endswith("['vllm.v1.worker.gpu_worker:Worker.more']"), run.stdout + run.stderr[-3000:]
