"""When hits by meaning may be served so that the share of wrong ones stays below a number that the user states.

What is promised. Let delta be the stated share and alpha the stated risk. An *audit* is a question for which the
cache proposes an entry, but which is sent on instead, and whose fresh answer a judge compares with the entry's. While
hits are not served ("closed") every such question is audited; once they are ("open") a coin that looks at nothing
picks a fixed share of them. Assume that

1. a verdict is right, and one that is missing is missing for reasons that have nothing to do with whether the entry
   was right;
2. the chance that a proposed entry is wrong, given all that came before, is either at least delta at every question
   or below delta at every question.

Then the cache is ever open in the first case with a chance of at most alpha. So, but for that chance, every hit is
wrong with a probability below delta, and so is the expected share of wrong hits among hits: a stronger statement than
that of arXiv:2502.03771, which bounds wrong hits as a share of all requests, under a logistic model of similarity.
Nothing is assumed about how entries are proposed: that model may be as bad as it likes, and the cache then stays
closed.

What is not promised. Assumption 2 fails for a stream whose nature changes while the cache is open; wrong audits then
close it again, after about as many as `CAP` allows, but what was served until then is not covered. The share among
the hits of a short stretch varies around its expectation. A judge that errs shifts the bound by as much as it errs.

How. E is a wager against "an accepted entry is wrong with a chance of at least delta". Each audit multiplies E by (1 -
bet) / (1 - delta) if the entry was right and by bet / delta if not, where 0 < bet <= delta is fixed before the audit.
If the chance p of a wrong one is at least delta, the factor's mean, p bet / delta + (1 - p) (1 - bet) / (1 - delta),
is at most 1: E is a supermartingale that starts at 1, and by Ville's inequality reaches 1 / alpha ever with a chance
of at most alpha, whenever one looks. Capping E, or lowering it for a reason of one's own, keeps it one.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log

MEMORY = 400  # audits after which an old one weighs 1/e in the bet
CAP = 20.0  # E is cut off at CAP / alpha: so many audits gone bad, not all the good ones before, close the cache
PRIOR = (0.5, 100.0)  # wrong and right audits that the first bet is made from, at most: a share below most deltas


@dataclass(frozen=True)
class Promise:
    """The state of one tenant's wager.

    Attributes:
        delta: largest share of wrong hits, in (0, 1).
        alpha: largest chance that hits are open though their share of wrong ones is larger, in (0, 1).
        log_e: natural logarithm of E.
        wrong, right: audits with either verdict, discounted by age; they make the bet and nothing else.
        audits, wrong_audits: counts of all.
    """

    delta: float
    alpha: float = 0.05
    log_e: float = 0.0
    wrong: float = 0.0
    right: float = 0.0
    audits: int = 0
    wrong_audits: int = 0

    def __post_init__(self) -> None:
        for name in ("delta", "alpha"):
            value = getattr(self, name)
            if not 0 < value < 1:
                raise ValueError(f"{name}={value} is no share; allowed is a number between 0 and 1, for example 0.01")

    @property
    def open(self) -> bool:
        """Whether hits may be served."""
        return self.log_e >= -log(self.alpha)

    @property
    def bet(self) -> float:
        """The chance of a wrong answer that the next audit is wagered on: recent audits' share, at most delta."""
        wrong, right = PRIOR[0], max(PRIOR[1], 0.5 / self.delta)
        return min(self.delta, (self.wrong + wrong) / (self.wrong + self.right + wrong + right))

    def after(self, was_right: bool) -> Promise:
        """The state after one audit."""
        bet, keep = self.bet, 1 - 1 / MEMORY
        factor = (1 - bet) / (1 - self.delta) if was_right else bet / self.delta
        return Promise(
            self.delta,
            self.alpha,
            min(self.log_e + log(factor), log(CAP / self.alpha)),
            self.wrong * keep + (not was_right),
            self.right * keep + was_right,
            self.audits + 1,
            self.wrong_audits + (not was_right),
        )

    def after_complaint(self) -> Promise:
        """The state after a client called a served hit wrong: E falls as by a wrong audit. Praise has no such method,
        because who speaks up is not chosen by the coin.
        """
        worse = self.after(False)
        return Promise(self.delta, self.alpha, worse.log_e, worse.wrong, worse.right, self.audits, self.wrong_audits)
