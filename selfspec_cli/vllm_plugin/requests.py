"""What requests ask of drafting: checked where they come in, and read where they run."""

import logging
from collections.abc import Mapping
from typing import Any

from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.early_exit.resolved import NOTHING, RequestSettings, ResolvedSettings
from selfspec_cli.vllm_plugin import vllm_names as vllm


def own_settings(sampling_params: Any, settings: ResolvedSettings) -> RequestSettings:
    """What a running request asked for. Whatever came past the check counts as nothing, and is logged: an error here
    would end the engine, with every other request in it."""
    try:
        return RequestSettings.of(getattr(sampling_params, "extra_args", None), settings)
    except SettingsError as error:
        logging.getLogger("vllm.selfspec").warning("a request's own draft settings are ignored: %s", error)
        return NOTHING


def check(sampling_params: Any, settings: Mapping[str, Any]) -> None:
    """Refuse what a request asks for that this engine cannot honour; settings: the engine's, in their plain form.
    Raises VLLMValidationError, which vLLM raises for its own parameters and answers over HTTP with status 400."""
    if not sampling_params.extra_args:
        return  # as most do; the requests of a batch are taken in one after the other, and each waits for those before
    try:
        RequestSettings.of(sampling_params.extra_args, ResolvedSettings.from_dict(settings))
    except SettingsError as error:
        raise vllm.VLLMValidationError(str(error), parameter="vllm_xargs") from error
