"""What a request asks of drafting is checked where vLLM checks its other parameters, and refused as they are."""

import asyncio
from types import SimpleNamespace

import pytest
import torch
import vllm.triton_utils
from v2_engine import early_exit
from vllm import SamplingParams
from vllm.entrypoints.generate.base.protocol import DeltaFunctionCall, DeltaMessage, DeltaToolCall
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.exceptions import VLLMValidationError
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.kv_cache_interface import FullAttentionSpec, RSWASpec

from selfspec_cli.early_exit.contexts import Context
from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.early_exit.resolved import ResolvedSettings
from selfspec_cli.gateway.continuation import Answer, Way, by_ids
from selfspec_cli.gateway.request import CHAT, COMPLETIONS, Request
from selfspec_cli.vllm_plugin import releases, spec_config
from selfspec_cli.vllm_plugin.detection import SETTINGS_KEY
from selfspec_cli.vllm_plugin.hooks import answer_streamed_input, check_requests
from selfspec_cli.vllm_plugin.interpreted import interpret_kernels
from selfspec_cli.vllm_plugin.refusals import refuse_context
from selfspec_cli.vllm_plugin.v1.proposer import _EarlyExit
from selfspec_cli.vllm_plugin.v2 import speculator
from selfspec_cli.vllm_plugin.v2.round_setup import Ending


def verify(extra_args):
    """vLLM's own check of a request's parameters, with ours before it."""
    asked = []
    check = check_requests(lambda self, *arguments: asked.append(self))
    check(SamplingParams(extra_args=extra_args), None, early_exit(), None, None)
    assert asked, "vLLM's own check comes too"


@pytest.mark.parametrize(
    ("extra_args", "readings"),
    [(None, 0), ({}, 0), ({"theirs": 1}, 1), ({"selfspec_k": 0}, 1), ({"selfspec_k": 4, "theirs": [1]}, 1)],
)
def test_what_can_be_had_passes_and_settings_are_read_only_for_a_request_that_may_ask(
    extra_args, readings, monkeypatch
):
    """To read them takes longer than all that vLLM does with a request before it hands it to the engine."""
    read, from_dict = [], ResolvedSettings.from_dict
    monkeypatch.setattr(ResolvedSettings, "from_dict", lambda data: read.append(data) or from_dict(data))
    verify(extra_args)
    assert len(read) == readings


def test_what_cannot_be_had_is_answered_with_status_400():
    with pytest.raises(VLLMValidationError, match="selfspec_k = 9 is out of range") as error:
        verify({"selfspec_k": 9})
    answer = create_error_response(error.value)
    assert answer.error.code == 400
    assert answer.error.param == "vllm_xargs"
    assert "allowed: whole numbers from 0 (no drafts) to the engine's k, 4" in answer.error.message


@pytest.mark.parametrize("said", [{"min_p": 0.1}, {"logit_bias": {3: 1.0}}, {}])
def test_min_p_and_logit_bias_are_refused_for_other_methods_alone(said):
    check, params = checking(), SamplingParams(**said)
    check(params, early_exit())
    check(params, None)
    assert {name: getattr(params, name) for name in said} == said
    if said:
        with pytest.raises(VLLMValidationError, match="not yet supported"):
            check(params, SimpleNamespace(method="ngram"))


def test_what_else_vllm_refuses_beside_drafts_it_refuses_beside_min_p_too():
    with pytest.raises(VLLMValidationError, match="no seed with speculative decoding"):
        checking(lambda params: params.seed is not None)(SamplingParams(min_p=0.1, seed=3), early_exit())
    with pytest.raises(VLLMValidationError, match="out-of-vocab"):
        checking()(SamplingParams(logit_bias={99: 1.0}), early_exit())


def checking(refuses=lambda params: False):
    """`SamplingParams.verify` with our replacement, by vLLM's own methods; `refuses`: what a release refuses more."""

    def verify(self, model_config, speculative_config):
        self._validate_logit_bias(model_config)
        self._validate_spec_decode(speculative_config)
        if speculative_config is not None and refuses(self):
            raise VLLMValidationError("no seed with speculative decoding")

    model = SimpleNamespace(get_vocab_size=lambda: 40)
    return lambda params, spec: check_requests(verify)(params, model, spec)


def test_input_that_streams_in_is_refused_with_early_exit_alone():
    async def theirs(self, request_id, prompt, params, **more):
        return request_id

    async def turns():
        yield "a turn"

    ask, stream = answer_streamed_input(theirs), turns()
    for spec in (None, SimpleNamespace(method="ngram")):
        engine = SimpleNamespace(vllm_config=SimpleNamespace(speculative_config=spec))
        assert asyncio.run(ask(engine, "name", stream, None)) == "name"
    engine.vllm_config.speculative_config = SimpleNamespace(**{SETTINGS_KEY: {}})
    assert asyncio.run(ask(engine, "name", "a whole prompt", None)) == "name"
    with pytest.raises(VLLMValidationError, match="send each turn as a request of its own"):
        asyncio.run(ask(engine, request_id="name", prompt=stream, params=None))


def test_where_a_request_ends_is_read_from_vllms_own_parameters():
    """`Ending` reads `max_tokens` and `eos_token_id`, which vLLM sets from the model's configuration; the length of the
    prompt is the scheduler's."""
    given = SamplingParams(max_tokens=7)
    given.update_from_generation_config({}, 2)
    assert Ending.of(given, 5) == Ending(12, 2)
    ignoring = SamplingParams(max_tokens=7, ignore_eos=True)
    ignoring.update_from_generation_config({}, 2)
    assert Ending.of(ignoring, 5) == Ending(12)
    assert isinstance(NewRequestData.prompt_len, property)


# ---- No field of a request is lost where token ids continue its stream on another server (`gateway/continuation.py`)


BODIES = {CHAT: {"messages": [{"role": "user", "content": "x"}]}, COMPLETIONS: {"prompt": "x"}}
EARLIER = ("functions", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "logits_processors")
REPLACED = {"model", "messages", "prompt", "stream", "max_tokens", "max_completion_tokens", "min_tokens"}
IN_THE_PROMPT = {  # whose token ids come from the first server
    *("add_generation_prompt", "add_special_tokens", "chat_template", "chat_template_kwargs", "continue_final_message"),
    *("documents", "media_io_kwargs", "mm_processor_kwargs", "reasoning_effort", "return_prompt_text"),
    *("truncate_prompt_tokens", "truncation_side"),
}
NOT_OF_THE_TEXT = {
    *("request_id", "session_id", "kv_transfer_params", "ec_transfer_params", "routed_experts_prompt_start"),
    *("stream_options", "include_reasoning"),  # whose default is true; false has a test of its own
}
ALONE_WITHOUT_EFFECT = {
    *("tool_choice", "parallel_tool_calls", "top_logprobs", "length_penalty"),  # of tools, logprobs, beams
    *("mm_payload", "return_mm_kwargs", "return_token_offsets"),  # of endpoints that render a prompt
    "suffix",  # vLLM refuses it
}
NEEDLESS = REPLACED | IN_THE_PROMPT | NOT_OF_THE_TEXT | ALONE_WITHOUT_EFFECT
FIELDS = [
    (endpoint, name)
    for endpoint, model in ((CHAT, ChatCompletionRequest), (COMPLETIONS, CompletionRequest))
    for name in {**dict.fromkeys(model.model_fields), **dict.fromkeys(EARLIER)}
    if name not in NEEDLESS
]


def continued(endpoint, more):
    """The body that asks for the rest, without model, prompt and limits; None where token ids are not used."""
    request = Request(endpoint, {**BODIES[endpoint], "stream": True, **more})
    if not by_ids(request, vllm=True):
        return None
    answer = Answer(request, ids=True, prompt_ids=[1], token_ids=[2])
    return answer.rest(Way.ids)[1]


@pytest.mark.parametrize(("endpoint", "name"), FIELDS)
def test_a_field_goes_to_the_server_that_continues_or_its_stream_is_not_continued_by_ids(endpoint, name):
    rest = continued(endpoint, {name: 2})
    assert rest is None or rest.get(name) == 2


def test_a_stream_without_such_fields_is_continued_by_ids():
    """So that the test above can fail."""
    for endpoint in BODIES:
        assert continued(endpoint, {})["prompt"] == [1, 2]


def test_a_server_that_hides_reasoning_hides_its_token_ids_too():
    assert continued(CHAT, {"include_reasoning": False}) is None


def test_a_chat_without_logprobs_goes_on_without_them():
    """/v1/completions reads `false` as 0, and would send the one of each token."""
    assert "logprobs" not in continued(CHAT, {"logprobs": False})
    assert continued(COMPLETIONS, {"logprobs": 0})["logprobs"] == 0


# ---- Names of what vLLM streams in a chat, which `selfspec load --chat` counts by what they are: all but the role


def test_parts_of_a_chat_have_the_names_by_which_they_are_counted():
    assert set(DeltaMessage.model_fields) == {"role", "content", "reasoning", "tool_calls"}
    assert set(DeltaToolCall.model_fields) == {"id", "type", "index", "function"}
    assert set(DeltaFunctionCall.model_fields) == {"name", "arguments"}


# ---- refusals and limits that no table holds: by release, by runner, by the context that fits the KV cache -----------


@pytest.mark.parametrize(("release", "allowed"), [("0.32.0", False), ("0.33.0", True)])
def test_keys_that_only_one_release_has_are_allowed_on_that_one(monkeypatch, release, allowed):
    monkeypatch.setattr(releases, "installed", lambda: ("vllm", f"{release}+cu130"))
    assert ("fly_window_size" in spec_config.vllm_keys()) is allowed


def test_only_early_exit_is_refused_on_the_v2_runner_of_another_device(monkeypatch):
    monkeypatch.setattr(speculator, "settings_of", lambda config: object())
    init = speculator.init_with_early_exit(lambda *args: "vLLM's own")
    with pytest.raises(SettingsError, match="early exit is not supported on xpu"):
        init(None, torch.device("xpu"), None)
    monkeypatch.setattr(speculator, "settings_of", lambda config: None)
    assert init(None, torch.device("xpu"), None) == "vLLM's own"


@pytest.mark.parametrize("narrow", ["sliding_window", "attention_chunk_size", "rswa_window"])
@pytest.mark.parametrize("place", [0, 1])
def test_a_window_is_refused_if_any_layer_of_a_kv_cache_group_has_one_of_its_own(narrow, place):
    """Without vLLM's hybrid KV cache manager, layers of both kinds share one KV cache group."""
    kind, sizes = (RSWASpec if narrow == "rswa_window" else FullAttentionSpec), {"num_kv_heads": 1, "head_size": 32}
    specs = [FullAttentionSpec(block_size=16, dtype=torch.float32, **sizes)] * 2
    groups = [SimpleNamespace(kv_cache_group_id=0, kv_cache_spec=spec) for spec in specs]
    refuse_context(Context("window", (64,)), groups)
    groups[place].kv_cache_spec = kind(block_size=16, dtype=torch.float32, **sizes, **{narrow: 128})
    refuse_context(Context(), groups)
    with pytest.raises(SettingsError, match="draft_window = 64 is not supported for this model"):
        refuse_context(Context("window", (64,)), groups)


OF_100 = SimpleNamespace(model_config=SimpleNamespace(max_model_len=100))


def test_the_v1_proposer_drafts_up_to_the_context_that_the_kv_cache_was_made_for():
    """`max_model_len=auto`: the worker learns the shorter context after the proposer was made and loaded."""
    proposer = SimpleNamespace(
        vllm_config=OF_100,
        max_model_len=4096,
        num_speculative_tokens=5,
        _find_groups=lambda: None,
        runner=SimpleNamespace(effective_drafter_max_model_len=4096),
    )
    _EarlyExit.initialize_attn_backend(proposer, None)
    assert proposer._last_useful == 99
    assert proposer.runner.effective_drafter_max_model_len == 105


def test_the_v2_speculator_drafts_up_to_the_context_that_the_kv_cache_was_made_for():
    """vLLM 0.32 keeps the length that the speculator was made with; its slots would be of other requests."""
    ours = SimpleNamespace(
        vllm_config=OF_100,
        max_model_len=4096,
        _find_groups=lambda: None,
        state=SimpleNamespace(max_model_len=4096),
    )
    speculator.EarlyExitSpeculator.set_attn(ours, None, None, None, None, None)
    assert ours.state.max_model_len == 100


def test_a_process_that_imported_vllm_without_triton_cannot_have_the_v2_runner_of_a_cpu_any_more():
    """vLLM looks for a backend once; other tests have it imported here."""
    assert not vllm.triton_utils.HAS_TRITON
    with pytest.raises(SettingsError, match="needs a process that has not imported vLLM or Triton"):
        interpret_kernels()
