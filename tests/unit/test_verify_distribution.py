"""The tests of distributions: right samples pass, wrong ones do not, and the stated power is what it says."""

import numpy as np
import pytest

from selfspec_cli.stages.verify import sampling
from selfspec_cli.stages.verify.sampling import ALPHA, Drawn, Sample, compare

VOCAB, LENGTH = 24, 5
CHAIN = np.random.default_rng(7).normal(size=(VOCAB, VOCAB)) * 2.0


def probabilities(sharpness: float = 1.0) -> np.ndarray:
    logits = CHAIN * sharpness
    found = np.exp(logits - logits.max(1, keepdims=True))
    return found / found.sum(1, keepdims=True)


def sample(count: int, seed: int, sharpness: float = 1.0) -> Sample:
    """Texts of a Markov chain that begins with token 0; scores are those of the chain of sharpness 1."""
    draw, chain, true = np.random.default_rng(seed), probabilities(sharpness), probabilities()
    last, tokens, scores = np.zeros(count, dtype=int), [], np.zeros(count)
    for _ in range(LENGTH):
        following = (chain[last].cumsum(1) > draw.random((count, 1))).argmax(1)
        scores += np.log(true[last, following]) / LENGTH
        tokens.append(following)
        last = following
    return Sample(np.stack(tokens, 1), scores)


def test_right_samples_are_not_told_apart():
    ps = [compare(sample(200, 2 * seed), sample(200, 2 * seed + 1), seed)["p"] for seed in range(20)]
    assert min(ps) > ALPHA
    assert 0.2 < np.mean(ps) < 0.8


@pytest.mark.slow
@pytest.mark.parametrize("sharpness", [1.4, 0.7])
def test_a_sampler_that_is_too_sharp_or_too_flat_is(sharpness):
    found = compare(sample(256, 1, sharpness), sample(256, 2))
    assert found["p"] < ALPHA
    assert (found["shift"] > 0) == (sharpness > 1)


@pytest.mark.slow
def test_another_distribution_of_the_same_likelihood_is():
    """Swapped tokens change no score that is computed by the wrong sampler itself; the table sees them."""
    wrong, right = sample(512, 1), sample(512, 2)
    swapped = Sample((wrong.tokens + 1) % VOCAB, wrong.scores)
    found = compare(swapped, right)
    assert found["p_scores"] > 0.01
    assert found["p_table"] < ALPHA


@pytest.mark.slow
def test_the_power_is_what_it_says():
    first, second = sample(256, 11), sample(256, 12)
    share = sampling.detectable(first, second)
    assert share is not None and share < 0.5
    best = first.tokens[first.scores.argmax()], first.scores.max()
    caught = 0
    for seed in range(4):
        ours = sample(256, 100 + seed)
        hit = np.random.default_rng(seed).random(256) < share * 1.5
        ours.tokens[hit], ours.scores[hit] = best
        caught += compare(ours, sample(256, 200 + seed))["p"] < ALPHA
    assert caught >= 3
    assert sampling.detectable(sample(6, 1), sample(6, 2)) is None


def test_the_exact_distribution():
    chain = probabilities()
    pairs = chain[0][:, None] * chain
    known = pairs[:, :, None] * chain
    assert known.sum() == pytest.approx(1)
    assert sampling.exact_p(sample(4096, 5).tokens, known) > 0.001
    assert sampling.exact_p(sample(4096, 5, 1.3).tokens, known) < 1e-6
    assert sampling.exact_p(sample(4096, 5).tokens, pairs) > 0.001
    assert sampling.exact_p(sample(8, 5).tokens, known) is None
    impossible = known.copy()
    impossible[tuple(sample(1, 3).tokens[0, :3])] = 0
    assert sampling.exact_p(sample(1, 3).tokens, impossible) == 0.0


def test_temperature_min_p_top_k_and_top_p():
    logs = np.log([0.5, 0.25, 0.15, 0.1])
    assert sampling.processed(logs, {"temperature": 1.0}) == pytest.approx([0.5, 0.25, 0.15, 0.1])
    assert sampling.processed(logs, {"top_k": 2}) == pytest.approx([2 / 3, 1 / 3, 0, 0])
    assert sampling.processed(logs, {"top_p": 0.8}) == pytest.approx([5 / 9, 2.5 / 9, 1.5 / 9, 0])
    assert sampling.processed(logs, {"top_p": 0.4}) == pytest.approx([1, 0, 0, 0])
    assert sampling.processed(logs, {"min_p": 0.25}) == pytest.approx([5 / 9, 2.5 / 9, 1.5 / 9, 0])
    assert sampling.processed(logs, {"min_p": 0.25, "temperature": 0.5}) == pytest.approx([0.8, 0.2, 0, 0])
    squared = np.array([0.25, 0.0625, 0.0225, 0.01])
    assert sampling.processed(logs, {"temperature": 0.5}) == pytest.approx(squared / squared.sum())


def test_equal_tokens_at_the_cut_count_together():
    """Which of them top-p keeps is up to the sort, so a text with another one is no fault."""
    logs = np.log([0.4, 0.3, 0.1, 0.1, 0.1])

    def cut(top_p):
        first = sampling.processed(logs, {"top_p": top_p})
        return first, sampling.at_the_cut(logs, first)

    first, tied = cut(0.85)
    assert tied.tolist() == [False, False, True, True, True]
    assert not cut(0.95)[1].any()  # all of them are kept
    assert not cut(0.5)[1].any()
    other = [0, 1, 2, 3, 4]
    other[int(np.flatnonzero(tied & (first > 0))[0])] = int(np.flatnonzero(tied & (first <= 0))[0])
    known = first[:, None] * np.full((5, 5), 0.2)
    draw = np.random.default_rng(0)
    texts = np.stack([draw.choice(5, 2048, p=first), draw.integers(0, 5, 2048)], 1)
    swapped = np.stack([np.array(other)[texts[:, 0]], texts[:, 1]], 1)
    among = np.broadcast_to(tied[:, None], known.shape)
    assert sampling.exact_p(texts, known, among) == sampling.exact_p(swapped, known, among) > 0.001
    assert sampling.exact_p(swapped, known) == 0.0
    texts[:200, 0] = texts[200:400, 0] = 2  # too many of them are one all the same
    assert sampling.exact_p(texts, known, among) < 1e-6


def test_distance_is_the_share_of_texts_that_would_have_to_change():
    ours = np.array([[1], [1], [2], [2]])
    assert sampling.distance(ours, np.array([[1], [2], [2], [2]])) == pytest.approx(0.25)
    assert sampling.distance(ours, ours[::-1]) == 0


def test_where_plain_decoding_draws_one_text_the_arm_must_draw_it_too():
    """Random weights of a Gemma 3 were so sure of themselves, and their verdict was that nothing was shown."""
    one = Drawn(Sample(np.ones((384, 8), dtype=int), np.full(384, -0.1)))
    row = sampling.judge("temperature 0.8", one, [one, one], None)
    assert row["verdict"] == "same"
    assert "one text every time" in row["note"]

    tokens, scores = one.sample.tokens.copy(), one.sample.scores.copy()
    tokens[:40, 3], scores[:40] = 7, -2.0
    row = sampling.judge("temperature 0.8", Drawn(Sample(tokens, scores)), [one, one], None)
    assert row["verdict"] == "differs"
