"""A running estimate of how much is accepted, as arithmetic alone: the one definition, for every runner.

These functions take Python's numbers (the CPU), tensors, and the numbers of a Triton kernel:
vllm_plugin/v2/round_setup.py compiles them from here for the device. That is why their parameters have no types.
"""

# mypy: allow-untyped-defs

from __future__ import annotations


def trials(accepted, drafted):
    """How many tokens a verify pass judged: those that stood, and the first that did not; none behind it."""
    return accepted + (accepted < drafted)


def updated(rate, accepted, judged, weight):
    """The estimate of a token's acceptance after `accepted` of `judged` tokens stood; of none, it stays."""
    return (rate + weight * accepted) / (1.0 + weight * judged)


def gain(rate, steps):
    """What one more draft step yields a request, in shares of what its round yields after `steps` of them: an accepted
    token beside 1 + rate + rate^2 + ..."""
    alive = rate * 0.0 + 1.0
    tokens = alive
    for _ in range(steps):
        alive = alive * rate
        tokens = tokens + alive
    return alive * rate / tokens


def step_pays(gains, requests, steps, cost):
    """Whether one more draft step brings the requests of a round more than the time costs them all, after `steps` that
    cost `cost` plain steps each: whether the geometric mean of their tokens over the time of the round rises.

    gains: the sum of `gain` over the requests that would take the step. Time is verification, a plain step, and steps.
    """
    return gains * (1.0 + cost * steps) > requests * cost


def reached(count, rate, threshold):
    """`count`, and one more where the estimate has come up to a threshold."""
    return count + (rate >= threshold)


def clamped(value, low, high):
    """`value`, or the end of low..high that is nearest."""
    return value + (low - value) * (value < low) + (high - value) * (value > high)
