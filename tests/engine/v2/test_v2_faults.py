"""Faults planted in the V2 runner of a live engine are seen, and what they did leaves with them."""

from typing import Any

import pytest
from harness import Live, differing, greedy, layer_skip, live, ragged_prompts, tokens
from models import LAYERS, VOCAB
from selfspec_faults import v2

from selfspec_cli.vllm_plugin.planted.v2 import FAULTS

PROMPTS = [prompt for prompt in ragged_prompts(24, VOCAB, seed=9) if 56 < len(prompt) < 80][:4]
CHANGING = ("kv_slot", "accept_one_more", "gate_changes_output", "stale_after_preemption")
"""Faults after which greedy outputs are others."""
ELSEWHERE = ("biased_sampler",)
"""test_v2_sampling.py finds it: greedy outputs stay the model's own."""
FAULTY = "selfspec_cli.vllm_plugin.planted.worker.FaultyWorker"
SMALL: dict[str, Any] = {"max_num_seqs": 4, "kv_cache_memory_bytes": 9 * 2**16, "max_model_len": 256}
"""Nine blocks for four requests of three and four: some are thrown out and computed again."""


def generated(engine: Live) -> list[list[int]]:
    assert engine.llm.reset_prefix_cache()  # a fault leaves wrong keys and values
    return tokens(engine.generate(PROMPTS, greedy(28)))


@pytest.fixture(scope="module")
def plain(model_dir) -> list[list[int]]:
    with live(model_dir("llama"), **SMALL) as engine:
        return generated(engine)


@pytest.fixture(scope="module")
def drafting(model_dir, plain):
    spec = layer_skip(LAYERS // 2, 4, gate="maxp", tau=0.3)
    with live(model_dir("llama"), spec, worker_extension_cls=FAULTY, **SMALL) as engine:
        yield engine


@pytest.mark.parametrize("fault", CHANGING)
def test_a_fault_changes_outputs(drafting, plain, fault):
    before = drafting.metric("num_preemptions")
    drafting.call("early_exit_plant", fault)
    found = generated(drafting)
    drafting.call("early_exit_mend")
    assert drafting.metric("num_preemptions") > before
    assert differing(found, plain), f"{fault} was not seen"


def test_drafts_from_another_requests_context_are_accepted_less_and_change_nothing(drafting, plain):
    """The verify pass has keys and values of its own. Without a fault outputs are the plain engine's again."""
    before = drafting.counts()
    assert not differing(generated(drafting), plain)
    right = drafting.counts() - before
    drafting.call("early_exit_plant", "other_request")
    assert not differing(generated(drafting), plain)
    drafting.call("early_exit_mend")
    wrong = drafting.counts() - before - right
    assert wrong.accepted < 0.6 * right.accepted


def test_every_fault_is_here():
    assert {*CHANGING, *ELSEWHERE, "other_request"} == {*FAULTS, *v2.FAULTS}
