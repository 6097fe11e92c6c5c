"""Whether early exit is asked for, in an engine's arguments and in a worker's configuration; and the replacements that
act in every engine.

This module runs in engines that do not use early exit. What else it needs of this package is imported when early exit
is asked for, and whatever goes wrong in it leaves a plain engine as it was shipped."""

import copy
import functools
import json
import logging
import os
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress
from typing import Any

from selfspec_cli.vllm_plugin.wrap import Function, around

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


@around
def early_exit_on_request(original: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Replacement for `EngineArgs.create_speculative_config`: ours only where early exit is asked for."""
    with suppress(Exception):  # a plain engine starts whatever the environment holds
        _warn_of_old_variables()
    if request_in(self) is None:
        try:
            return original(self, *args, **kwargs)
        except Exception as error:
            if (hint := misspelt_method(self)) is not None:
                error.add_note(hint)
            raise
    if asks_for_no_layers(self):
        logging.getLogger("vllm.selfspec").warning("layer_skip = 0: early exit is off, the engine runs plain vLLM")
        plain = copy.copy(self)  # the arguments that are given stay as they are
        plain.speculative_config = plain.spec_method = plain.spec_model = plain.spec_tokens = None
        return original(plain, *args, **kwargs)
    from selfspec_cli.vllm_plugin import patches
    from selfspec_cli.vllm_plugin.spec_config import understand_layer_skip

    patches.apply("config")  # also what `register` left because its module was not imported yet
    return understand_layer_skip(original, self, *args, **kwargs)


@functools.cache
def _warn_of_old_variables() -> None:
    """Once a process: what to type in place of the first sprint's environment variables."""
    if not any(os.environ.get(name) for name in ("LAYERSKIP", "EE_GATE", "EE_TAU", "EE_TAU_V")):
        return
    from selfspec_cli.early_exit.sprint_aliases import answer_for_environment

    logging.getLogger("vllm.selfspec").warning(answer_for_environment(os.environ))


def offer_methods(original: Function) -> Any:
    """Replacement for `EngineArgs.add_cli_args`: `--spec-method` takes our methods too."""

    @functools.wraps(original)
    def add_cli_args(parser: Any, *args: Any, **kwargs: Any) -> Any:
        parser = original(parser, *args, **kwargs)
        with suppress(Exception):  # a parser of another make offers vLLM's own methods
            for action in parser._actions:
                if "--spec-method" in action.option_strings and action.choices is not None:
                    action.choices = [*action.choices, *METHODS]
        return parser

    return staticmethod(add_cli_args)


@around
def capture_every_width(original: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Replacement for `VllmConfig._set_cudagraph_sizes`: with early exit, graphs for larger steps too."""
    if not carried_by(self):
        return original(self, *args, **kwargs)
    from selfspec_cli.vllm_plugin.compile_cache import remember_plain_sizes
    from selfspec_cli.vllm_plugin.v2.widths import capture_larger_steps

    if self.speculative_config is not None:
        remember_plain_sizes(self, original)
    chosen = self.compilation_config
    by_user = chosen.cudagraph_capture_sizes is not None or chosen.max_cudagraph_capture_size is not None
    found = original(self, *args, **kwargs)
    if not by_user:
        capture_larger_steps(self)
    return found


@around
def check_requests(
    original: Function, self: Any, model_config: Any, speculative_config: Any, *args: Any, **kwargs: Any
) -> Any:
    """Replacement for `SamplingParams.verify`: what a request asks of drafting is checked where it comes in. `min_p`
    and `logit_bias` are not refused, because early exit serves both."""
    settings = getattr(speculative_config, SETTINGS_KEY, None)
    if settings is None:
        return original(self, model_config, speculative_config, *args, **kwargs)
    from selfspec_cli.vllm_plugin.requests import check

    check(self, settings)
    if not (self.min_p or self.logit_bias):
        return original(self, model_config, speculative_config, *args, **kwargs)
    rest = copy.copy(self)  # what else vLLM refuses together with drafts
    rest.min_p, rest.logit_bias = 0.0, None
    original(rest, model_config, speculative_config, *args, **kwargs)
    return original(self, model_config, None, *args, **kwargs)


def answer_streamed_input(original: Function) -> Function:
    """Replacement for `AsyncLLM.add_request`: a prompt that streams in is refused with early exit."""

    @functools.wraps(original)
    async def add_request(self: Any, request_id: str, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        spec = self.vllm_config.speculative_config
        if isinstance(prompt, AsyncGenerator) and getattr(spec, SETTINGS_KEY, None) is not None:
            from selfspec_cli.early_exit.errors import SettingsError
            from selfspec_cli.vllm_plugin.refusals import refuse_streamed_input
            from selfspec_cli.vllm_plugin.vllm_names import VLLMValidationError

            try:
                refuse_streamed_input()
            except SettingsError as error:
                raise VLLMValidationError(str(error), parameter="prompt") from error
        return await original(self, request_id, prompt, *args, **kwargs)

    return add_request


@around
def show_drafting(original: Function, self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
    """Replacement for `StatLoggerManager.__init__`: the metrics of an engine with early exit say what drafting did."""
    original(self, vllm_config, *args, **kwargs)
    if carried_by(vllm_config):
        from selfspec_cli.vllm_plugin.observe.metrics import add_to

        add_to(self, vllm_config)
