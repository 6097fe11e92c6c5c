"""What one tenant's verdicts taught: whether an entry may answer a question."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from selfspec_cli.gateway.cache.embedding import DIMENSIONS
from selfspec_cli.gateway.cache.evidence import (
    FIRST_WEIGHTS,
    Comparison,
    Lexicon,
    chance_wrong,
    features,
    first_prior,
    fit,
    learn_prior,
    log_likelihoods,
    nearness,
    posterior,
)
from selfspec_cli.gateway.cache.promise import Promise

REMEMBERED = 2000  # verdicts that the regression and the thresholds are fitted to
REFITTED = 25  # verdicts between two fits


@dataclass(frozen=True)
class Verdict:
    """An entry's answer was compared with a fresh one.

    Attributes:
        entry: the entry's number.
        features: of the question and the entry when it was looked up, shape (7,).
        vector: of the question, shape (384,).
        words: unmatched words of the two questions.
        right: the verdict.
    """

    entry: int
    features: np.ndarray
    vector: np.ndarray
    words: frozenset[str]
    right: bool


class Judgement:
    """The model that proposes entries, and the promise that decides whether proposals are served.

    Verdicts on an entry count in full for its threshold, those on questions nearby in part, so that an entry among many
    that went wrong is doubted from the start. An entry is proposed where the model thinks it wrong with a chance of at
    most delta. Whether that is so is not assumed: the promise sees verdicts only.
    """

    def __init__(self, promise: Promise, verdicts: list[Verdict]) -> None:
        """verdicts: earlier ones, oldest first, from which everything is learnt anew."""
        self.promise = promise
        self.lexicon = Lexicon()
        self._weights, self._prior = FIRST_WEIGHTS, first_prior()
        self._size = self._next = self._since = 0
        self._entries = np.zeros(REMEMBERED, dtype=np.int64)
        self._rows = np.zeros((REMEMBERED, len(FIRST_WEIGHTS)))
        self._right = np.zeros(REMEMBERED, dtype=bool)
        self._vectors = np.zeros((REMEMBERED, DIMENSIONS), dtype=np.float32)
        self._likelihoods = np.zeros((REMEMBERED, len(self._prior)), dtype=np.float32)
        for verdict in verdicts:
            self._remember(verdict)
        self._fit()

    def nearness(self, vector: np.ndarray) -> np.ndarray:
        """How much each remembered verdict counts for a question, by its vector; shape (verdicts,)."""
        return nearness(self._vectors[: self._size] @ vector.astype(np.float32))

    def chance(self, entry: int, cosine: float, texts: Comparison, near: np.ndarray) -> tuple[float, np.ndarray]:
        """P(entry's answer is wrong for a question), and the features that say so.

        Args:
            near: `nearness` of the question.
        """
        row = features(cosine, texts, self.lexicon)
        counts = np.where(self._entries[: self._size] == entry, 1.0, near).astype(np.float32)
        likelihood = counts @ self._likelihoods[: self._size]
        return chance_wrong(posterior(self._prior, likelihood), float(row @ self._weights)), row

    def acceptable(self, chance: float) -> bool:
        """Whether an entry is proposed: each entry's threshold is where its chance to be wrong is delta."""
        return chance <= self.promise.delta

    def learn(self, verdict: Verdict) -> None:
        """Take in one more verdict."""
        self._remember(verdict)
        self._since += 1
        if self._since >= REFITTED:
            self._fit()

    def _remember(self, verdict: Verdict) -> None:
        self.lexicon.add(verdict.words, verdict.right)
        place = self._next
        self._entries[place], self._right[place] = verdict.entry, verdict.right
        self._rows[place], self._vectors[place] = verdict.features, verdict.vector
        scores = self._rows[place : place + 1] @ self._weights
        self._likelihoods[place] = log_likelihoods(scores, self._right[place : place + 1])[0]
        self._next = (place + 1) % REMEMBERED
        self._size = max(self._size, place + 1)

    def _fit(self) -> None:
        self._since, n = 0, self._size
        if not n:
            return
        self._weights = fit(self._rows[:n], self._right[:n].astype(float))
        likelihoods = log_likelihoods(self._rows[:n] @ self._weights, self._right[:n])
        self._likelihoods[:n] = likelihoods
        self._prior = learn_prior(self._entries[:n], likelihoods)
