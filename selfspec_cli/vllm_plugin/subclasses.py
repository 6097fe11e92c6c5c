"""Subclasses of vLLM's classes that an engine with early exit is made of, each with the methods that it overrides.

Worker and scheduler are named in the engine's configuration by vLLM's own options `worker_cls` and `scheduler_cls`, and
each process finds them by name in this module. For a model runner vLLM has no such option: `adopt` gives the one that
a worker has made its class. A class of the user's own is subclassed as vLLM's are."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from typing import Any

from selfspec_cli.vllm_plugin import vllm_names as vllm
from selfspec_cli.vllm_plugin.overrides import SCHEDULER, WORKER, Methods, overriding
from selfspec_cli.vllm_plugin.wrap import around


def __getattr__(name: str) -> Any:
    """The class that `subclass_of` has named, made anew each time: vLLM mixes extensions into a worker's class."""
    for kind, methods in ((WORKER, _of_worker), (SCHEDULER, _of_scheduler)):
        if name.startswith(kind):
            return overriding(pkgutil.resolve_name(name.removeprefix(kind).replace("/", ".")), methods())
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def scheduler(vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
    """The scheduler of an engine whose user has named none. vLLM calls it in place of a class."""
    base = vllm.AsyncScheduler if vllm_config.scheduler_config.async_scheduling else vllm.Scheduler
    return overriding(base, _of_scheduler())(vllm_config, *args, **kwargs)


def adopt(runner: Any, v2: bool) -> None:
    """Make a model runner, just made, one of early exit. v2: whether it is vLLM's V2 runner."""
    runner.__class__ = overriding(type(runner), _of_v2_runner() if v2 else _of_v1_runner())
    if not v2:
        from selfspec_cli.vllm_plugin.v1.sampling import mend_samplers

        mend_samplers(runner)


def _of_scheduler() -> Methods:
    from selfspec_cli.vllm_plugin import compat
    from selfspec_cli.vllm_plugin.observe import transport
    from selfspec_cli.vllm_plugin.v2 import scheduling

    compat.apply("scheduler")  # an engine core makes its scheduler before it chooses how to step
    return {
        "__init__": scheduling.with_planner,
        "schedule": scheduling.plan_drafts,
        "make_spec_decoding_stats": scheduling.hear_verdicts,
        "update_from_output": transport.send,
    }


def _of_worker() -> Methods:
    from selfspec_cli.vllm_plugin.weights import copied

    return {
        "init_device": _with_runner,
        "reload_weights": copied.after_new_weights,
        "finish_weight_update": copied.after_new_weights,
        "sleep": copied.keep_weights_asleep,
    }


@around
def _with_runner(original: Callable[[Any], None], self: Any) -> None:
    """Override of a worker's `init_device`, which makes the model runner."""
    from selfspec_cli.vllm_plugin import compat

    compat.apply("worker")
    original(self)
    adopt(self.model_runner, self.use_v2_model_runner)


def _of_v2_runner() -> Methods:
    from selfspec_cli.vllm_plugin.observe.transport import attach
    from selfspec_cli.vllm_plugin.trunk import after_loading
    from selfspec_cli.vllm_plugin.v2.runner import leave_out_drafting, tell_speculator, with_short_draft_sampler

    return {
        "load_model": lambda original: with_short_draft_sampler(after_loading(original)),
        "add_requests": tell_speculator,
        "sample_tokens": lambda original: attach(leave_out_drafting(original)),
    }


def _of_v1_runner() -> Methods:
    from selfspec_cli.vllm_plugin.observe.transport import attach
    from selfspec_cli.vllm_plugin.trunk import after_loading
    from selfspec_cli.vllm_plugin.v1.sampling import follow_budgets, keep_seeds_of_prompts

    return {
        "load_model": after_loading,
        "initialize_kv_cache": follow_budgets,
        "sample_tokens": lambda original: attach(keep_seeds_of_prompts(original)),
    }
