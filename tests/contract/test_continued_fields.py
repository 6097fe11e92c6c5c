"""No field of a request is lost where token ids continue its stream on another server (`gateway/continuation.py`)."""

import pytest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest

from selfspec_cli.gateway.continuation import Answer, Way, by_ids
from selfspec_cli.gateway.request import CHAT, COMPLETIONS, Request

pytestmark = pytest.mark.contract

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
