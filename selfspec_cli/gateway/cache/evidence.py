"""How likely an entry's answer is right for a question: what all verdicts say, and then what the entry's own say.

Two steps. A logistic regression on `features` over all verdicts of a tenant gives a score, in logits. Each entry then
has
a threshold of its own on that score: a posterior over a grid of thresholds, from the verdicts of this entry and from a
prior that is learnt from all entries (empirical Bayes), so that one or two verdicts already move an entry, and an entry
without any has the threshold of the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import log

import numpy as np

from selfspec_cli.gateway.cache.text import content, places, stem, tokens
from selfspec_cli.gateway.cache.words import MULTIPLIERS, REQUEST_WORDS, UNITS

FEATURES = (
    "one",
    "cosine",
    "unmatched words",
    "doubtful words",
    "worst word",
    "worst word of the better text",
    "words that changed places",
)
RIDGE = np.array([0.5, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0])
SIGNS = np.array([0, 1, 0, -1, -1, -1, -1])  # a weight of the other sign is held to be chance, and 0
FIRST_WEIGHTS = np.array(
    [0.1, 1.5, 1.2, -0.3, -1.0, -0.2, -0.4]
)  # before any verdict: those of the pairs that the guards were made with
THRESHOLDS = np.linspace(-6.0, 8.0, 29)  # logits
NOISE = np.array([0.0, 0.02, 0.1, 0.4])  # share of an entry's verdicts that no threshold explains
FAR, NEAR = 0.3, 0.9  # cosines of two questions at which a verdict on one counts for nothing and in full for the other
LABEL_FLOOR = 1e-4
BLAME = 0.7  # log odds below the most doubted word within which a word is blamed too


HARMLESS = frozenset(stem(word) for word in REQUEST_WORDS)
HARMLESS_VERDICTS = 3  # right verdicts that a word of a request starts with


@dataclass
class Lexicon:
    """Of each word: in how many verdicts of either kind it was in one of the two texts only."""

    right: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(HARMLESS, HARMLESS_VERDICTS)))
    wrong: Counter[str] = field(default_factory=Counter)

    def add(self, words: Iterable[str], was_right: bool) -> None:
        """A right verdict speaks for all words; a wrong one against those that were doubted most before it, because
        one word is enough to make an answer wrong and the others have nothing to do with it.
        """
        if was_right:
            self.right.update(words)
        else:
            doubts = {word: self.doubt(word) for word in words}
            self.wrong.update(word for word, doubt in doubts.items() if doubt >= max(doubts.values()) - BLAME)

    def doubt(self, word: str) -> float:
        """The log odds that a verdict was wrong where `word` was in one text only; 0 for a word that was in none."""
        return log((self.wrong[word] + 0.5) / (self.right[word] + 0.5))


def unmatched(a: str, b: str) -> tuple[frozenset[str], frozenset[str]]:
    """The stems of words that only `a` has, and those that only `b` has; numbers, units and dates are the guards'
    matter.
    """
    first, second = set(content(a)), set(content(b))
    ignored = {
        word
        for text in (a, b)
        for word, (_, kind) in places(text).items()
        if kind.startswith(("unit", "date", "number"))
    }
    ignored |= {stem(t.word) for text in (a, b) for t in tokens(text) if t.word in UNITS or t.word in MULTIPLIERS}
    return frozenset(first - second - ignored), frozenset(second - first - ignored)


def changed_places(a: str, b: str) -> int:
    """How many pairs of words that both texts have, of the same kind (names, units, numbers, dates, others), stand the
    other way round in the second.
    """
    first, second = places(a), places(b)
    shared = [word for word in first if word in second and word not in HARMLESS]
    count = 0
    for i, one in enumerate(shared):
        for other in shared[i + 1 :]:
            alike = first[one][1] == first[other][1]
            count += alike and (first[one][0] < first[other][0]) != (second[one][0] < second[other][0])
    return count


@dataclass(frozen=True)
class Comparison:
    """What the texts of a question and an entry have to do with each other.

    Attributes:
        only_asked, only_cached: `unmatched` of the two.
        moved: `changed_places` of the two.
    """

    only_asked: frozenset[str]
    only_cached: frozenset[str]
    moved: int

    @property
    def words(self) -> frozenset[str]:
        """Words that one of the two texts has."""
        return self.only_asked | self.only_cached


def compare(asked: str, cached: str) -> Comparison:
    return Comparison(*unmatched(asked, cached), changed_places(asked, cached))


def features(cosine: float, texts: Comparison, lexicon: Lexicon) -> np.ndarray:
    """What the regression sees of a question and an entry, in the order of `FEATURES`, float64 of shape (7,).

    Args:
        cosine: of the two embeddings.
    """
    sides = [[lexicon.doubt(word) for word in side] for side in (texts.only_asked, texts.only_cached)]
    doubtful = sum(doubt > -1 for side in sides for doubt in side)  # not even one verdict speaks for them
    worst = [min(max(side, default=-4.0), 2.0) for side in sides]
    words = min(len(texts.words), 12) / 4
    moved = min(texts.moved, 2)
    return np.array([1.0, (cosine - 0.85) * 10, words, min(doubtful, 4), max(worst), min(worst), moved])


def fit(rows: np.ndarray, right: np.ndarray, steps: int = 12) -> np.ndarray:
    """The weights of the ridge logistic regression, by Newton's method.

    Args:
        rows: features, shape (verdicts, 7).
        right: 1 for a right entry and 0 for a wrong one, shape (verdicts,).
    """
    free = np.ones(len(FEATURES), dtype=bool)
    weights = _newton(rows, right, free, steps)
    while (against := free & (SIGNS * weights < 0)).any():
        free &= ~against
        weights = _newton(rows, right, free, steps)
    return weights


def _newton(rows: np.ndarray, right: np.ndarray, free: np.ndarray, steps: int) -> np.ndarray:
    """The weights of the features that are free; the others are 0."""
    every, rows = np.zeros(len(free)), rows[:, free]
    start, ridge = FIRST_WEIGHTS[free], RIDGE[free]
    weights = start.copy()
    for _ in range(steps):
        chance = _sigmoid(rows @ weights)
        gradient = rows.T @ (right - chance) - ridge * (weights - start)
        curvature = (rows * (chance * (1 - chance))[:, None]).T @ rows + np.diag(ridge)
        step = np.linalg.solve(curvature + 1e-9 * np.eye(len(weights)), gradient)
        weights = weights + step * min(1.0, 4.0 / max(np.abs(step).max(), 1e-9))
    every[free] = weights
    return every


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-np.clip(x, -30, 30)))


def right_given_threshold(score: float | np.ndarray) -> np.ndarray:
    """P(right | score, threshold, noise) on the grid, shape (..., thresholds * noises)."""
    sharp = _sigmoid(np.asarray(score)[..., None] - THRESHOLDS)
    noisy = NOISE[:, None] * 0.5 + (1 - NOISE[:, None]) * sharp[..., None, :]
    chance = noisy.reshape(*noisy.shape[:-2], -1)
    return np.clip(chance, LABEL_FLOOR, 1 - LABEL_FLOOR)


def first_prior() -> np.ndarray:
    """Before any verdict: thresholds around 0, and little noise."""
    grid = np.exp(-0.5 * (THRESHOLDS / 2.0) ** 2)
    prior = (np.array([0.7, 0.1, 0.1, 0.1])[:, None] * grid).reshape(-1)
    return prior / prior.sum()


def log_likelihoods(scores: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Of each verdict, on the grid, shape (verdicts, thresholds * noises)."""
    chances = right_given_threshold(scores)
    return np.where(np.asarray(right, dtype=bool)[:, None], np.log(chances), np.log1p(-chances))


def posterior(prior: np.ndarray, log_likelihood: np.ndarray) -> np.ndarray:
    """The prior times a likelihood, normalised along the last axis; shape of `log_likelihood`."""
    weights = prior * np.exp(log_likelihood - log_likelihood.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def chance_wrong(weights: np.ndarray, score: float) -> float:
    """P(the entry's answer is wrong) at a score, under a posterior of its threshold."""
    return float(1 - weights @ right_given_threshold(score))


def learn_prior(entry: np.ndarray, likelihoods: np.ndarray, rounds: int = 5) -> np.ndarray:
    """The prior over thresholds under which the verdicts of all entries are likeliest, by expectation maximisation,
    drawn towards `first_prior` with the weight of 10 entries.

    Args:
        entry: of each verdict, the entry that it is about (any integers).
        likelihoods: `log_likelihoods` of the verdicts.
    """
    start = first_prior()
    if not len(entry):
        return start
    _, rows = np.unique(entry, return_inverse=True)
    of_entry = np.zeros((rows.max() + 1, len(start)))
    np.add.at(of_entry, rows, likelihoods)
    prior = start
    for _ in range(rounds):
        total = 10.0 * start + posterior(prior, of_entry).sum(0)
        prior = total / total.sum()
    return prior


def nearness(cosines: np.ndarray) -> np.ndarray:
    """How much a verdict on one question counts for another one, by the cosine of the two: from 0 to 1."""
    return np.clip((cosines - FAR) / (NEAR - FAR), 0.0, 1.0)
