"""What early-exit drafting costs and what it returns: the one place that computes the cost of a round.

A round drafts k tokens one after the other and then verifies them in one pass of the full model:

    round(k) = verify + start + k * (draft + verify_token)

The expectation of tokens a round is Leviathan et al.'s, arXiv:2211.17192; theirs has a separate draft model where the
first layers of the target draft here. `Costs` come from one of two places: `Costs.from_bytes` (memory traffic, before
anything is timed) and `fit_costs` (timed arms of one exit).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Costs:
    """What the steps of decoding cost, all in one unit: measured seconds, or counted bytes.

    plain: a decoding step of the full model without drafts; positive.
    draft: a draft step.
    verify: a verify pass, as far as it does not grow with the drafts.
    verify_token: what one more draft adds to the verify pass (nothing where the weights are the traffic).
    start: what drafting takes once a round on top of its steps; after a verify pass the first step finds its weights
        outside the cache.
    """

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

        read: what `EarlyExitWorker.early_exit_step_bytes` answers: `full` and `draft` (bytes of weights a step), and
        `full_kv_token` and `draft_kv_token` (bytes of KV cache for each token of context). context: tokens of context
        that a step reads, all requests of the batch together, on average. attended: those that a draft step reads
            (`contexts.Context.attended`); None: all of them.
        """
        full = read["full"] + context * read["full_kv_token"]
        draft = read["draft"] + (context if attended is None else attended) * read["draft_kv_token"]
        return cls(plain=full, draft=draft, verify=full)

    @property
    def step(self) -> float:
        """What one more draft costs: its draft step, and its place in the verify pass."""
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

    def best_k(self, tokens: Mapping[int, float]) -> tuple[int, float]:
        """The draft length of greatest speedup among `tokens` (k -> tokens a round), with that speedup.

        Ties go to the shorter draft. Where 0 is among them and comes back, drafting does not pay.
        """
        k = max(tokens, key=lambda k: (self.speedup(tokens[k], k), -k))
        return k, self.speedup(tokens[k], k)

    def to_dict(self) -> dict[str, float]:
        """JSON form; `Costs(**...)` reads it back."""
        return asdict(self)


def fit_costs(arms: Sequence[tuple[float, float, float | None, float]], plain: float) -> Costs:
    """Costs of one exit from timed arms of fixed draft lengths: (draft length, seconds, of them drafting, rounds).

    plain: seconds of a step without drafts. The times of verifying and of drafting are fitted as lines over the draft
    length by least squares, so two lengths at least are wanted. Verifying is kept from getting cheaper with length and
    from costing nothing without drafts, and a round from starting at a gain. Where the share of drafting is None (a GPU
    drafts without telling the host), the line is a whole round's, and its slope is the draft step's: another token to
    verify is next to free there.
    """
    lengths = [length for length, *_ in arms]
    whole = [seconds / rounds for _, seconds, _, rounds in arms]
    drafting = [own / rounds for _, _, own, rounds in arms if own is not None]
    if len(drafting) < len(arms):
        draft, mean, length = max(_slope(lengths, whole), 0.0), statistics.fmean(whole), statistics.fmean(lengths)
        if draft * length >= mean:  # noise: nothing would be left for the verify pass
            draft = max(mean - plain, 0.0) / length
        return Costs(plain, draft, mean - draft * length)
    verify = [round_ - own for round_, own in zip(whole, drafting, strict=True)]
    verify_token = max(_slope(lengths, verify), 0.0)
    if verify_token * statistics.fmean(lengths) >= statistics.fmean(verify):  # noise: no pass over no drafts is free
        verify_token = 0.0
    draft = _slope(lengths, drafting)
    start = statistics.fmean(drafting) - draft * statistics.fmean(lengths)
    if start < 0 or draft <= 0:  # noise, or arms of one length only
        start, draft = 0.0, sum(drafting) / sum(lengths)
    return Costs(plain, draft, statistics.fmean(verify) - verify_token * statistics.fmean(lengths), verify_token, start)


def expected_tokens(a: float, k: int) -> float:
    """Tokens a round yields: 1 + a + a^2 + ... + a^k, in [1, k + 1] (Leviathan et al., equation 1).

    a: probability that a draft token is accepted, the same for each given that those before it were. k >= 0.
    Raises ValueError for a outside [0, 1] or negative k.
    """
    if k < 0:
        raise ValueError(f"k = {k!r} is out of range; allowed: 0 or more")
    return expected_tokens_from_positions([a] * k)


def expected_tokens_from_positions(rates: Sequence[float]) -> float:
    """Tokens a round yields from conditional acceptances: 1 + r_1 + r_1 r_2 + ... , in [1, len(rates) + 1].

    rates[i]: probability that draft token i + 1 is accepted given that tokens 1..i were. Raises ValueError for a rate
    outside [0, 1].
    """
    total, alive = 1.0, 1.0  # the verify step always yields one token of its own
    for rate in rates:
        if not 0 <= rate <= 1:
            raise ValueError(f"acceptance {rate!r} is out of range; allowed: 0 to 1")
        alive *= rate
        total += alive
    return total


def efficiency(measured: float, predicted: float) -> float:
    """Measured speedup over predicted speedup: the share that the engine keeps, apart from how good the drafts are.

    Raises ValueError for a predicted speedup that is not positive.
    """
    if not predicted > 0:
        raise ValueError(f"predicted speedup {predicted!r} must be positive")
    return measured / predicted


def _slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Of the least-squares line through the points; 0 where all x are the same."""
    return statistics.linear_regression(x, y).slope if len(set(x)) > 1 else 0.0
