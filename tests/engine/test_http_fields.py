"""Every field of vLLM's HTTP API, against a server that drafts: answered, or refused alone with status 400.

The same server is asked for chats whose reasoning and calls of tools are streamed, as `selfspec load --chat` does.
"""

import json
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest
from models import LAYERS, save_tokenizer
from served import served
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest

from selfspec_cli.engine import clients
from selfspec_cli.engine.clients import CHAT, Job

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

TOKENS = 12
PLAIN: dict[str, Any] = {"max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True}
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 3}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}

# Field of vLLM's CompletionRequest -> a request's fields. Those that both APIs have are asked for in both.
BOTH: dict[str, dict[str, Any]] = {
    "add_special_tokens": {"add_special_tokens": False},
    "allowed_token_ids": {"allowed_token_ids": [*range(20, 60)]},
    "bad_words": {"bad_words": ["a"]},
    "cache_salt": {"cache_salt": "salt"},
    "ec_transfer_params": {"ec_transfer_params": {}},
    "frequency_penalty": {"frequency_penalty": 1.0},
    "ignore_eos": {"ignore_eos": False},
    "include_stop_str_in_output": {"include_stop_str_in_output": True, "stop": ["a"]},
    "kv_transfer_params": {"kv_transfer_params": {}},
    "length_penalty": {"length_penalty": 0.5, "use_beam_search": True, "n": 2},
    "logit_bias": {"logit_bias": {"5": 1.0}},
    "logprob_token_ids": {"logprob_token_ids": [5, 9], "logprobs": 2},
    "max_tokens": {"max_tokens": 3},
    "min_p": {"min_p": 0.1, "temperature": 1.0},
    "min_tokens": {"min_tokens": 4},
    "mm_payload": {"mm_payload": None},
    "n": {"n": 2, "temperature": 1.0},
    "presence_penalty": {"presence_penalty": 1.0},
    "priority": {"priority": 1},
    "prompt_logprobs": {"prompt_logprobs": 2},
    "repetition_detection": {"repetition_detection": {"max_pattern_size": 2, "min_pattern_size": 1, "min_count": 2}},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "request_id": {"request_id": "one"},
    "response_format": {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}},
    "return_mm_kwargs": {"return_mm_kwargs": True},
    "return_token_ids": {"return_token_ids": True},
    "return_token_offsets": {"return_token_offsets": True},
    "return_tokens_as_token_ids": {"return_tokens_as_token_ids": True, "logprobs": 1},
    "routed_experts_prompt_start": {"routed_experts_prompt_start": 1},
    "seed": {"seed": 3, "temperature": 1.0},
    "session_id": {"session_id": "one"},
    "skip_special_tokens": {"skip_special_tokens": False},
    "spaces_between_special_tokens": {"spaces_between_special_tokens": False},
    "stop": {"stop": ["a"]},
    "stop_token_ids": {"stop_token_ids": [5]},
    "stream_interval": {"stream_interval": 2},
    "structured_outputs": {"structured_outputs": {"regex": "[abc]{6}"}},
    "temperature": {"temperature": 1.0},
    "thinking_token_budget": {"thinking_token_budget": 4},
    "top_k": {"top_k": 20, "temperature": 1.0},
    "top_p": {"top_p": 0.8, "temperature": 1.0},
    "truncate_prompt_tokens": {"truncate_prompt_tokens": 2},
    "truncation_side": {"truncation_side": "left", "truncate_prompt_tokens": 2},
    "use_beam_search": {"use_beam_search": True, "n": 2},
    "user": {"user": "one"},
    "vllm_xargs": {"vllm_xargs": {"selfspec_k": 0}},
    "watermarking": {"watermarking": True},
}
COMPLETION = {
    "echo": {"echo": True},
    "logprobs": {"logprobs": 2},
    "prompt_embeds": {"prompt_embeds": "AAAA"},
    "suffix": {"suffix": "x"},
}
CHAT_ONLY: dict[str, dict[str, Any]] = {
    "add_generation_prompt": {"add_generation_prompt": False},
    "chat_template": {"chat_template": TEMPLATE},
    "chat_template_kwargs": {"chat_template_kwargs": {"enable_thinking": False}},
    "continue_final_message": {"continue_final_message": True, "add_generation_prompt": False},
    "documents": {"documents": [{"text": "a"}]},
    "include_reasoning": {"include_reasoning": False},
    "logprobs": {"logprobs": True},
    "max_completion_tokens": {"max_completion_tokens": 3},
    "media_io_kwargs": {"media_io_kwargs": {}},
    "mm_processor_kwargs": {"mm_processor_kwargs": {}},
    "parallel_tool_calls": {"parallel_tool_calls": False},
    "reasoning_effort": {"reasoning_effort": "low"},
    "return_prompt_text": {"return_prompt_text": True},
    "tool_choice": {"tool_choice": "required", "tools": [TOOL], "max_tokens": 64},
    "tools": {"tools": [TOOL]},
    "top_logprobs": {"top_logprobs": 2, "logprobs": True},
}
ALWAYS = {"model", "prompt", "messages", "stream", "stream_options"}


@pytest.fixture(scope="module")
def server(model_dir, tmp_path_factory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("fields")
    shutil.copytree(model_dir("llama"), folder / "llama")
    save_tokenizer(folder / "llama", "<think>", "</think>")
    (folder / "template.jinja").write_text(TEMPLATE)
    words = [f"model={folder / 'llama'}", f"layer={LAYERS // 2}", "k=4", "model.dtype=float32"]
    options = ["--served-model-name", "tiny", "--reasoning-parser", "deepseek_r1", "--enable-auto-tool-choice"]
    options += ["--tool-call-parser", "hermes", "--chat-template", str(folder / "template.jinja")]
    with served(Path(folder), words, options) as (_, url, _):
        yield url


def ask(url: str, chat: bool, **fields: Any) -> httpx.Response:
    body = {"model": "tiny", **PLAIN, **fields}
    body |= {"messages": [{"role": "user", "content": "some words"}]} if chat else {"prompt": "some words"}
    return httpx.post(f"{url}/v1/{'chat/completions' if chat else 'completions'}", json=body, timeout=120)


def test_every_field_of_the_api_is_in_this_file():
    completion, chat = set(CompletionRequest.model_fields), set(ChatCompletionRequest.model_fields)
    assert completion - ALWAYS == {*BOTH, *COMPLETION}
    assert chat - completion - ALWAYS == {*CHAT_ONLY} - {"logprobs"}


def test_no_field_ends_the_server(server):
    plain = ask(server, False)
    want = plain.json()["choices"][0]["text"]
    failed = []
    for chat, cases in ((False, BOTH | COMPLETION), (True, BOTH | CHAT_ONLY)):
        for name, fields in cases.items():
            answer = ask(server, chat, **fields)
            if answer.status_code not in (200, 400):
                failed.append((chat, name, answer.status_code, answer.text[:200]))
    assert not failed
    assert ask(server, False).json()["choices"][0]["text"] == want


@pytest.mark.skipif(find_spec("locust") is None, reason="pip install 'selfspec[load]'")
def test_streamed_reasoning_and_calls_of_tools_are_output(server, tmp_path):
    message = [{"role": "user", "content": "some words"}]
    call = {"tool_choice": "required", "tools": [TOOL]}
    prompts = [{"messages": message}, {"messages": message, **call}]
    body = {"model": "tiny", **PLAIN, "max_tokens": 48, "stream": True, "stream_options": {"include_usage": True}}
    run = clients.run(Job(server, CHAT, body, prompts, clients=1, requests=2), tmp_path, check=lambda: None)
    assert not run.failed, [one.error for one in run.failed]
    parts = {one.number: len(one.events) for one in run.good}
    with httpx.stream("POST", f"{server}{CHAT}", json={**body, **prompts[0]}, timeout=120) as answer:
        lines = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
    said = [choice["delta"] for line in lines for choice in line["choices"]]
    assert any(delta.get("reasoning") for delta in said)  # a reasoning parser's word for it
    assert parts[0] == sum(bool(delta.get("reasoning") or delta.get("content")) for delta in said)
    assert parts[1] > 0
