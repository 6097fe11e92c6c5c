"""The worker of an engine that can be made faulty, and mended again, while it runs."""

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.vllm_plugin.planted import v1, v2
from selfspec_cli.vllm_plugin.worker import EarlyExitWorker
from selfspec_cli.vllm_plugin.wrap import FAULTS_FOLDER, Undo


class FaultyWorker(EarlyExitWorker):
    """`EarlyExitWorker`, and methods that plant faults."""

    _early_exit_undo: Sequence[Undo] = ()

    def early_exit_plant(self, name: str) -> None:
        """Plant one fault in place of whatever was planted before. Raises SettingsError for an unknown name."""
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

    def _planted_faults(self) -> dict[str, Callable[[Any], list[Undo]]]:
        on_v2 = hasattr(self.model_runner, "speculator")
        faults = dict((v2 if on_v2 else v1).FAULTS)
        if hasattr(self._early_exit_drafter(), "head") and FAULTS_FOLDER.is_dir():  # else vLLM's own methods draft here
            if str(FAULTS_FOLDER) not in sys.path:
                sys.path.append(str(FAULTS_FOLDER))
            drafting, speed = (import_module(f"selfspec_faults.{name}") for name in ("v2" if on_v2 else "v1", "speed"))
            faults |= drafting.FAULTS | (speed.ON_CUDA if on_v2 else speed.ANYWHERE)
        return faults
