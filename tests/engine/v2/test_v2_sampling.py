"""Sampling on the V2 runner keeps plain decoding's distribution, with greedy drafts and with drawn ones.

The reference is exact: of each of the first tokens the probabilities of all 32, as in test_sampling.py. The first token
is the target's own, the others were drafted and verified. The same test must find a verifier that samples too sharply.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from harness import Live, greedy, layer_skip, live, ragged_prompts, tokens
from models import LAYERS, vocab_of
from scipy import stats
from transformers import AutoModelForCausalLM
from vllm import SamplingParams

from selfspec_cli.vllm_plugin.planted import v2

pytestmark = pytest.mark.engine

MODEL, TEMPERATURE, SEEDS, TOKENS = "llama_small_vocab", 0.8, 80, 3
VOCAB = vocab_of(MODEL)
PROMPT = ragged_prompts(4, VOCAB, seed=3)[1]
ACCEPT = 1e-3  # p-values of right engines are above it, of wrong ones below; seeds are fixed, so nothing flickers
ENGINE: dict[str, Any] = {"max_num_seqs": 40, "max_num_batched_tokens": 1024}
FAULTY = "selfspec_cli.vllm_plugin.planted.worker.FaultyWorker"


@pytest.fixture(scope="module")
def exact(model_dir) -> np.ndarray:
    """Probabilities [TOKENS, V] of each token, whatever stands before it, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(model_dir(MODEL), dtype=torch.float32).eval()

    @torch.no_grad()
    def after(texts: torch.Tensor) -> np.ndarray:
        logits = torch.cat([model(input_ids=part).logits[:, -1] for part in texts.split(256)])
        return (logits.double() / TEMPERATURE).softmax(-1).numpy()

    texts, weights, found = torch.tensor([PROMPT]), np.ones(1), []
    for _ in range(TOKENS):
        joint = weights[:, None] * after(texts)  # [texts, V]
        found.append(joint.sum(0))
        weights = joint.ravel()
        every = torch.arange(VOCAB)[:, None]
        texts = torch.cat([texts.repeat_interleave(VOCAB, 0), every.repeat(len(texts), 1)], 1)
    return np.stack(found)


def p_value(engine: Live, exact: np.ndarray) -> float:
    """Smallest p-value over the places of the hypothesis that SEEDS requests were sampled from the reference."""
    params = [
        SamplingParams(temperature=TEMPERATURE, seed=seed, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
        for seed in range(SEEDS)
    ]
    texts = np.array(tokens(engine.generate([PROMPT] * SEEDS, params)))
    found = []
    for place, probabilities in enumerate(exact):
        counts, expected = np.bincount(texts[:, place], minlength=VOCAB), probabilities * SEEDS
        cells = expected >= 5
        merged = [np.append(values[cells], values[~cells].sum()) for values in (counts, expected)]
        assert cells.sum() > 1, "too few populated cells to tell anything"
        found.append(float(stats.chisquare(*merged).pvalue))
    return min(found)


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_drafting_keeps_the_distribution(model_dir, exact, report: Callable[[str], None], monkeypatch, method):
    monkeypatch.setattr(v2, "BIAS", 4.0)  # so sharp that few samples show it
    spec = layer_skip(LAYERS, 3, draft_weights="int4", draft_sample_method=method)
    with live(model_dir(MODEL), spec, worker_extension_cls=FAULTY, **ENGINE) as engine:
        right = p_value(engine, exact)
        engine.counts().require_both_verdicts()
        engine.call("early_exit_plant", "biased_sampler")
        wrong = p_value(engine, exact)
        engine.call("early_exit_mend")
        mixed = [greedy(8, temperature=TEMPERATURE, seed=5), greedy(8)] * 2
        first, second, third, fourth = tokens(engine.generate([PROMPT] * 4, mixed))
    report(f"V2, {method} drafts: p = {right:.3f}; too sharp a verifier: p = {wrong:.2g}")
    assert wrong < ACCEPT < right
    assert second == fourth
    assert first == third != second
