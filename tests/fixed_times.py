"""Times that a rule of draft lengths hears, so that its choices are the same in every run."""

from typing import Any


def fix_times(rule: Any, draft_step: float = 0.2) -> None:
    """Whatever a rule's steps take, it hears 10 ms for a plain step, `draft_step` of that for each draft step and a
    hundredth for each token of a prompt; its clock counts nothing else."""
    now, stepped = 0.0, rule.stepped

    def fixed(requests: int, width: int, _: float, prompt: int = 0, accepted: float = 0.0, *latest: int) -> None:
        nonlocal now
        seconds = 0.01 * (1 + draft_step * width + 0.01 * prompt)
        now += seconds
        stepped(requests, width, seconds, prompt, accepted, *latest)

    rule.stepped, rule.clock = fixed, lambda: now
