"""What a request asks of drafting is checked where vLLM checks its other parameters, and refused as they are."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.contract


def verify(extra_args, model=None, min_p=0.0, **spec):
    """vLLM's own check of a request's parameters, with ours before it, in an engine of this speculative_config.

    model: the sampling parameters that the model's generation_config.json changes.
    """
    from vllm import SamplingParams

    from selfspec_cli.early_exit.resolved import ResolvedSettings
    from selfspec_cli.vllm_plugin.hooks import SETTINGS_KEY, check_requests

    asked = []
    settings = ResolvedSettings.from_user({"method": "layer_skip", "num_speculative_tokens": 4, **spec}, 24)
    engine = SimpleNamespace(**{SETTINGS_KEY: settings.to_dict()})
    check_requests(lambda self, *arguments: asked.append(self))(
        SamplingParams(extra_args=extra_args, min_p=min_p),
        SimpleNamespace(get_diff_sampling_param=lambda: model or {}), engine, None, None,
    )  # fmt: skip
    assert asked, "vLLM's own check comes too"


@pytest.mark.parametrize("fine", [None, {}, {"theirs": 1}, {"selfspec_k": 0}, {"selfspec_k": 4, "theirs": [1]}])
def test_what_can_be_had_passes(fine):
    verify(fine)


@pytest.mark.parametrize(("extra_args", "readings"), [(None, 0), ({}, 0), ({"selfspec_k": 4}, 1)])
def test_the_engines_settings_are_read_only_for_a_request_that_may_ask_for_others(extra_args, readings, monkeypatch):
    """To read them takes longer than all that vLLM does with a request before it hands it to the engine."""
    from selfspec_cli.early_exit.resolved import ResolvedSettings

    read, from_dict = [], ResolvedSettings.from_dict
    monkeypatch.setattr(ResolvedSettings, "from_dict", lambda data: read.append(data) or from_dict(data))
    verify(extra_args)
    assert len(read) == readings


def test_what_cannot_be_had_is_answered_with_status_400():
    from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError, match="selfspec_k = 9 is out of range") as error:
        verify({"selfspec_k": 9})
    answer = create_error_response(error.value)
    assert answer.error.code == 400
    assert answer.error.param == "vllm_xargs"
    assert "allowed: whole numbers from 0 (no drafts) to the engine's k, 4" in answer.error.message


def test_a_threshold_is_checked_against_the_engines_gate():
    from vllm.exceptions import VLLMValidationError

    verify({"selfspec_threshold": 0.5}, gate="maxp")
    with pytest.raises(VLLMValidationError, match="selfspec_threshold = 7 is out of range for gate 'maxp'"):
        verify({"selfspec_threshold": 7}, gate="maxp")


def test_a_min_p_of_the_models_is_refused_by_where_it_comes_from():
    from vllm.exceptions import VLLMValidationError

    verify(None, {"min_p": 0.05})  # a request that leaves it out
    verify(None, {"top_p": 0.9}, min_p=0.1)  # its own: vLLM refuses it in its own words
    with pytest.raises(VLLMValidationError, match=r"min_p = 0.05 from the model's generation_config.json: leave it "
                       r"out by min_p = 0 .* --override-generation-config '\{\"min_p\": 0\}'"):  # fmt: skip
        verify(None, {"min_p": 0.05}, min_p=0.05)


def test_an_engine_without_early_exit_reads_nothing():
    from vllm import SamplingParams

    from selfspec_cli.vllm_plugin.hooks import check_requests

    check = check_requests(lambda self, *arguments: "vLLM's answer")
    for plain in (None, SimpleNamespace(method="ngram")):
        assert check(SamplingParams(extra_args={"selfspec_k": "x"}), None, plain, None, None) == "vLLM's answer"


def test_where_a_request_ends_is_read_from_vllms_own_parameters():
    """`Ending` reads `max_tokens` and `eos_token_id`, which vLLM sets from the model's configuration; the length of the
    prompt is the scheduler's."""
    from vllm import SamplingParams
    from vllm.v1.core.sched.output import NewRequestData

    from selfspec_cli.vllm_plugin.v2.draft_budget import Ending

    given = SamplingParams(max_tokens=7)
    given.update_from_generation_config({}, 2)
    assert Ending.of(given, 5) == Ending(12, 2)
    ignoring = SamplingParams(max_tokens=7, ignore_eos=True)
    ignoring.update_from_generation_config({}, 2)
    assert Ending.of(ignoring, 5) == Ending(12)
    assert isinstance(NewRequestData.prompt_len, property)
