"""What one request may ask of drafting, in vLLM's `extra_args` (over HTTP: `vllm_xargs`). Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from selfspec_cli.early_exit.errors import SettingsError, closest
from selfspec_cli.early_exit.gates import check_threshold
from selfspec_cli.early_exit.length_table import Cell
from selfspec_cli.early_exit.resolved import ResolvedSettings

PREFIX = "selfspec_"
K, THRESHOLD = KEYS = (f"{PREFIX}k", f"{PREFIX}threshold")


@dataclass(frozen=True)
class RequestSettings:
    """A request's own. k: most tokens a round, 0 for no drafts; threshold: of the engine's gate. None: the engine's."""

    k: int | None = None
    threshold: float | None = None

    @classmethod
    def of(cls, extra_args: Mapping[str, Any] | None, settings: ResolvedSettings) -> RequestSettings:
        """A request's own settings. Keys that do not begin with `selfspec_` are somebody else's.

        Raises SettingsError for an unknown key, a wrong type, or a value out of range.
        """
        given = {key: value for key, value in (extra_args or {}).items() if str(key).startswith(PREFIX)}
        if not given:
            return NOTHING
        for key in given:
            if key not in KEYS:
                raise SettingsError(closest(key, KEYS, "request setting"))
        k, threshold = given.get(K), given.get(THRESHOLD)
        whole = isinstance(k, Integral) and not isinstance(k, bool)
        if k is not None and not (whole and 0 <= int(k) <= settings.k):
            raise SettingsError(
                f"{K} = {k!r} is out of range; allowed: whole numbers from 0 (no drafts) to the "
                f"engine's k, {settings.k}"
            )
        if threshold is not None:
            threshold = check_threshold(settings.gate.kind, threshold, THRESHOLD)
        return cls(None if k is None else int(k), threshold)


NOTHING = RequestSettings()


def switched_off_by(cell: Cell, own: RequestSettings) -> str | None:
    """Which of `counters.REASONS` keeps a request from being drafted for: the table's entry before its own wish."""
    if not cell.k:
        return "context" if cell.context else "load"
    return "request" if own.k == 0 else None
