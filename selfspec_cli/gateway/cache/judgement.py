"""What one tenant's verdicts taught: whether an entry may answer a question."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass

import numpy as np

from selfspec_cli.gateway.cache.evidence import (
    FIRST_WEIGHTS,
    Lexicon,
    chance_wrong,
    features,
    first_prior,
    fit,
    learn_prior,
    log_likelihoods,
    posterior,
)
from selfspec_cli.gateway.cache.promise import Promise

REMEMBERED = 2000  # verdicts that the regression and the thresholds are fitted to
REFITTED = 25  # verdicts between two fits
ACCEPTED = 2.0  # an entry is acceptable where its chance to be wrong is at most this times delta: see `Judgement`


@dataclass(frozen=True)
class Verdict:
    """An entry's answer was compared with a fresh one.

    Attributes:
        entry: the entry's number.
        features: of the question and the entry when it was looked up, shape (5,).
        words: unmatched words of the two questions.
        right: the verdict.
    """

    entry: int
    features: np.ndarray
    words: frozenset[str]
    right: bool


class Judgement:
    """The model that proposes entries, and the promise that decides whether proposals are served.

    The model's bar is twice delta because its chances are those of the worst entry that passes; the entries that pass
    are on average far below. Whether they are is not assumed: the promise is what counts, and it sees verdicts only.
    """

    def __init__(self, promise: Promise, verdicts: list[Verdict]) -> None:
        """verdicts: earlier ones, oldest first, from which everything is learnt anew."""
        self.promise = promise
        self.lexicon = Lexicon()
        self._weights, self._prior = FIRST_WEIGHTS, first_prior()
        self._verdicts: deque[Verdict] = deque(maxlen=REMEMBERED)
        self._of_entry: dict[int, list[Verdict]] = defaultdict(list)
        for verdict in verdicts:
            self._remember(verdict)
        self._fit()

    def chance(self, entry: int, cosine: float, words: frozenset[str]) -> tuple[float, np.ndarray]:
        """P(entry's answer is wrong for a question), and the features that say so."""
        row = features(cosine, words, self.lexicon)
        weights = self._prior
        if own := self._of_entry.get(entry):
            scores = np.array([verdict.features for verdict in own]) @ self._weights
            likelihood = log_likelihoods(scores, np.array([verdict.right for verdict in own])).sum(0)
            weights = posterior(self._prior, likelihood)
        return chance_wrong(weights, float(row @ self._weights)), row

    def acceptable(self, chance: float) -> bool:
        return chance <= ACCEPTED * self.promise.delta

    def learn(self, verdict: Verdict) -> None:
        """Take in one more verdict."""
        self._remember(verdict)
        self._since += 1
        if self._since >= REFITTED:
            self._fit()

    def forget(self, entry: int) -> None:
        """An entry is gone; what its verdicts said of words stays."""
        self._of_entry.pop(entry, None)

    def _remember(self, verdict: Verdict) -> None:
        self.lexicon.add(verdict.words, verdict.right)
        if len(self._verdicts) == REMEMBERED:
            oldest = self._verdicts[0]
            own = self._of_entry.get(oldest.entry, [])
            if own and own[0] is oldest:
                own.pop(0)
        self._verdicts.append(verdict)
        self._of_entry[verdict.entry].append(verdict)

    def _fit(self) -> None:
        self._since = 0
        if not self._verdicts:
            return
        rows = np.array([verdict.features for verdict in self._verdicts])
        right = np.array([verdict.right for verdict in self._verdicts], dtype=float)
        self._weights = fit(rows, right)
        entries = np.array([verdict.entry for verdict in self._verdicts])
        self._prior = learn_prior(entries, rows @ self._weights, right)
