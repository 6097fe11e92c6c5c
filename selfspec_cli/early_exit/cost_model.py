"""What a round of early-exit drafting costs, and its speedup over plain decoding.

A round drafts k tokens one after the other and then verifies them in one pass of the full model:

    round(k) = verify + start + k * (draft + verify_token)

`Costs` come from memory traffic, before anything is timed (`Costs.from_bytes`), or from timed arms of one exit
(`fit_costs`)."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Costs:
    """What the steps of decoding cost, all in one unit: measured seconds, or counted bytes.
    plain: a decoding step without drafts; positive. draft: a draft step. verify: a verify pass, as far as it does not
    grow with the drafts. verify_token: what one more draft adds to it (nothing where the weights are the traffic).
    start: of drafting, once a round; after a verify pass the first step finds its weights outside the cache."""

    plain: float
    draft: float
    verify: float
    verify_token: float = 0.0
    start: float = 0.0

    def __post_init__(self) -> None:
        if not (self.plain > 0 and self.verify_token >= 0 and self.start >= 0):
            raise ValueError(f"costs must be positive; given {self}")

    @classmethod
    def from_bytes(cls, read: Mapping[str, float], context: float, attended: float | None = None) -> Costs:
        """Bytes that each step reads, for batches small enough that memory traffic is what takes the time.
        read: the answer of `EarlyExitWorker.early_exit_step_bytes`. context: tokens that a step reads of all requests
        together, on average; attended: that a draft step reads (`Context.attended`), None for all of them."""
        full = read["full"] + context * read["full_kv_token"]
        draft = read["draft"] + (context if attended is None else attended) * read["draft_kv_token"]
        return cls(plain=full, draft=draft, verify=full)

    @property
    def step(self) -> float:
        """Cost of one more draft: its draft step, and its place in the verify pass."""
        # Measured rounds may put a draft step below zero; a step is never a gain.
        return max(0.0, self.draft) + self.verify_token

    def round(self, k: float) -> float:
        """Cost of a round that drafts and verifies k tokens; k may be a mean. Raises ValueError for a negative k."""
        if not k >= 0:
            raise ValueError(f"k = {k!r} is out of range; allowed: 0 or more")
        return self.verify + self.start + k * self.step

    def speedup(self, tokens: float, k: float) -> float:
        """Tokens per time over those of plain decoding, for rounds that draft k and yield `tokens`; 1 for k = 0."""
        return tokens * self.plain / self.round(k) if k else 1.0

    def to_dict(self) -> dict[str, float]:
        return asdict(self)


def fit_costs(arms: Sequence[tuple[float, float, float | None, float]], plain: float) -> Costs:
    """Costs of one exit from timed arms of fixed draft lengths: (draft length, seconds, of them drafting, rounds).
    plain: seconds of a step without drafts. The times of verifying and of drafting are fitted as lines over the draft
    length by least squares; neither may fall with length, or be free or a gain without drafts. Where the share of
    drafting is None (a GPU drafts without telling the host), the line is a whole round's, and its slope is the draft
    step's: another token to verify is next to free there."""
    lengths = [length for length, *_ in arms]
    mean_length = statistics.fmean(lengths)
    whole = [seconds / rounds for _, seconds, _, rounds in arms]
    drafting = [own / rounds for _, _, own, rounds in arms if own is not None]
    if len(drafting) < len(arms):
        draft, mean = max(_slope(lengths, whole), 0.0), statistics.fmean(whole)
        if draft * mean_length >= mean:  # noise: nothing would be left for the verify pass
            draft = max(mean - plain, 0.0) / mean_length
        return Costs(plain, draft, mean - draft * mean_length)
    verify = [round_ - own for round_, own in zip(whole, drafting, strict=True)]
    verify_token = max(_slope(lengths, verify), 0.0)
    if verify_token * mean_length >= statistics.fmean(verify):  # noise: no pass over no drafts is free
        verify_token = 0.0
    draft = _slope(lengths, drafting)
    start = statistics.fmean(drafting) - draft * mean_length
    if start < 0 or draft <= 0:  # noise, or arms of one length only
        start, draft = 0.0, sum(drafting) / sum(lengths)
    return Costs(plain, draft, statistics.fmean(verify) - verify_token * mean_length, verify_token, start)


def _slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Slope of the least-squares line through the points; 0 where all x are the same."""
    return statistics.linear_regression(x, y).slope if len(set(x)) > 1 else 0.0
