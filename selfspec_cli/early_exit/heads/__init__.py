"""Kinds of exit heads by name, and which head is meant by a short name: what a user types in `head=`, a row shows and a
file is called.

Importable without torch. `head_module.py` makes a module of a kind and its tensors, `artifact.py` reads the files,
`fitting.py` fits.

A short name is a kind, followed by what is special about the head, as far as the kind has it:

lens                  the model's own lm_head
lsq, lsq_argmax       another target than the kind's first
translator_r15        of rank 15
..._bias              fitted with a constant term"""

from __future__ import annotations

import re
from dataclasses import dataclass

from selfspec_cli.early_exit.errors import SettingsError, closest
from selfspec_cli.early_exit.heads.base import HeadKind
from selfspec_cli.early_exit.registry import Registry

HEADS = Registry("head kind", HeadKind, "selfspec_cli.early_exit.heads", "selfspec.heads", first="lens")


def examples() -> tuple[str, ...]:
    """Short names of heads that are worth comparing, of every kind."""
    return tuple(example for kind in HEADS.values() for example in kind.examples or (kind.name,))


@dataclass(frozen=True)
class HeadSpec:
    """A head apart from model, layer and draft vocabulary. Raises SettingsError for an impossible combination.
    kind: a name of HEADS. target: what it is fitted to; None becomes the kind's first, and stays None for a kind that
    is not fitted. rank: None is full. bias: with a constant term."""

    kind: str = "lens"
    target: str | None = None
    rank: int | None = None
    bias: bool = False

    def __post_init__(self) -> None:
        kind = HEADS[self.kind]
        if self.target is None and kind.targets:
            object.__setattr__(self, "target", kind.targets[0])
        if self.target is not None and self.target not in kind.targets:
            raise SettingsError(closest(self.target, kind.targets or ("none",), f"target of a {self.kind} head"))
        if self.rank is not None and self.rank < 1:
            raise SettingsError(f"head rank {self.rank} is out of range; allowed: 1 to the hidden size")
        rank = None if self.rank is None else f"rank {self.rank}"
        for what, trait in ((rank, "ranks"), ("bias" if self.bias else None, "biases")):
            if what and not getattr(kind, trait):
                able = [name for name, other in HEADS.items() if getattr(other, trait)]
                raise SettingsError(f"a head of kind {self.kind} has no {what}; kinds that can: {', '.join(able)}")

    @property
    def name(self) -> str:
        """The short name, such as translator_r15; `from_name` is its inverse."""
        other_target = self.target if self.target not in HEADS[self.kind].targets[:1] else None
        parts = [self.kind, other_target, f"r{self.rank}" if self.rank else None, "bias" if self.bias else None]
        return "_".join(part for part in parts if part)

    @classmethod
    def from_name(cls, name: str) -> HeadSpec:
        """The spec of a short name. Raises SettingsError, naming the nearest, for anything else."""
        for kind in sorted(HEADS, key=len, reverse=True):  # one kind's name may begin with another's
            targets = "|".join(map(re.escape, HEADS[kind].targets[1:])) or "(?!)"
            match = re.fullmatch(rf"{re.escape(kind)}(?:_({targets}))?(?:_r(\d+))?(_bias)?", name)
            if match is not None:
                target, rank, bias = match.groups()
                return cls(kind, target, None if rank is None else int(rank), bool(bias))
        if name in HEADS.broken:
            raise SettingsError(HEADS.broken[name])
        raise SettingsError(closest(name, examples(), "head"))
