"""Gates: after each draft step, is the draft worth continuing? One gate is one object `GATE` in one module here.

A gate compares one statistic of the draft distribution with a threshold. It never changes the output, only the cost:
the full model verifies whatever was drafted. Other packages add gates by entry points of the group `selfspec.gates`.

Importing this package, and reading its gates, does not import torch.
"""

from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.early_exit.gates.base import Gate, Rule
from selfspec_cli.early_exit.registry import Registry

__all__ = ["GATES", "Gate", "Rule", "device_features", "features", "require_device"]

GATES = Registry("gate", Gate, "selfspec_cli.early_exit.gates", "GATE", "selfspec.gates", first="none")
"""Every gate by the name that users write."""


def features() -> tuple[str, ...]:
    """Gates that have a statistic of the logits: what draft logs hold."""
    return tuple(name for name, gate in GATES.items() if gate.statistic is not None)


def device_features() -> tuple[str, ...]:
    """Those of `features` that the CUDA kernel computes, in the order of its columns."""
    return tuple(name for name, gate in GATES.items() if gate.device is not None)


def require_device(rule: Rule) -> None:
    """Raises SettingsError for a rule on a statistic that the CUDA kernel does not compute."""
    supported = device_features()
    if rule.feature is not None and rule.feature not in supported:
        raise SettingsError(
            f"gate {rule.feature!r} has no device expression, so it runs on the CPU only; allowed on "
            f"CUDA: none, {', '.join(supported)}"
        )
