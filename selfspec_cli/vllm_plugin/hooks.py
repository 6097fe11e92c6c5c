"""The replacements that act in every engine.

This module runs in engines that do not use early exit. What else it needs of this package is imported when early exit
is asked for, and whatever goes wrong in it leaves a plain engine as it was shipped."""

import copy
import functools
import logging
import os
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any

from selfspec_cli.vllm_plugin.detection import (
    METHODS,
    SETTINGS_KEY,
    asks_for_no_layers,
    carried_by,
    misspelt_method,
    request_in,
)
from selfspec_cli.vllm_plugin.wrap import Function, around


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
    from selfspec_cli.vllm_plugin import compat
    from selfspec_cli.vllm_plugin.spec_config import understand_layer_skip

    compat.apply("config")  # also what `register` left because its module was not imported yet
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
