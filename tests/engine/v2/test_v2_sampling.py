"""Sampling on the V2 runner keeps plain decoding's distribution, with greedy drafts and with drawn ones.

The reference is exact: of each of the first tokens the probabilities of all 32, as in test_sampling.py. The first token
is the target's own, the others were drafted and verified. The same test must find a verifier that samples too sharply.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from harness import Live, greedy, layer_skip, live, tokens
from models import LAYERS
from test_sampling import ACCEPT, MODEL, PROMPT, TEMPERATURE, VOCAB, exact, logits, of_three, p_exact

from selfspec_cli.vllm_plugin.planted import v2

SEEDS, TOKENS = 80, 3
CUT: dict[str, Any] = {"min_p": 0.2, "logit_bias": {3: 2.0, 7: -2.0, 11: 1.0}}
"""So strong that few samples show it. A token that min_p forbids must never come."""
ENGINE: dict[str, Any] = {"max_num_seqs": 40, "max_num_batched_tokens": 1024}
FAULTY = "selfspec_cli.vllm_plugin.planted.worker.FaultyWorker"


__all__ = ["exact", "logits"]  # the fixtures


def sample(engine: Live, **said: Any) -> np.ndarray:
    """First tokens [SEEDS, TOKENS] of seeded requests."""
    params = [greedy(TOKENS, temperature=TEMPERATURE, seed=seed, **said) for seed in range(SEEDS)]
    return np.array(tokens(engine.generate([PROMPT] * SEEDS, params)))


def p_value(texts: np.ndarray, exact: np.ndarray) -> float:
    """Smallest p-value over the places: that texts [SEEDS, TOKENS] were drawn from the probabilities [V, V, V]."""
    counts = [np.bincount(column, minlength=VOCAB) for column in texts.T]
    of_places = [exact.sum(others) for others in ((1, 2), (0, 2), (0, 1))]
    return min(p_exact(*both, least=1) for both in zip(counts, of_places, strict=True))


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_drafting_keeps_the_distribution(model_dir, exact, logits, report: Callable[[str], None], monkeypatch, method):
    monkeypatch.setattr(v2, "BIAS", 4.0)  # so sharp that few samples show it
    spec = layer_skip(LAYERS, 3, draft_weights="int4", draft_sample_method=method)
    with live(model_dir(MODEL), spec, worker_extension_cls=FAULTY, **ENGINE) as engine:
        right = p_value(sample(engine), exact)
        engine.counts().require_both_verdicts()
        before, texts = engine.counts(), sample(engine, **CUT)
        (engine.counts() - before).require_both_verdicts()
        engine.call("early_exit_plant", "biased_sampler")
        wrong = p_value(sample(engine), exact)
        engine.call("early_exit_mend")
        mixed = [greedy(8, temperature=TEMPERATURE, seed=5), greedy(8)] * 2
        first, second, third, fourth = tokens(engine.generate([PROMPT] * 4, mixed))
    report(f"V2, {method} drafts: p = {right:.3f}; too sharp a verifier: p = {wrong:.2g}")
    assert wrong < ACCEPT < right
    assert second == fourth
    assert first == third != second
    cut = of_three(logits, **CUT)
    chance = of_three(logits, logit_bias=CUT["logit_bias"])[cut > 0].sum() ** SEEDS
    assert cut[tuple(texts.T)].all() and chance < ACCEPT
    found = {name: p_value(texts, of) for name, of in (("with", cut), ("without", exact))}
    report(f"p with min_p and logit_bias: {found}; no token that min_p forbids came, by chance {chance:.2g}")
    assert found["without"] < ACCEPT < found["with"]
