"""The worker of an engine that can be made faulty, and mended again, while it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.vllm_plugin.worker import EarlyExitWorker

OF_ANY_METHOD = ("accept_one_more", "biased_sampler")
"""Faults of the verify pass, which is the same whatever drafts."""


class FaultyWorker(EarlyExitWorker):
    """`EarlyExitWorker`, and methods that plant faults."""

    _early_exit_undo: Sequence[Callable[[], None]] = ()

    def early_exit_plant(self, name: str) -> None:
        """Plant one fault in place of whatever was planted before.

        Raises SettingsError for a name that there is not here.
        """
        self.early_exit_mend()
        faults = self._planted_faults()
        if name not in faults:
            raise SettingsError(f"fault {name!r} cannot be planted here; allowed: {', '.join(faults)}")
        self._early_exit_undo = faults[name](self.model_runner)

    def early_exit_mend(self) -> None:
        """Take out what was planted. The KV cache may still hold what the fault left in it."""
        for undo in reversed(self._early_exit_undo):
            undo()
        self._early_exit_undo = []

    def _planted_faults(self) -> dict[str, Callable[[Any], list[Callable[[], None]]]]:
        from selfspec_cli.vllm_plugin.planted import speed

        if hasattr(self.model_runner, "speculator"):
            from selfspec_cli.vllm_plugin.planted import v2

            found, slow = v2.FAULTS, speed.ON_CUDA
        else:
            from selfspec_cli.vllm_plugin.planted import v1

            found, slow = v1.FAULTS, speed.ANYWHERE
        if hasattr(self._early_exit_drafter(), "head"):
            return found | slow
        return {name: found[name] for name in OF_ANY_METHOD}  # vLLM's own methods draft here
