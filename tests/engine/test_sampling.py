"""Sampling at temperature 0.8 is lossless in distribution: the first three generated tokens over 2,048 seeds.

The reference is exact: the model is small enough (32 tokens) to enumerate all 32^3 continuations. Each engine's sample
is compared with it (chi-square, cells with fewer than five expected merged), which has power: it must reject
temperature 0.9 and the lossy method `skip`.
`make nightly` takes 4,096 seeds. tests/unit/test_reference.py has the exact distribution of the algorithm itself."""

import os
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
import torch
from exit_heads import lsq_head
from harness import Live, greedy, layer_skip, live, ragged_prompts
from models import LAYERS, vocab_of
from scipy import stats
from transformers import AutoModelForCausalLM

from selfspec_cli.early_exit.artifact import save_head
from selfspec_cli.early_exit.head_metadata import HeadMetadata

SEEDS = int(os.environ.get("SELFSPEC_SEEDS", "2048"))
TEMPERATURE = 0.8
ACCEPT = 1e-3  # p-values of right engines are above it, of wrong ones below; seeds are fixed, so nothing flickers
MODEL = "llama_small_vocab"
VOCAB = vocab_of(MODEL)
PROMPT = ragged_prompts(4, VOCAB, seed=3)[1]
EXIT = LAYERS // 2
# A plain vLLM 0.32 cannot chunk the prefill of a request with a seed on the CPU: its runner rewinds the generator,
# and one of a CPU has no offset.
WHOLE_PREFILLS = {"enable_chunked_prefill": False, "max_num_batched_tokens": 1024}


def engine_of(path: Any, spec: dict[str, Any] | None = None) -> AbstractContextManager[Live]:
    return live(path, spec, **WHOLE_PREFILLS, max_num_seqs=128, kv_cache_memory_bytes=2**28)


def sample(engine: Live, temperature: float = TEMPERATURE, **said: Any) -> np.ndarray:
    """Counts [V, V, V] of the first three tokens over SEEDS requests, each with a seed of its own."""
    params = [greedy(3, temperature=temperature, seed=seed, **said) for seed in range(SEEDS)]
    counts = np.zeros((VOCAB,) * 3)
    outputs = engine.generate([PROMPT] * SEEDS, params)
    for triple, count in Counter(tuple(output.outputs[0].token_ids) for output in outputs).items():
        counts[triple] = count
    return counts


@pytest.fixture(scope="module")
@torch.no_grad()
def logits(model_dir) -> list[torch.Tensor]:
    """Of the first, second and third token after the prompt and every token before: [V], [V, V], [V, V, V]."""
    model = AutoModelForCausalLM.from_pretrained(model_dir(MODEL), dtype=torch.float32).eval()
    prompt, every = torch.tensor([PROMPT]), torch.arange(VOCAB)[:, None]
    one = torch.cat([prompt.expand(VOCAB, -1), every], 1)
    two = torch.cat([one.repeat_interleave(VOCAB, 0), every.repeat(VOCAB, 1)], 1)
    found = [
        torch.cat([model(input_ids=part).logits[:, -1] for part in prefixes.split(256)])
        for prefixes in (prompt, one, two)
    ]
    return [one.double().view(*[VOCAB] * (place + 1)) for place, one in enumerate(found)]


def of_three(
    logits: list[torch.Tensor], min_p: float = 0.0, logit_bias: Mapping[int, float] | None = None
) -> np.ndarray:
    """Probabilities [V, V, V] of the first three tokens at TEMPERATURE."""
    added = torch.zeros(VOCAB)
    for token, value in (logit_bias or {}).items():
        added[token] = value
    probs = [((one + added) / TEMPERATURE).softmax(-1) for one in logits]
    kept = [one.where(one >= min_p * one.amax(-1, keepdim=True), 0.0) for one in probs]
    first, second, third = (one / one.sum(-1, keepdim=True) for one in kept)
    return (first[:, None, None] * second[:, :, None] * third).numpy()


@pytest.fixture(scope="module")
def exact(logits) -> np.ndarray:
    """Probabilities [V, V, V] of the first three tokens at TEMPERATURE, by transformers."""
    return of_three(logits)


@pytest.fixture(scope="module")
def plain(model_dir) -> dict[float, np.ndarray]:
    """What one engine without drafts gave at each of two temperatures."""
    with engine_of(model_dir(MODEL)) as engine:
        return {temperature: sample(engine, temperature=temperature) for temperature in (TEMPERATURE, 0.9)}


def p_exact(counts: np.ndarray, probabilities: np.ndarray, least: int = 30) -> float:
    """P-value of the hypothesis that `counts` were drawn from `probabilities`. least: cells that are not merged."""
    expected = probabilities.ravel() * counts.sum()
    cells = expected >= 5
    assert cells.sum() > least, "too few populated cells to tell anything"
    merged = [values[cells] for values in (counts.ravel(), expected)]
    if expected[~cells].sum():
        merged = [np.append(values[cells], values[~cells].sum()) for values in (counts.ravel(), expected)]
    return float(stats.chisquare(*merged).pvalue)


def check(name: str, counts: np.ndarray, exact: np.ndarray, report) -> None:
    p = p_exact(counts, exact)
    report(f"{name}: p = {p:.3f} against exact")
    assert p > ACCEPT


def test_the_plain_engine_has_the_exact_distribution(plain, exact, report):
    assert exact.sum() == pytest.approx(1)
    check("plain engine", plain[TEMPERATURE], exact, report)


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_drafting_keeps_the_distribution(model_dir, exact, report, method):
    """Without a gate and with one. Greedy requests beside sampled ones, and seeds that repeat, are in
    test_request_faults.py; drafts with min_p and logit_bias are V2's (v2/test_v2_sampling.py)."""
    with engine_of(model_dir(MODEL), layer_skip(EXIT, 5, draft_sample_method=method)) as engine:
        engine.call("early_exit_set_draft_length", 3)
        for gate, threshold in (("none", None), ("maxp", 0.5)):
            engine.call("early_exit_set_gate", gate, threshold)
            before = engine.counts()
            check(f"{method} drafts, gate {gate}", sample(engine), exact, report)
            (engine.counts() - before).require_both_verdicts()


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_free_drafts_keep_the_distribution(model_dir, exact, report, method):
    """The prompt holds each token several times, so that drafts are copied from it, alone and behind the model's own. A
    verifier that takes them for drawn ones accepts them too often, which the reference finds."""
    spec = layer_skip(EXIT, 3, free_drafts=5, draft_sample_method=method)
    with engine_of(model_dir(MODEL), spec) as engine:
        engine.fix_times()
        engine.draft_also_what_does_not_pay()
        copy_as_if_alone(engine.drafter.free)
        check(f"free and {method} drafts", sample(engine), exact, report)
        engine.counts().require_both_verdicts()
        counted = engine.call("early_exit_counters")
        assert 0 < counted["free_accepted"] < counted["free_drafted"]
        assert counted["drafted"] > 1000
        if method == "probabilistic":
            doubt_copies(engine.drafter)
            wrong = p_exact(sample(engine), exact)
            report(f"free drafts that the verifier takes for drawn: p = {wrong:.2g} against exact")
            assert wrong < ACCEPT


def copy_as_if_alone(free: Any) -> None:
    """A draft step counts whole for each request, so that copies are made which do not pay for many."""
    begin = free.begin
    free.begin = lambda *given: begin(*given[:-1], given[-1] * len(given[2]))


def doubt_copies(drafter: Any) -> None:
    """A fault: copied tokens, which are sure to be drafted, are verified as if they had been drawn with 0.02."""
    stack = drafter._stack_probs
    drafter._stack_probs = lambda *given: stack(*given).where(stack(*given) < 1, 0.02)


def test_drafts_over_half_the_vocabulary_keep_the_distribution(model_dir, exact, report, tmp_path):
    """Over every other token: drafts cannot be any token, and their distribution has zeros."""
    path, ids = model_dir(MODEL), torch.arange(0, VOCAB, 2)
    weight = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).lm_head.weight.detach()[ids]
    head = lsq_head(weight + 0.05 * torch.randn(weight.shape), None, ids)
    about = HeadMetadata(kind="lsq", layer=EXIT, hidden=64, vocab_size=VOCAB, draft_vocab="v16-half")
    file = str(save_head(tmp_path / "lsq.safetensors", head, about))
    with engine_of(path, layer_skip(EXIT, 3, draft_sample_method="probabilistic", head_path=file)) as engine:
        check("probabilistic drafts over half the vocabulary", sample(engine), exact, report)
        engine.counts().require_both_verdicts()


def test_power(model_dir, plain, exact, report):
    """The exact reference finds that a temperature of 0.9, and a draft that nobody verified, are something else."""
    with engine_of(model_dir(MODEL), {"method": "skip", "layer_skip": EXIT}) as engine:
        wrong = {"temperature 0.9": plain[0.9], "method skip": sample(engine)}
    for name, counts in wrong.items():
        p = p_exact(counts, exact)
        report(f"{name}: p = {p:.2g} against exact")
        assert p < ACCEPT
