"""Engines after the first of a process start and stop in a fraction of the processor time.

Of the four seconds that a tiny engine took, three were walks over everything that was ever imported: vLLM and our own
clean-up collect garbage eight times an engine, and vLLM looks through all modules for kernels to replace. Neither finds
anything new in what stays from one engine to the next.
"""

from __future__ import annotations

import gc
import sys

_freeze = gc.freeze


def keep_what_is_imported_out_of_garbage_collections() -> None:
    """What is alive now stays for ever: later collections leave it out. Call it where no engine lives.

    vLLM's own freezing would keep an engine's cycles from being collected, once nobody thaws what is kept here.
    """
    gc.collect()
    _freeze()
    gc.freeze = gc.unfreeze = _nothing  # type: ignore[assignment]


def _nothing() -> None:
    pass


def replace_kernels_once() -> None:
    """vLLM replaces kernels at each start of an engine; from now on only after it or we imported something more."""
    from vllm.platforms.cpu import CpuPlatform

    replace, seen = CpuPlatform.register_triton_kernel_overrides, set[str]()

    def once() -> None:
        if not _ours_and_vllms() <= seen:
            replace()
            seen.update(_ours_and_vllms())  # the replacement itself imports the modules that hold the kernels

    CpuPlatform.register_triton_kernel_overrides = staticmethod(once)


def rank_tokens_without_compiling() -> None:
    """vLLM compiles the one function that ranks a token for its log-probability, again in every engine."""
    from vllm.v1.sample import sampler

    compiled = sampler.batched_count_greater_than
    sampler.batched_count_greater_than = compiled._torchdynamo_orig_callable


def look_at_models_in_this_process() -> None:
    """vLLM imports itself in another process to ask the class of each architecture what it can, once for each machine
    and its cache. That process keeps CUDA out of this one; here there is none."""
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda ask: ask()


def _ours_and_vllms() -> set[str]:
    return {name for name in sys.modules if name.startswith(("vllm", "selfspec_cli"))}
