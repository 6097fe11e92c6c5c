"""What early-exit drafting costs and what it returns, for batches small enough to be bound by memory traffic.

Times may be in any one unit, the same throughout. T: one full decoding step; T_E: the first E layers of it;
T_head: the exit head. A round drafts k tokens and verifies them in one full step, taken to cost T whatever k is
(true while the weights, not the tokens, are the traffic). Leviathan et al., arXiv:2211.17192, is the source of the
expectation; theirs has a separate draft model in T_E's place.
"""

from __future__ import annotations

from collections.abc import Sequence

Acceptance = float | Sequence[float]
"""One acceptance probability for every position, or the conditional one at each (see below)."""


def expected_tokens(a: float, k: int) -> float:
    """Tokens a round yields: 1 + a + a^2 + ... + a^k, in [1, k + 1] (Leviathan et al., equation 1).

    a: probability that a draft token is accepted, the same for each given that those before it were. k >= 0.
    Raises ValueError for a outside [0, 1] or negative k.
    """
    _check_k(k)
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


def round_cost(T: float, T_E: float, T_head: float, k: float) -> float:
    """Time of one round, T + k * (T_E + T_head), in the unit of its arguments; k may be a mean.

    Raises ValueError for T <= 0, negative T_E or T_head, or negative k.
    """
    _check_k(k)
    if not (T > 0 and T_E >= 0 and T_head >= 0):
        raise ValueError(f"times must be positive; given T = {T!r}, T_E = {T_E!r}, T_head = {T_head!r}")
    return T + k * (T_E + T_head)


def speedup(acceptance: Acceptance, k: int, T: float, T_E: float, T_head: float) -> float:
    """Tokens per time with drafting over tokens per time without: expected tokens * T / round cost. Dimensionless.

    acceptance: one number, or at least k conditional rates of which the first k count.
    """
    return _tokens(acceptance, k) * T / round_cost(T, T_E, T_head, k)


def best_k(acceptance: Acceptance, T: float, T_E: float, T_head: float, max_k: int = 16) -> tuple[int, float]:
    """The draft length of greatest predicted speedup, with that speedup; (0, 1.0) says that drafting does not pay.

    Ties go to the shorter draft. With a sequence of rates, k goes no further than their number.
    """
    longest = max_k if isinstance(acceptance, (int, float)) else min(max_k, len(acceptance))
    lengths = range(longest + 1)
    best = max(lengths, key=lambda k: speedup(acceptance, k, T, T_E, T_head))
    return best, speedup(acceptance, best, T, T_E, T_head)


def efficiency(measured: float, predicted: float) -> float:
    """Measured speedup over predicted speedup: the share that the engine keeps, apart from how good the drafts are.

    Raises ValueError for a predicted speedup that is not positive.
    """
    if not predicted > 0:
        raise ValueError(f"predicted speedup {predicted!r} must be positive")
    return measured / predicted


def break_even(T: float, T_E: float, T_head: float, speedup: float = 1.0) -> float:
    """The acceptance probability above which one more draft step pays: speedup * (T_E + T_head) / T.

    The probability is that the next draft token AND all before it in the round are accepted, for only then does the
    step yield a token. A step costs T_E + T_head and pays when p tokens are worth more; a token is worth the time that
    it takes otherwise: T without drafting (speedup = 1), or T / speedup once rounds already run at that speedup
    (the marginal value theorem: continue while the marginal rate exceeds the average). May exceed 1: never draft.
    """
    if not speedup > 0:
        raise ValueError(f"speedup {speedup!r} must be positive")
    return speedup * (round_cost(T, T_E, T_head, 1) - T) / T


def _tokens(acceptance: Acceptance, k: int) -> float:
    if isinstance(acceptance, (int, float)):
        return expected_tokens(acceptance, k)
    _check_k(k)
    if len(acceptance) < k:
        raise ValueError(f"k = {k} needs {k} conditional acceptances; given {len(acceptance)}")
    return expected_tokens_from_positions(acceptance[:k])


def _check_k(k: float) -> None:
    if k < 0:
        raise ValueError(f"k = {k!r} is out of range; allowed: 0 or more")
