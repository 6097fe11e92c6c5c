"""LoRA requests beside early exit: drafts are made without the adapter, and each output is the adapted model's own."""

from typing import Any

import pytest
from harness import Live, greedy, layer_skip, live, ragged_prompts, tokens
from models import LAYERS, VOCAB
from more_models import RANK, save_adapter
from vllm.lora.request import LoRARequest

pytestmark = pytest.mark.engine

# Few and short: on the CPU a step with adapters takes ten times as long as one without.
PROMPTS, LENGTH = ragged_prompts(6, VOCAB, seed=3), 32
# One slot more than adapters: on the CPU vLLM gives requests without one, beside others, what the last slot holds.
LORA = {"enable_lora": True, "max_loras": 3, "max_lora_rank": RANK}
WITH = [None, "one", "two"] * 2
"""The adapter of each request, alternating."""


@pytest.fixture(scope="module")
def adapters(model_dir, tmp_path_factory) -> dict[str | None, Any]:
    root, model = tmp_path_factory.mktemp("adapters"), model_dir("llama")
    made = {
        name: LoRARequest(name, number, str(save_adapter(root / name, model, number)))
        for number, name in enumerate(("one", "two"), 1)
    }
    return {None: None, **made}


def generated(engine: Live, adapters: dict[str | None, Any], names: list[str | None]) -> list[list[int]]:
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    chosen = [adapters[name] for name in names]
    return tokens(engine.llm.generate(prompts, greedy(LENGTH), lora_request=chosen, use_tqdm=False))


@pytest.fixture(scope="module")
def want(model_dir, adapters) -> list[list[int]]:
    """What the plain engine generates, each request with its own adapter."""
    with live(model_dir("llama"), **LORA) as engine:
        own = generated(engine, adapters, WITH)
        plain = generated(engine, adapters, [None] * len(PROMPTS))
    moved = [got != without for got, without in zip(own, plain, strict=True)]
    assert moved == [name is not None for name in WITH], "the adapters change nothing, or what is not theirs"
    return own


@pytest.mark.parametrize("spec", [{}, {"draft_weights": "int8"}], ids=["shared", "int8"])
def test_each_request_has_the_output_of_its_own_adapter(model_dir, adapters, want, spec):
    with live(model_dir("llama"), layer_skip(LAYERS // 2, 3, **spec), **LORA) as engine:
        assert generated(engine, adapters, WITH) == want
        mixed = engine.counts()
        mixed.require_both_verdicts()
        assert generated(engine, adapters, ["two"] * len(PROMPTS))[2::3] == want[2::3]
        (engine.counts() - mixed).require_both_verdicts()
