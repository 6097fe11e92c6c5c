"""Fields of vLLM's SamplingParams, as the tests of both runners ask for them, and docs/limits.md lists them.

Nothing is imported here: the table of the page is made without an engine."""

from typing import Any

# Field of SamplingParams -> what a greedy request says with it. `top_k` 1 takes the likeliest token.
FIELDS: dict[str, dict[str, Any]] = {
    "n": {"n": 1},
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": 1.0},
    "repetition_penalty": {"repetition_penalty": 1.4},
    "temperature": {"temperature": 1.0, "top_k": 1},
    "watermarking": {"watermarking": False},
    "top_p": {"temperature": 1.0, "top_p": 1e-6},
    "top_k": {"temperature": 0.7, "top_k": 1, "top_p": 0.9},
    "min_p": {"temperature": 1.0, "min_p": 1.0},
    "logit_bias": {"logit_bias": {5: 6.0, 40: 6.0, 100: -100.0}},
    "thinking_token_budget": {"thinking_token_budget": 4},
    "seed": {"temperature": 1.3, "top_k": 1, "seed": 3},
    "stop": {"stop": ["e", "a"], "detokenize": True},
    "stop_token_ids": {"stop_token_ids": [*range(3, 40)]},
    "ignore_eos": {"ignore_eos": False},
    "max_tokens": {"max_tokens": 7},
    "min_tokens": {"min_tokens": 6, "stop_token_ids": [*range(3, 40)]},
    "logprobs": {"logprobs": 3},
    "prompt_logprobs": {"prompt_logprobs": 2},
    "logprob_token_ids": {"logprob_token_ids": [5, 9, 11, 200]},
    "flat_logprobs": {"flat_logprobs": True, "logprobs": 2},
    "detokenize": {"detokenize": True},
    "skip_special_tokens": {"skip_special_tokens": False, "detokenize": True},
    "spaces_between_special_tokens": {"spaces_between_special_tokens": False, "detokenize": True},
    "include_stop_str_in_output": {"include_stop_str_in_output": True, "stop": ["e"], "detokenize": True},
    "stream_interval": {"stream_interval": 3},
    "structured_outputs": {"structured_outputs": {"regex": "[abc]{12}"}, "detokenize": True},
    "allowed_token_ids": {"allowed_token_ids": [*range(20, 60)]},
    "extra_args": {"extra_args": {"selfspec_k": 2}},
    "bad_words": {"bad_words": ["a", "b"], "detokenize": True},
    "skip_reading_prefix_cache": {"skip_reading_prefix_cache": True},
    "repetition_detection": {"repetition_detection": {"max_pattern_size": 2, "min_pattern_size": 1, "min_count": 2}},
    "routed_experts_prompt_start": {"routed_experts_prompt_start": 1},
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "prompt_logprob_token_ids": ({"prompt_logprob_token_ids": [[5, 6]]}, "requires the V2 model runner"),
    "prompt_logprob_start": ({"prompt_logprob_start": 1}, "prompt_logprob_start requires prompt_logprob_token_ids"),
    "trace_decode_token_ids": ({"trace_decode_token_ids": [5, 6]}, "trace_decode_token_ids"),
}
OF_VLLM = {"output_kind", "skip_clone", "output_text_buffer_length"}
"""Fields that vLLM's own front end sets."""

V2_FIELDS = {"prompt_logprob_token_ids": 0, "prompt_logprob_start": 1}
"""Of those that are refused on V1, what V2 serves -> the first place of the prompt whose scores are asked for."""
NOTES = {
    "extra_args": "selfspec_k, selfspec_threshold, and what a custom logits processor reads",
    "prompt_logprob_start": "vLLM: with prompt_logprob_token_ids alone",
    "prompt_logprob_token_ids": "vLLM: requires the V2 model runner",
    "thinking_token_budget": "without a reasoning parser vLLM refuses it, plain or not",
    "trace_decode_token_ids": "vLLM: not with speculative decoding; it replays a given text",
    "watermarking": "true is refused where the engine has no watermark, and watermarks are refused with early exit",
}
"""What docs/limits.md says of a field besides."""
