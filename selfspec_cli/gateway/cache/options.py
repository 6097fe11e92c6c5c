"""The settings of the cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from selfspec_cli.early_exit.errors import SettingsError, closest
from selfspec_cli.gateway.cache.request import SPECIAL


@dataclass(frozen=True)
class CacheOptions:
    """What a user may set.

    Attributes:
        delta: largest share of wrong ones among hits by meaning (`promise.py` says what is promised).
        alpha: largest chance that the share is larger.
        audit: share of questions with an acceptable entry that are asked all the same, to see whether it is right.
        ttl_s: seconds after which an entry is forgotten.
        entries: how many entries are kept; those that were not used for longest go first.
        mib: likewise of their size, in MiB.
        also_for: of "tools", "images" and "seeds", which requests are cached too (the first two only exactly).
        seed: of the coin that picks audits; None: unpredictable, as it should be.
    """

    delta: float = 0.01
    alpha: float = 0.05
    audit: float = 0.05
    ttl_s: float = 7 * 86400.0
    entries: int = 100_000
    mib: float = 1024.0
    also_for: tuple[str, ...] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        for name, low, high in (("delta", 0, 1), ("alpha", 0, 1), ("audit", 0, 1), ("ttl_s", 0, float("inf"))):
            if not low < getattr(self, name) < high:
                raise SettingsError(f"cache.{name}={getattr(self, name)}: allowed is above {low} and below {high}")
        if self.entries < 1 or self.mib <= 0:
            raise SettingsError(f"cache.entries={self.entries}, cache.mib={self.mib}: both must be above 0")
        for name in self.also_for:
            if name not in SPECIAL:
                raise SettingsError(closest(name, SPECIAL, "kind of request"))


def options_from(given: Mapping[str, Any]) -> CacheOptions:
    """Options from plain values; raises SettingsError for a name that there is not, or a value out of range."""
    known = [field.name for field in fields(CacheOptions)]
    for name in given:
        if name not in known:
            raise SettingsError(closest(name, known, "option of the cache"))
        _check(name, given[name])
    values = dict(given)
    if "also_for" in values:
        values["also_for"] = tuple(values["also_for"])
    return CacheOptions(**values)


def _check(name: str, value: Any) -> None:
    if name == "also_for":
        if not isinstance(value, list | tuple):
            raise SettingsError(f"cache.options.{name}={value!r}: a list is needed, of {', '.join(SPECIAL)}")
        return
    whole = name in ("entries", "seed")
    fits = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if not fits and not (name == "seed" and value is None):
        raise SettingsError(f"cache.options.{name}={value!r}: a {'whole ' * whole}number is needed")
