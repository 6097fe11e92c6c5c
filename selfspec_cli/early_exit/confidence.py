"""How far a draft's own confidence can be trusted: acceptance by the probability of the token that was drafted.

A quantised copy of the target is accepted far more often than its greatest probability says, an early exit sometimes
less. So the share of drafts that stood is counted by confidence, in BINS equal bins, and old counts fade. The product
of these shares along a draft estimates the probability that all of it stands. In PyTorch, for the V1 runner;
v2/worth.py does the same on the device, and its test compares."""

import torch
from torch import Tensor

BINS = 16
MEMORY = 2000.0
"""Judged tokens after which what was seen before counts for 1/e."""
FIRST_TRIALS = 4.0
"""Tokens of each bin that the first guess counts for: that the fourth root of the confidence stands. Its mean is the
rule's first guess (rule.FIRST_RATE), so that neither keeps the other from trying."""
NEGLIGIBLE = 0.01
"""A draft that stands with a smaller probability ends for its request alone: nobody would notice its next token."""


def first_counts() -> Tensor:
    """Counts [2, BINS] before anything is known: tokens that stood, and all that were judged."""
    middles = (torch.arange(BINS) + 0.5) / BINS
    return torch.stack([FIRST_TRIALS * middles**0.25, torch.full((BINS,), FIRST_TRIALS)])


def bins_of(confidence: Tensor) -> Tensor:
    """Bin, int64, of each confidence in [0, 1]."""
    return (confidence * BINS).long().clamp(0, BINS - 1)


def learnt(counts: Tensor, confidence: Tensor, stood: Tensor) -> Tensor:
    """Counts [2, BINS] after a verify pass. confidence [n]: of each judged token, up to the first that fell; stood,
    bool [n]."""
    bins = bins_of(confidence)
    fresh = [torch.bincount(judged, minlength=BINS) for judged in (bins[stood], bins)]
    return faded(counts, torch.stack(fresh).to(counts.dtype))


def faded(counts: Tensor, fresh: Tensor) -> Tensor:
    """Old counts [2, BINS] after `fresh` ones came in; the first guess always counts."""
    first = first_counts()
    return first + (counts - first) * (MEMORY / (MEMORY + fresh[1].sum())) + fresh


def rates(counts: Tensor) -> Tensor:
    """Estimated acceptance [BINS] of a token by its confidence."""
    return counts[0] / counts[1]


def usual(counts: Tensor) -> Tensor:
    """Estimated acceptance of a token of which nothing is known yet."""
    return counts[0].sum() / counts[1].sum()
