"""Adaptive verification admits a draft without a look at later ones: DSpark's counterexample, and vLLM's own function.

The counterexample (after DeepSeek's DSpark paper, appendix A; the smallest form of it): two tokens, the drafter draws
the first draft from q, the target has p. How sure the second draft is depends on which token the first one is. A
scheduler that admits the first draft only where the second looks good too verifies one of the tokens more often, and
what is not verified is drawn afresh: the tokens that come out do not follow p, although each verification by itself is
right.
"""

from __future__ import annotations

import pytest
import torch

from selfspec_cli.vllm_plugin.planted import admission

pytestmark = pytest.mark.contract

P, Q = (0.5, 0.5), (0.8, 0.2)
SECOND = (0.9, 0.1)  # how sure the drafter is of its second token behind first token 0 and behind first token 1
FIRST, OTHER = 0.6, 0.5  # of the first token whichever it is, and of another request's two drafts


def emitted(admits) -> list[float]:
    """The distribution of the first token that comes out. admits: whether it is verified, by what it is."""
    out = [0.0, 0.0]
    for token in (0, 1):
        if not admits(token):  # no draft is verified: the target draws the token itself
            out = [sofar + Q[token] * p for sofar, p in zip(out, P, strict=True)]
            continue
        accepted = min(1.0, P[token] / Q[token])
        out[token] += Q[token] * accepted
        residual = [max(p - q, 0.0) for p, q in zip(P, Q, strict=True)]
        for other in (0, 1):
            if sum(residual):
                out[other] += Q[token] * (1 - accepted) * residual[other] / sum(residual)
    return out


def confidences(token: int) -> torch.Tensor:
    """Of two requests with two drafts each; the first request's first draft is `token`."""
    return torch.tensor([[FIRST, SECOND[token]], [OTHER, OTHER]])


def test_a_scheduler_that_looks_ahead_changes_the_output():
    assert emitted(lambda token: SECOND[token] > 0.5)[0] == pytest.approx(0.6)


def test_whatever_knows_only_what_was_before_does_not():
    assert emitted(lambda token: True) == pytest.approx(list(P))
    assert emitted(lambda token: False) == pytest.approx(list(P))


@pytest.mark.slow
def test_vllm_admits_the_first_draft_whatever_comes_behind_it():
    for budget in (1, 2, 3):
        admitted = [int(admission.admitted(confidences(token), budget)[0]) > 0 for token in (0, 1)]
        assert admitted[0] == admitted[1]
        assert emitted(admitted.__getitem__) == pytest.approx(list(P))


def test_no_admission_changes_with_a_later_confidence():
    assert admission.looked_ahead("cpu") == {"compared": admission.TRIALS, "changed": 0}


def test_the_planted_fault_is_the_counterexample_and_is_seen():
    (undo, *more) = admission.FAULTS["look_ahead"](None)
    try:
        first = [int(admission.admitted(confidences(token), 1)[0]) > 0 for token in (0, 1)]
        assert first == [True, False]
        assert emitted(lambda token: first[token])[0] == pytest.approx(0.6)
        assert admission.looked_ahead("cpu")["changed"] > 0
    finally:
        for one in (undo, *more):
            one()
    assert admission.looked_ahead("cpu")["changed"] == 0
