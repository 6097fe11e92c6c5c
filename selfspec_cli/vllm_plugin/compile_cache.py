"""A second start on a CPU compiles nothing.

On a CPU vLLM compiles by Inductor alone, so the ahead-of-time artifact that it saves holds a plain function. Its loader
asks every artifact for a method that only those of vLLM's own compiler have, says "'function' object has no attribute
'finalize_loading'", and compiles anew at each start. Without such artifacts PyTorch's own cache is used, and it works.
"""

from __future__ import annotations

import os

VARIABLE = "VLLM_USE_AOT_COMPILE"


def keep_on_cpu() -> None:
    """On a CPU let vLLM save no artifact that it cannot load. Only an engine with early exit gets here.

    Engine processes inherit the variable, and read it as they compile. A user's own setting wins.
    """
    from selfspec_cli.vllm_plugin.vllm_names import current_platform

    if current_platform.is_cpu():
        os.environ.setdefault(VARIABLE, "0")
