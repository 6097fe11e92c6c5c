"""A running estimate of how much is accepted, as arithmetic alone: the one definition, for every runner.

These functions take Python's numbers (the CPU), tensors, and the numbers of a Triton kernel:
vllm_plugin/v2/round_setup.py compiles them from here for the device. That is why their parameters have no types.
"""

# mypy: allow-untyped-defs


def trials(accepted, drafted):
    """Tokens that a verify pass judged: those that stood, and the first that did not."""
    return accepted + (accepted < drafted)


def updated(rate, accepted, judged, weight):
    """The estimate of a token's acceptance after `accepted` of `judged` tokens stood; of none, it stays."""
    return (rate + weight * accepted) / (1.0 + weight * judged)
