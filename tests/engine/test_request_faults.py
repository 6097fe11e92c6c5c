"""Every field of a request, alone and beside others, in steps with drafts and without: right, or refused alone.

No request may end the engine for the others. The right values are a plain engine's, asked for one request at a time.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
from harness import Live, greedy, layer_skip, live, ragged_prompts, tokens
from models import LAYERS, VOCAB

pytestmark = pytest.mark.engine

EXIT, K, TOKENS = LAYERS // 2, 5, 24
WHOLE_PREFILLS = {"enable_chunked_prefill": False, "max_num_batched_tokens": 1024, "enable_prefix_caching": False}
ENGINE: dict[str, Any] = {"skip_tokenizer_init": False, "max_num_seqs": 32, **WHOLE_PREFILLS}

# Field of SamplingParams -> what a greedy request of TOKENS tokens says beside. `top_k` 1 takes the likeliest token.
FIELDS: dict[str, dict[str, Any]] = {
    "n": {"n": 1},
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": 1.0},
    "repetition_penalty": {"repetition_penalty": 1.4},
    "temperature": {"temperature": 1.0, "top_k": 1},
    "watermarking": {"watermarking": False},
    "top_p": {"temperature": 1.0, "top_p": 1e-6},
    "top_k": {"temperature": 0.7, "top_k": 1, "top_p": 0.9},
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
    "min_p": ({"temperature": 1.0, "min_p": 0.1}, "min_p"),
    "logit_bias": ({"logit_bias": {5: 2.0}}, "logit_bias"),
    "trace_decode_token_ids": ({"trace_decode_token_ids": [5, 6]}, "trace_decode_token_ids"),
    "thinking_token_budget": ({"thinking_token_budget": 4}, "thinking_token_budget"),
}
OF_VLLM = {"output_kind", "skip_clone", "output_text_buffer_length"}
"""Fields that vLLM's own front end sets."""


def request(name: str, drafts: bool = True) -> Any:
    from vllm.sampling_params import RepetitionDetectionParams, StructuredOutputsParams

    kinds = {"structured_outputs": StructuredOutputsParams, "repetition_detection": RepetitionDetectionParams}
    said = {key: kinds[key](**value) if key in kinds else value for key, value in FIELDS[name].items()}
    if not drafts:
        said["extra_args"] = {"selfspec_k": 0}
    return greedy(**{"max_tokens": TOKENS, **said})


def answer(output: Any) -> tuple[list[list[int]], list[Any]]:
    """Tokens of each sample, and log-probabilities: of each token a value by token id."""
    sampled = [list(sample.token_ids) for sample in output.outputs]
    given = [*(output.prompt_logprobs or ())]
    for sample in output.outputs:
        given += list(sample.logprobs or ())
    return sampled, [None if one is None else {id: value.logprob for id, value in one.items()} for one in given]


def same(left: tuple[Any, list[Any]], right: tuple[Any, list[Any]]) -> bool:
    if left[0] != right[0] or len(left[1]) != len(right[1]):
        return False
    for one, other in zip(left[1], right[1], strict=True):
        if (one is None) != (other is None) or (one and one.keys() != other.keys()):
            return False
        if one and not all(math.isclose(value, other[id], abs_tol=2e-4) for id, value in one.items()):
            return False
    return True


PROMPTS = dict(zip(FIELDS, ragged_prompts(len(FIELDS), VOCAB, seed=11), strict=True))


@pytest.fixture(scope="module")
def wanted(talking) -> dict[str, Any]:
    """What a plain engine answers to each, one at a time."""
    with live(talking, **ENGINE) as engine:
        return {name: answer(engine.generate([PROMPTS[name]], request(name))[0]) for name in FIELDS}


@pytest.fixture(scope="module", params=["greedy", "probabilistic"])
def drafting(request, talking, wanted):  # two engines of one process cannot live at the same time
    more = {} if request.param == "greedy" else {"draft_sample_method": "probabilistic"}
    with live(talking, layer_skip(EXIT, K, **more), **ENGINE) as engine:
        yield engine


def test_every_field_of_a_request_is_in_this_file():
    from vllm import SamplingParams

    fields = {name for name in SamplingParams.__struct_fields__ if not name.startswith("_")}
    assert fields == {*FIELDS, *REFUSED, *OF_VLLM}


@pytest.mark.parametrize("drafts", [True, False], ids=["with drafts", "without"])
def test_each_field_alone(drafting: Live, wanted, drafts):
    before = drafting.counts()
    wrong = [
        name for name in FIELDS
        if not same(answer(drafting.generate([PROMPTS[name]], request(name, drafts))[0]), wanted[name])
    ]  # fmt: skip
    assert not wrong
    made = drafting.counts() - before
    made.require_both_verdicts() if drafts else None
    assert drafts or not made.drafted


@pytest.mark.parametrize("drafts", [True, False], ids=["with drafts", "without"])
def test_each_field_beside_all_others(drafting: Live, wanted, drafts):
    outputs = drafting.generate(list(PROMPTS.values()), [request(name, drafts) for name in FIELDS])
    wrong = [name for name, output in zip(FIELDS, outputs, strict=True) if not same(answer(output), wanted[name])]
    assert not wrong


@pytest.mark.parametrize("top", [{"top_k": 20}, {"top_p": 0.8}, {"top_k": 20, "top_p": 0.8}, {}], ids=str)
@pytest.mark.parametrize("drafts", [True, False], ids=["with drafts", "without"])
def test_samples_stay_within_what_a_request_allows(drafting: Live, talking, top, drafts):
    """`top_k` alone, without drafts in the step, ended the engine: the largest of no rows was asked for."""
    extra = None if drafts else {"selfspec_k": 0}
    params = greedy(TOKENS, temperature=1.0, logprobs=20, extra_args=extra, **top)
    for prompts in ([PROMPTS["n"]], list(PROMPTS.values())[:6]):
        for output in drafting.generate(prompts, params):
            (sample,) = output.outputs
            assert len(sample.token_ids) == TOKENS
            for token, likeliest in zip(sample.token_ids, sample.logprobs, strict=True):
                if "top_k" in top:
                    assert token in sorted(likeliest, key=lambda one: -likeliest[one].logprob)[:20]
                assert likeliest[token].logprob > -math.inf


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_refused_alone(drafting: Live, wanted, name):
    from vllm.exceptions import VLLMClientError

    said, message = REFUSED[name]
    with pytest.raises((VLLMClientError, ValueError), match=message):
        drafting.generate([PROMPTS["n"]], greedy(TOKENS, **said))
    drafting.broken = False  # it was refused before it began
    assert same(answer(drafting.generate([PROMPTS["n"]], request("n"))[0]), wanted["n"])


def test_a_seed_gives_the_same_sample_again(drafting: Live):
    """Whatever was accepted for other requests in between, and whether they run beside it or not."""
    prompts = ragged_prompts(4, VOCAB, seed=12)
    seeded = [greedy(40, temperature=1.0, seed=seed, n=1 + seed % 2) for seed in range(4)]
    first = drafting.generate(prompts, seeded)
    before = drafting.counts()
    drafting.generate(prompts, greedy(40, temperature=2.0))  # little of which is accepted
    again = drafting.generate(prompts, seeded)
    (drafting.counts() - before).require_both_verdicts()
    one_by_one = [drafting.generate([prompt], params)[0] for prompt, params in zip(prompts, seeded, strict=True)]

    def samples(outputs: list[Any]) -> list[list[int]]:
        return [list(sample.token_ids) for output in outputs for sample in output.outputs]

    assert samples(first) == samples(again) == samples(one_by_one)
    assert tokens(first) != tokens(drafting.generate(prompts, greedy(40, temperature=1.0)))
