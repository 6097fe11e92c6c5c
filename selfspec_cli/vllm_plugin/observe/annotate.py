"""Named ranges around the parts of a round, for Nsight Systems (NVTX) and for PyTorch's profiler."""

import functools
from collections.abc import Callable
from typing import Any

import torch

PREFIX = "selfspec."


def annotate(runner: Any, drafter: Any) -> list[str]:
    """Put ranges around the parts of a live engine; returns their names, each once.

    verify, sample: the runner's two calls a step; logits: of the full model, which belong to the verify pass wherever
    the runner asks for them. draft: all of the draft loop, and in it trunk, head and gate of a step. schedule: the
    scheduler, where it is in this process. A CUDA graph replays as one launch, so a captured draft loop has no ranges
    inside. An engine that is annotated already keeps the ranges that it has.
    """
    model = runner.get_model()
    places = [("verify", runner, "execute_model"), ("sample", runner, "sample_tokens"), ("draft", drafter, "propose")]
    places += [("logits", model, "compute_logits"), ("trunk", drafter, "_forward")]
    places.append(("head", getattr(drafter, "head", None), "logits"))
    # A V1 step takes its token and asks its gate in one method, a V2 step in one object of three kernels.
    places += [("gate", drafter, "_decide"), ("gate", drafter, "end_step")]
    methods = ("schedule", "update_from_output")
    places += [("schedule", kind, method) for kind in _schedulers() for method in methods if method in vars(kind)]
    return _place(places)


def annotate_frontend(llm_engine: Any) -> list[str]:
    """The same for what happens to outputs in front of the engine: detokenise (stop strings and the making of outputs
    are part of it), and step around all of it."""
    return _place([("step", llm_engine, "step"), ("detokenise", llm_engine.output_processor, "process_outputs")])


def _schedulers() -> list[type]:
    """No worker knows the engine's scheduler, so the class that every scheduler is made of gets the ranges, and every
    subclass that overrides a method."""
    from selfspec_cli.vllm_plugin.vllm_names import Scheduler

    kinds = [Scheduler]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return kinds


def _place(places: list[tuple[str, Any, str]]) -> list[str]:
    found = [(name, owner, method) for name, owner, method in places if hasattr(owner, method)]
    for name, owner, method in found:
        function = getattr(owner, method)
        if not hasattr(function, "selfspec_range"):
            setattr(owner, method, _in_range(PREFIX + name, function))
    return list(dict.fromkeys(PREFIX + name for name, _, _ in found))


def _in_range(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    cuda = torch.cuda.is_available()

    def ranged(*args: Any, **kwargs: Any) -> Any:
        if cuda:
            torch.cuda.nvtx.range_push(name)
        try:
            with torch.profiler.record_function(name):
                return function(*args, **kwargs)
        finally:
            if cuda:
                torch.cuda.nvtx.range_pop()

    if hasattr(function, "__name__"):  # an object that is called has none
        ranged = functools.wraps(function)(ranged)
    ranged.selfspec_range = name  # type: ignore[attr-defined]
    return ranged
