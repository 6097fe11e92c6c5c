"""Rows of `selfspec views`: how often each view of a model drafts what the model says, and what a draft step reads."""

from dataclasses import dataclass
from typing import Any

from selfspec_cli.early_exit.counters import VerifyCounts


@dataclass
class ViewRow:
    """One view on one workload.

    at: drafts accepted at position 1..k, of `rounds`, so at[i] / at[i-1] is the acceptance at position i + 1 given that
    all before it stood. cost: bytes that a draft step reads over those of a plain step. predicted: by those bytes.
    """

    model: str
    E: int
    draft_weights: str
    skip_layers: str | None
    fitted: str | None  # the file that the copies come from
    workload: str
    temperature: float
    k: int
    rounds: int
    at: list[int]
    first: float | None  # acceptance of the first draft
    first_low: float | None  # its 95 % interval
    first_high: float | None
    mean_accepted_len: float | None  # tokens a verify step yields
    cost: float | None = None
    best_k: int | None = None
    predicted: float | None = None  # speedup over plain decoding, from bytes read at batch 1
    outputs: int | None = None  # compared with those of plain decoding
    identical: int | None = None  # of them equal
    draft_context: str | None = None  # what drafts attend to; empty: all of the context
    draft_sample_method: str | None = None  # probabilistic: drafts were drawn; empty: they were the likeliest tokens

    @property
    def rates(self) -> list[float]:
        """Acceptance at each position, given that all before it were accepted; ends where nothing was."""
        before = [self.rounds, *self.at]
        return [now / then for now, then in zip(self.at, before, strict=False) if then]

    @property
    def tokens(self) -> dict[int, float]:
        """k -> tokens a round yields with drafts of that length."""
        return {k: 1 + sum(self.at[:k]) / self.rounds for k in range(1, len(self.at) + 1)} if self.rounds else {}

    @property
    def label(self) -> str:
        """In a few words."""
        without = f" without {self.skip_layers}" if self.skip_layers else ""
        fitted = " fitted" if self.fitted else ""
        context = f" {self.draft_context}" if self.draft_context else ""
        drawn = f" {self.draft_sample_method}" if self.draft_sample_method else ""
        return f"E={self.E}{without} {self.draft_weights}{fitted}{context}{drawn}"


def row(counts: VerifyCounts, **about: Any) -> ViewRow:
    """The row of what vLLM counted. about: the other fields."""
    first = counts.accepted_at[0] if counts.accepted_at else 0
    low, high = wilson(first, counts.rounds) or (None, None)
    return ViewRow(
        rounds=counts.rounds,
        at=list(counts.accepted_at),
        first=first / counts.rounds if counts.rounds else None,
        first_low=low,
        first_high=high,
        mean_accepted_len=1 + counts.accepted / counts.rounds if counts.rounds else None,
        **about,
    )


def wilson(successes: int, trials: int) -> tuple[float, float] | None:
    """Wilson's score interval of a share, at 95 %; None without a trial.

    It takes trials as independent. Rounds of one answer are not quite, so it is a little too narrow.
    """
    if not trials:
        return None
    from scipy.stats import binomtest

    low, high = binomtest(successes, trials).proportion_ci(method="wilson")
    return float(low), float(high)
