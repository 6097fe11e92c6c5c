"""What requests ask of drafting: checked where they come in, and read where they run."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.early_exit.request_settings import NOTHING, RequestSettings
from selfspec_cli.early_exit.resolved import ResolvedSettings

NO_MIN_P = 1e-5  # vLLM's: what is less counts as none


def own_settings(sampling_params: Any, settings: ResolvedSettings) -> RequestSettings:
    """What a running request asked for. Whatever came past the check counts as nothing, and is logged: an error here
    would end the engine, with every other request in it."""
    try:
        return RequestSettings.of(getattr(sampling_params, "extra_args", None), settings)
    except SettingsError as error:
        logging.getLogger("vllm.selfspec").warning("a request's own draft settings are ignored: %s", error)
        return NOTHING


def check(sampling_params: Any, model_config: Any, settings: Mapping[str, Any]) -> None:
    """Refuse what a request asks for that this engine cannot honour; settings: the engine's, in their plain form.

    Raises VLLMValidationError, which vLLM raises for its own parameters and answers over HTTP with status 400.
    """
    if sampling_params.min_p > NO_MIN_P and (origin := min_p_of_model(model_config)):
        from selfspec_cli.vllm_plugin.vllm_names import VLLMValidationError

        raise VLLMValidationError(
            f"min_p = {sampling_params.min_p} is not supported with speculative decoding (vLLM's own words: min_p and "
            f"logit_bias are not yet supported with speculative decoding). {origin}",
            parameter="min_p",
        )
    if not sampling_params.extra_args:
        return  # as most do; the requests of a batch are taken in one after the other, and each waits for those before
    try:
        RequestSettings.of(sampling_params.extra_args, ResolvedSettings.from_dict(settings))
    except SettingsError as error:
        from selfspec_cli.vllm_plugin.vllm_names import VLLMValidationError

        raise VLLMValidationError(str(error), parameter="vllm_xargs") from error


def min_p_of_model(model_config: Any) -> str | None:
    """Where requests that name no min_p get one from, and how to leave it out; None where they get none."""
    own = model_config.get_diff_sampling_param().get("min_p")
    if not own or own <= NO_MIN_P:
        return None
    return (
        f"Requests that name none get min_p = {own} from the model's generation_config.json: leave it out by min_p = 0 "
        "in each request, or start the server with --override-generation-config '{\"min_p\": 0}' or with "
        "--generation-config vllm"
    )
