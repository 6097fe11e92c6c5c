"""Drafts that cost nothing: what followed the same tokens before, in the request's own prompt and output.

Before a round the last tokens of a request are looked up in its history. A trusted match is copied, all of the draft
before the first draft step. Where the match is too short, the model's own draft begins; with each of its tokens that is
also the match's, the match is longer by one, and once it is trusted the rest is copied.

How far a match is trusted is learnt from each request: after every verify pass its new tokens say how often the token
after a match of each length came true, whether or not it was drafted. In PyTorch, for one request of the V1 runner;
v2/matches.py does the same for a batch on the device, and its test compares."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

LONGEST = 16
"""Tokens of a match that are looked at: longer ones count as this long."""
WEIGHT = 0.15
"""Of one token against all before it, in the estimates of a request."""


# Without types, because v2/matches.py compiles these two for the device too.
def trials(accepted, drafted):  # type: ignore[no-untyped-def]
    """Number of tokens that a verify pass judged: those that stood, and the first that did not."""
    return accepted + (accepted < drafted)


def updated(rate, accepted, judged, weight):  # type: ignore[no-untyped-def]
    """The estimate of a token's acceptance after `accepted` of `judged` tokens stood; of none, it stays."""
    return (rate + weight * accepted) / (1.0 + weight * judged)


def longest_match(text: Tensor) -> tuple[int, int]:
    """Length of the longest suffix of text [n], at most LONGEST, that occurs earlier in it, and the position after its
    last earlier occurrence; (0, 0) if the last token is new."""
    length = start = 0
    last = len(text) - 1
    ends = (text[:-1] == text[-1]).nonzero()[:, 0] + 1
    while len(ends):
        length, start = length + 1, int(ends[-1])
        if length == LONGEST:
            break
        ends = ends[ends > length]
        ends = ends[text[ends - 1 - length] == text[last - length]]
    return length, start


def following(text: Tensor, start: int, count: int) -> Tensor:
    """The `count` tokens from `start` on; where the text ends, it is repeated from `start`."""
    return text[start + torch.arange(count) % (len(text) - start)]


def agreement(text: Tensor, known: int, start: int) -> int:
    """Length of the common prefix of `text[known:]` and `text[start:]`, in tokens."""
    gained = text[known:]
    return int((gained == text[start : start + len(gained)]).int().cumprod(0).sum())


def first_rates() -> Tensor:
    """Estimates [LONGEST] of a new request: after L tokens that agreed, the next one does with L / (L + 1)."""
    lengths = torch.arange(1.0, LONGEST + 1)
    return lengths / (lengths + 1)


def learnt(rates: Tensor, length: int, agreed: int, gained: int) -> Tensor:
    """Estimates [LONGEST] of the token after a match of 1, 2, ... tokens, after one of `length` of whose next `gained`
    tokens the first `agreed` came true. A match is longer by one with each."""
    lengths = torch.arange(1, LONGEST + 1)
    right = ((lengths >= length) & (lengths < length + agreed)).int()
    right[-1] = max(0, agreed - (LONGEST - length))
    wrong = (lengths == min(length + agreed, LONGEST)) & (agreed < gained)
    return updated(rates, right, right + wrong, WEIGHT)


def expected(rates: Tensor, tokens: int) -> Tensor:
    """Accepted tokens [LONGEST] to expect of a copied draft of `tokens`, after a match of 1, 2, ... tokens."""
    total, stands = torch.zeros(LONGEST), torch.ones(LONGEST)
    for place in range(tokens):
        stands = stands * rates[(torch.arange(LONGEST) + place).clamp_max(LONGEST - 1)]
        total = total + stands
    return total


def trusted_from(rates: Tensor, own: float, tokens: int, k: int, cost: float) -> int:
    """The length from which on a match is copied: such drafts yield as many tokens in the same time as the model's own.
    own: estimated acceptance of one of its k tokens. cost: of a draft step, in plain steps, divided by the number of
    requests that share it. LONGEST + 1: never."""
    yields = 0.0
    for _ in range(k):
        yields = own * (1.0 + yields)
    doubtful = (1.0 + expected(rates, tokens)) * (1.0 + cost * k) < 1.0 + yields
    return int((doubtful * torch.arange(1, LONGEST + 1)).max()) + 1


@dataclass
class Matches:
    """What one request's history says. tokens: most of a free draft; k: most of the model's own.
    rates: by length of the match, [LONGEST]; own: of the model's own drafts. length, start, known: the last look-up,
    and of how many tokens. drafted, copied: tokens of the last draft, the model's own and those of a match."""

    tokens: int
    k: int
    rates: Tensor = field(default_factory=first_rates)
    own: float = 1.0
    length: int = 0
    start: int = 0
    known: int = 0
    trusted: int = LONGEST + 1
    drafted: int = 0
    copied: int = 0

    def verdict(self, text: Tensor, accepted: int) -> int:
        """A verify pass is over, and the request has `text` [n]; how many of the `accepted` drafts were copied."""
        if self.length and len(text) > self.known:
            text = text[: self.known + self.tokens + 1]
            agreed = agreement(text, self.known, self.start)
            self.rates = learnt(self.rates, self.length, agreed, len(text) - self.known)
        stood = min(accepted, self.drafted)
        self.own = updated(self.own, stood, trials(stood, self.drafted) if self.drafted else 0, WEIGHT)
        return max(0, min(accepted - self.drafted, self.copied))

    def look_up(self, text: Tensor, cost: float, room: int, k: int) -> None:
        """A round begins after `text` [n]. cost: see `trusted_from`. room, k: most of a free draft and of the model's
        own in this round, where load, the request or its end allow less than usual."""
        self.length, self.start = longest_match(text)
        self.known, self.drafted, self.copied = len(text), 0, 0
        self.trusted = trusted_from(self.rates, self.own, min(self.tokens, room), min(self.k, k), cost)

    def rest(self, text: Tensor, draft: list[int], room: int) -> list[int]:
        """The rest of a trusted match after `draft`, up to `room` tokens with it; empty where the model drafts on."""
        if not self.length or self.length + len(draft) < self.trusted or len(draft) >= room:
            return []
        copied = following(text, self.start, room).tolist()
        return copied[len(draft) :] if copied[: len(draft)] == draft else []
