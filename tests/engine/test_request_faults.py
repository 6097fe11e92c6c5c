"""Every field of a request, alone and beside others, in steps with drafts and without: right, or refused alone.

No request may end the engine for the others. The right values are a plain engine's, asked for one request at a time."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from harness import Live, greedy, layer_skip, live, ragged_prompts, tokens
from models import LAYERS, VOCAB
from request_fields import FIELDS, REFUSED
from vllm.exceptions import VLLMClientError
from vllm.sampling_params import RepetitionDetectionParams, StructuredOutputsParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

EXIT, K, TOKENS = LAYERS // 2, 5, 24
WHOLE_PREFILLS = {"enable_chunked_prefill": False, "max_num_batched_tokens": 1024, "enable_prefix_caching": False}
ENGINE: dict[str, Any] = {
    "skip_tokenizer_init": False,
    "max_num_seqs": 48,
    "reasoning_parser": "deepseek_r1",
    **WHOLE_PREFILLS,
}

MARKERS = THINKS, ENDS = VOCAB - 2, VOCAB - 1
"""Token ids of <think> and </think> in the tokenizer of the model that these tests run on."""
BUDGETS = (None, 5, 5, 0, 1, 7, 12, 3, None, 20)
"""`thinking_token_budget` of requests of one batch, two thirds of whose prompts end in <think>."""
NO_DRAFTS = {"extra_args": {"selfspec_k": 0}}
MODES = ("with drafts", "off by load", "off by request")


AVOIDING = {"extra_args": {"avoid": True}}


def avoid_the_last() -> type:
    """A logits processor of a user's own: requests that ask for it never write the same token twice in a row."""

    def avoid(written: list[int], logits: torch.Tensor) -> torch.Tensor:
        logits[written[-1:]] = -torch.inf
        logits[written[-2:-1]] += 3.0
        return logits

    class Avoid(AdapterLogitsProcessor):
        def is_argmax_invariant(self) -> bool:
            return False

        def new_req_logits_processor(self, params: Any) -> Any:
            return avoid if (params.extra_args or {}).get("avoid") else None

    return Avoid


def request(name: str, drafts: bool = True) -> Any:
    kinds = {"structured_outputs": StructuredOutputsParams, "repetition_detection": RepetitionDetectionParams}
    said = {key: kinds[key](**value) if key in kinds else value for key, value in FIELDS[name].items()}
    if not drafts:
        said |= NO_DRAFTS
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


PROMPTS = dict(zip(FIELDS, ragged_prompts(len(FIELDS), THINKS, seed=11), strict=True))
PROMPTS["thinking_token_budget"] = [*PROMPTS["thinking_token_budget"], THINKS]
THINKING = [text + [THINKS] * bool(n % 3) for n, text in enumerate(ragged_prompts(len(BUDGETS), THINKS, seed=5))]


def thinking(drafts: str = MODES[0], bias: float = 0.0, length: int = 40) -> list[Any]:
    """Requests with thinking budgets. bias: of both markers, so that thinking begins and ends by itself too; not where
    there is no budget, so that these draft on V1. length: tokens of each."""
    said: dict[str, Any] = NO_DRAFTS if drafts == MODES[2] else {}
    biased = {"logit_bias": dict.fromkeys(MARKERS, bias)} if bias else {}
    return [
        greedy(length, thinking_token_budget=budget, **said, **({} if budget is None else biased)) for budget in BUDGETS
    ]


GRAMMARS = ("[a-f]{3}-[0-9]{6,20}", "(yes|no), (a|b|c){2,9}", "[a-z ]{12}")


def answering(drafts: str = MODES[0]) -> list[Any]:
    """Requests whose answers obey a grammar once their thinking has ended: by itself, at a budget, or not at all."""
    said: dict[str, Any] = NO_DRAFTS if drafts == MODES[2] else {}
    return [
        greedy(
            28,
            ignore_eos=False,
            detokenize=True,
            structured_outputs=StructuredOutputsParams(regex=GRAMMARS[number % 3]),
            logit_bias=None if budget is None else {ENDS: (4.0, 2.5, 1.0)[number // 3 % 3]},
            thinking_token_budget=budget,
            **said,
        )
        for number, budget in enumerate(BUDGETS)
    ]


@pytest.fixture(scope="module")
def wanted(talking) -> dict[str, Any]:
    """What a plain engine answers to each, one at a time."""
    with live(talking, logits_processors=[avoid_the_last()], **ENGINE) as engine:
        found = {name: answer(engine.generate([PROMPTS[name]], request(name))[0]) for name in FIELDS}
        for bias in BIASES:
            found[f"thinking {bias}"] = tokens(engine.generate(THINKING, thinking(bias=bias)))
        found["answering"] = tokens(engine.generate(THINKING, answering()))
        found["avoiding"] = tokens(engine.generate([PROMPTS["n"]], greedy(TOKENS, **AVOIDING)))[0]
        return found


BIASES = (0.0, 4.0)


@pytest.fixture(scope="module", params=["greedy", "probabilistic"])
def drafting(request, talking, wanted):  # two engines of one process cannot live at the same time
    more = {} if request.param == "greedy" else {"draft_sample_method": "probabilistic"}
    with live(talking, layer_skip(EXIT, K, **more), logits_processors=[avoid_the_last()], **ENGINE) as engine:
        yield engine


def test_each_field_alone(drafting: Live, wanted):
    before = drafting.counts()
    wrong = [
        name for name in FIELDS if not same(answer(drafting.generate([PROMPTS[name]], request(name))[0]), wanted[name])
    ]
    assert not wrong
    (drafting.counts() - before).require_both_verdicts()


@contextmanager
def in_mode(engine: Live, drafts: str, table: str | None = "1:0") -> Iterator[None]:
    """The engine drafts inside, or not: its table of lengths may say 0."""
    before = engine.counts()
    engine.call("early_exit_set_length_table", table if drafts == MODES[1] else None)
    try:
        yield
    finally:
        engine.call("early_exit_set_length_table", None)
    made = engine.counts() - before
    made.require_both_verdicts() if drafts == MODES[0] else None
    assert drafts == MODES[0] or not made.drafted


@pytest.mark.parametrize("drafts", MODES)
def test_each_field_beside_all_others(drafting: Live, wanted, drafts):
    with in_mode(drafting, drafts):
        outputs = drafting.generate(list(PROMPTS.values()), [request(name, drafts != MODES[2]) for name in FIELDS])
    wrong = [name for name, output in zip(FIELDS, outputs, strict=True) if not same(answer(output), wanted[name])]
    assert not wrong


@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("drafts", MODES)
def test_thinking_ends_when_its_own_budget_does(drafting: Live, wanted, drafts, bias):
    """A step without drafts forced the end of one request's thinking on another, and so did a move into the row of a
    request that had ended. On V1 requests without a budget draft beside those that have one, which do not."""
    with in_mode(drafting, drafts):
        outputs = tokens(drafting.generate(THINKING, thinking(drafts, bias)))
    assert outputs == wanted[f"thinking {bias}"]
    assert bias or outputs[4][BUDGETS[4]] == ENDS  # its prompt ends in <think>, and nothing else ends it sooner


@pytest.mark.parametrize("drafts", MODES)
def test_a_grammar_begins_where_thinking_ends(drafting: Live, wanted, drafts):
    """Also inside drafts (vllm 36138): tokens behind the end of thinking are bound from the first one on."""
    with in_mode(drafting, drafts):
        outputs = tokens(drafting.generate(THINKING, answering(drafts)))
    assert outputs == wanted["answering"]
    assert sum(ENDS in output[:-4] for output in outputs) >= 4


def test_a_custom_logits_processor_acts_on_its_requests_and_the_others_draft(drafting: Live, wanted):
    assert tokens(drafting.generate([PROMPTS["n"]], greedy(TOKENS, **AVOIDING))) == [wanted["avoiding"]]
    before = drafting.counts()
    asked = [greedy(TOKENS, **AVOIDING), request("n"), greedy(TOKENS, **AVOIDING)]
    outputs = tokens(drafting.generate([PROMPTS["n"]] * 3, asked))
    assert outputs == [wanted["avoiding"], wanted["n"][0][0], wanted["avoiding"]]
    assert outputs[0] != outputs[1]
    (drafting.counts() - before).require_both_verdicts()
    before = drafting.counts()
    drafting.generate([PROMPTS["n"]] * 2, asked[::2])
    assert drafting.counts() == before


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_refused_alone(drafting: Live, wanted, name):
    said, message = REFUSED[name]
    with pytest.raises((VLLMClientError, ValueError), match=message):
        drafting.generate([PROMPTS["n"]], greedy(TOKENS, **said))
    drafting.broken = False  # it was refused before it began
    assert same(answer(drafting.generate([PROMPTS["n"]], request("n"))[0]), wanted["n"])
