"""Every field of a request on the V2 runner, beside all others: as plain decoding answers, or refused alone."""

from __future__ import annotations

from typing import Any

import pytest
from harness import Live, greedy, layer_skip, live
from models import LAYERS
from test_request_faults import FIELDS, PROMPTS, REFUSED, answer, request, same

pytestmark = pytest.mark.engine

TOKENS = 8
ENGINE: dict[str, Any] = {"skip_tokenizer_init": False, "max_num_seqs": 32, "enable_prefix_caching": False}


BY_VLLM = ["logprob_token_ids"]
"""Log-probabilities of chosen tokens: vLLM's rejection sampler gives none in steps with drafts, whoever drafts."""


def asked() -> list[Any]:
    """A request a field, of few tokens."""
    made = [request(name) for name in FIELDS]
    for params in made:
        params.max_tokens = min(params.max_tokens, TOKENS)
    return made


@pytest.fixture(scope="module")
def wanted(talking) -> dict[str, Any]:
    with live(talking, **ENGINE) as engine:
        return dict(zip(FIELDS, map(answer, engine.generate(list(PROMPTS.values()), asked())), strict=True))


@pytest.fixture(scope="module")
def drafting(talking, wanted):
    with live(talking, layer_skip(LAYERS // 2, 3), **ENGINE) as engine:
        yield engine


def test_each_field_beside_all_others(drafting: Live, wanted):
    outputs = drafting.generate(list(PROMPTS.values()), asked())
    wrong = [name for name, output in zip(FIELDS, outputs, strict=True) if not same(answer(output), wanted[name])]
    assert wrong == BY_VLLM
    drafting.counts().require_both_verdicts()


@pytest.mark.parametrize("name", ["min_p", "logit_bias", "thinking_token_budget", "trace_decode_token_ids"])
def test_what_is_refused_is_refused_alone(drafting: Live, wanted, name):
    from vllm.exceptions import VLLMClientError

    said, message = REFUSED[name]
    with pytest.raises((VLLMClientError, ValueError), match=message):
        drafting.generate([PROMPTS["n"]], greedy(TOKENS, **said))
    drafting.broken = False  # it was refused before it began
    assert same(answer(drafting.generate([PROMPTS["n"]], asked()[0])[0]), wanted["n"])
