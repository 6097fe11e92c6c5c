"""What was compiled once is found again.

vLLM keeps what it compiles under a key with the speculative configuration and the sizes of captured steps in it, so
with each k the model and its view would be compiled anew. So an engine with early exit compiles both under the key that
a plain engine has (`as_plain`). What a start measures of memory, vLLM may keep under the engine's own key
(VLLM_ENABLE_STARTUP_PLAN), and that does depend on what drafts: `described.EarlyExitConfig` says so.

On a CPU vLLM compiles by Inductor alone, so the ahead-of-time artifact that it saves holds a plain function. Its loader
asks every artifact for a method of vLLM's own compiler, says "'function' object has no attribute 'finalize_loading'",
and compiles anew at each start. Without such artifacts PyTorch's own cache is used, and it works."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from selfspec_cli.vllm_plugin import vllm_names as vllm

if TYPE_CHECKING:
    from torch import nn

VARIABLE = "VLLM_USE_AOT_COMPILE"
PLAIN_SIZES = "selfspec_plain_sizes"  # an attribute of the SpeculativeConfig, which workers get with it


def keep_on_cpu() -> None:
    """On a CPU let vLLM save no artifact that it cannot load. Only an engine with early exit gets here.
    Engine processes inherit the variable, and read it as they compile. A user's own setting wins."""
    if vllm.current_platform.is_cpu():
        os.environ.setdefault(VARIABLE, "0")


def remember_plain_sizes(config: vllm.VllmConfig, choose: Callable[[Any], Any]) -> None:
    """Keep with `config` the sizes of graphs of an engine without speculation. choose: vLLM's way to choose them."""
    plain = copy.copy(config)
    plain.speculative_config, plain.compilation_config = None, copy.copy(config.compilation_config)
    choose(plain)
    sizes = plain.compilation_config.cudagraph_capture_sizes, plain.compilation_config.max_cudagraph_capture_size
    object.__setattr__(config.speculative_config, PLAIN_SIZES, sizes)


def as_plain(vllm_config: vllm.VllmConfig) -> vllm.VllmConfig:
    """A copy of an engine's configuration for what vLLM compiles: with the key of an engine without speculation."""
    plain = copy.copy(vllm_config)
    plain.compilation_config = compilation = copy.copy(vllm_config.compilation_config)
    sizes = getattr(vllm_config.speculative_config, PLAIN_SIZES, None)
    plain.speculative_config = None
    if sizes is not None:
        compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size = sizes
    return plain


def share_with_plain(modules: Iterable[nn.Module], vllm_config: vllm.VllmConfig) -> None:
    """Have vLLM compile a target under the key of an engine without speculation; call it before the model's first
    forward. modules: from the target's root to its decoder."""
    if vllm_config.compilation_config.mode != vllm.CompilationMode.VLLM_COMPILE:
        return
    for module in modules:
        if not isinstance(module, vllm.TorchCompileWithNoGuardsWrapper) or module.do_not_compile:
            continue
        if module.compiled or getattr(module, "aot_compiled_fn", None) is not None:
            continue
        plain = as_plain(module.vllm_config)
        module.vllm_config, module.compilation_config = plain, plain.compilation_config
        with vllm.set_current_vllm_config(plain):
            vllm.TorchCompileWithNoGuardsWrapper.__init__(module)


def count_times(models: Iterable[nn.Module], vllm_config: vllm.VllmConfig) -> None:
    """Add what these took to compile to what the engine says of its start; vLLM counts it by configuration."""
    own = vllm_config.compilation_config
    parts = (part for model in models for part in model.modules())
    found = {id(config): config for part in parts if (config := getattr(part, "compilation_config", own)) is not own}
    own.compilation_time += sum(config.compilation_time for config in found.values())
