"""Whether early exit is asked for, in an engine's arguments and in a worker's configuration.

This module runs in engines that do not use early exit. It imports next to nothing, and whatever goes wrong in it leaves
a plain engine as it was shipped."""

import functools
import json
from collections.abc import Callable, Mapping
from typing import Any

from selfspec_cli.vllm_plugin.wrap import Function

METHODS = ("selfspec", "layer_skip", "skip")
"""The methods of a speculative_config that are ours, as `early_exit.settings` has them and their other names; that is
not imported here, so that a plain engine does not depend on it."""
SETTINGS_KEY = "selfspec"
COLLECT_KEY = "selfspec_collect"


def request_in(engine_args: Any) -> str | None:
    """What in vLLM's `EngineArgs` asks for early exit, in words; None for a plain engine. Never raises."""
    try:
        method, spec = _asked(engine_args)
        if method in METHODS:
            return f"method {method!r}"
        if "draft_weights" in spec:
            return "draft_weights"
        more = _mapping(getattr(engine_args, "additional_config", None))
        return next((f"additional_config {key!r}" for key in (SETTINGS_KEY, COLLECT_KEY) if more.get(key)), None)
    except Exception:
        return None


def misspelt_method(engine_args: Any) -> str | None:
    """What to say of a method that vLLM refuses and that may have been meant as one of ours. Never raises."""
    try:
        from difflib import get_close_matches

        method, _ = _asked(engine_args)
        near = get_close_matches(str(method).lower(), METHODS, n=1, cutoff=0.7)
        return f"selfspec: did you mean the method {near[0]!r}, given {method!r}?" if near else None
    except Exception:
        return None


def asks_for_no_layers(engine_args: Any) -> bool:
    """Whether early exit is asked for at layer 0, which means off. Never raises."""
    try:
        method, spec = _asked(engine_args)
        layer = spec.get("layer_skip")
        return method in METHODS and not isinstance(layer, bool) and str(layer).strip() == "0"
    except Exception:
        return False


def carried_by(vllm_config: Any) -> bool:
    """Whether a worker's configuration carries early-exit settings, or asks to collect. Never raises."""
    try:
        more = _mapping(getattr(vllm_config, "additional_config", None))
        spec = getattr(vllm_config, "speculative_config", None)
        return getattr(spec, SETTINGS_KEY, None) is not None or bool(more.get(SETTINGS_KEY) or more.get(COLLECT_KEY))
    except Exception:
        return False


def _asked(engine_args: Any) -> tuple[Any, dict[str, Any]]:
    """The method in vLLM's `EngineArgs`, and the speculative_config."""
    spec = _mapping(getattr(engine_args, "speculative_config", None))
    return getattr(engine_args, "spec_method", None) or spec.get("method"), spec


def _mapping(value: Any) -> dict[str, Any]:
    """A JSON object as vLLM may hold it, with dashes in keys as `vllm serve` accepts them; {} for anything else."""
    found = json.loads(value) if isinstance(value, str) else value
    return {str(key).replace("-", "_"): item for key, item in found.items()} if isinstance(found, Mapping) else {}


def answer_on_request(original: Function, answer: Callable[[], str | None]) -> Function:
    """Replacement for a method of `EngineArgs` on a vLLM that is not known. Where early exit is asked for, `answer`
    says why it cannot be had (RuntimeError), or puts what belongs there in the place of this method."""

    @functools.wraps(original)
    def answer_and_create(self: Any, *args: Any, **kwargs: Any) -> Any:
        asked = request_in(self)
        if asked is None:
            return original(self, *args, **kwargs)
        reason = answer()
        if reason is not None:
            raise RuntimeError(f"early exit is asked for ({asked}): {reason}")
        return getattr(self, original.__name__)(*args, **kwargs)  # what is in place now

    return answer_and_create
