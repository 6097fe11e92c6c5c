"""Every field of a request on the V2 runner, beside all others: as plain decoding answers, or refused alone."""

from typing import Any

import numpy as np
import pytest
from harness import Live, greedy, layer_skip, live, tokens
from models import LAYERS
from request_fields import FIELDS, REFUSED, V2_FIELDS
from test_request_faults import (
    BIASES,
    ENGINE,
    MODES,
    PROMPTS,
    THINKING,
    answer,
    answering,
    in_mode,
    request,
    same,
    test_a_grammar_begins_where_thinking_ends,
    thinking,
)
from vllm.exceptions import VLLMClientError

__all__ = ["test_a_grammar_begins_where_thinking_ends"]  # with the fixtures of this file

TOKENS, THOUGHT = 8, 26  # few after the longest budget
TEXTS = [*PROMPTS.values(), *[PROMPTS["n"]] * len(V2_FIELDS)]
NAMES = [*FIELDS, *V2_FIELDS]


def asked(drafts: str = MODES[0]) -> list[Any]:
    """A request a field, of few tokens."""
    made = [request(name, drafts != MODES[2]) for name in FIELDS]
    more = {"extra_args": {"selfspec_k": 0}} if drafts == MODES[2] else {}
    for start in V2_FIELDS.values():
        rows = [[5, 6]] * (len(PROMPTS["n"]) - 1 - start)
        made.append(greedy(TOKENS, prompt_logprob_token_ids=rows, prompt_logprob_start=start or None, **more))
    for params in made:
        params.max_tokens = min(params.max_tokens, TOKENS)
    return made


def prompt_scores(outputs: list[Any]) -> list[Any]:
    """What `prompt_logprob_token_ids` are answered with, rounded."""
    found = [output.prompt_token_id_logprobs for output in outputs]
    return [None if one is None else np.round(one, 3).tolist() for one in found]


@pytest.fixture(scope="module")
def wanted(talking) -> dict[str, Any]:
    with live(talking, **ENGINE) as engine:
        outputs = engine.generate(TEXTS, asked())
        found: dict[str, Any] = dict(zip(NAMES, map(answer, outputs), strict=True))
        found["scores"] = prompt_scores(outputs)
        for bias in BIASES:
            found[f"thinking {bias}"] = tokens(engine.generate(THINKING, thinking(bias=bias, length=THOUGHT)))
        found["answering"] = tokens(engine.generate(THINKING, answering()))
        return found


@pytest.fixture(scope="module")
def drafting(talking, wanted):
    with live(talking, layer_skip(LAYERS // 2, 3), **ENGINE) as engine:
        yield engine


@pytest.mark.parametrize("drafts", MODES)
def test_each_field_beside_all_others(drafting: Live, wanted, drafts):
    with in_mode(drafting, drafts):
        outputs = drafting.generate(TEXTS, asked(drafts))
    wrong = [name for name, output in zip(NAMES, outputs, strict=True) if not same(answer(output), wanted[name])]
    assert not wrong
    assert prompt_scores(outputs) == wanted["scores"]
    assert sum(one is not None for one in wanted["scores"]) == len(V2_FIELDS)


@pytest.mark.parametrize(("drafts", "bias"), [(MODES[0], BIASES[0]), *((mode, BIASES[1]) for mode in MODES)])
def test_thinking_ends_when_its_own_budget_does(drafting: Live, wanted, drafts, bias):
    with in_mode(drafting, drafts):
        assert tokens(drafting.generate(THINKING, thinking(drafts, bias, THOUGHT))) == wanted[f"thinking {bias}"]


def test_what_is_refused_is_refused_alone(drafting: Live, wanted):
    said, message = REFUSED["trace_decode_token_ids"]
    with pytest.raises((VLLMClientError, ValueError), match=message):
        drafting.generate([PROMPTS["n"]], greedy(TOKENS, **said))
    drafting.broken = False  # it was refused before it began
    assert same(answer(drafting.generate([PROMPTS["n"]], asked()[:1])[0]), wanted["n"])
