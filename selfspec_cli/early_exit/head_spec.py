"""Which exit head is meant, by a short name: what a user types, a row shows and a file is called. Free of torch.

lens                  the model's own lm_head
lsq, lsq_argmax       least squares to the next token of the text, or to the full model's own argmax
translator            exit hidden state -> final hidden state, full rank; translator_r15 is of rank 15
..._bias              fitted with a constant term (lsq, translator)
..._kl                after its closed form trained for an epoch by KL divergence (translator)
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from selfspec_cli.early_exit.errors import SettingsError, closest

KINDS = ("lens", "lsq", "translator")
TARGETS = ("next_token", "argmax")
EXAMPLES = ("lens", "lsq", "lsq_argmax", "lsq_bias", "translator", "translator_r15", "translator_bias",
            "translator_kl", "translator_r15_kl")  # fmt: skip
_NAME = re.compile(r"(lens|lsq|translator)(_argmax)?(?:_r(\d+))?(_bias)?(_kl)?")


@dataclass(frozen=True)
class HeadSpec:
    """A head apart from model, layer and draft vocabulary.

    target: of an lsq, next_token or argmax. rank: of a translator, None is full. bias: with a constant term. kl: a
    translator after an epoch of KL training. Raises SettingsError for a combination that there is not.
    """

    kind: str = "lens"
    target: str = "next_token"
    rank: int | None = None
    bias: bool = False
    kl: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise SettingsError(closest(self.kind, KINDS, "head kind"))
        if self.target not in TARGETS:
            raise SettingsError(closest(self.target, TARGETS, "head target"))
        if self.rank is not None and self.rank < 1:
            raise SettingsError(f"head rank {self.rank} is out of range; allowed: 1 to the hidden size")
        for what, given, kinds in (
            ("target argmax", self.target == "argmax", ("lsq",)),
            (f"rank {self.rank}", self.rank is not None, ("translator",)),
            ("a bias", self.bias, ("lsq", "translator")),
            ("KL training", self.kl, ("translator",)),
        ):
            if given and self.kind not in kinds:
                raise SettingsError(f"a head of kind {self.kind} has no {what.removeprefix('a ')}; kinds that can: "
                                    f"{', '.join(kinds)}")  # fmt: skip

    @property
    def name(self) -> str:
        """The short name, such as translator_r15_kl; `from_name` is its inverse."""
        parts = [self.kind, "argmax" if self.target == "argmax" else "", f"r{self.rank}" if self.rank else "",
                 "bias" if self.bias else "", "kl" if self.kl else ""]  # fmt: skip
        return "_".join(part for part in parts if part)

    @property
    def fitted_to(self) -> str:
        """What its regression has as target: next_token, argmax or final_hidden; a lens has none."""
        return {"lens": "none", "lsq": self.target, "translator": "final_hidden"}[self.kind]

    @classmethod
    def from_name(cls, name: str) -> HeadSpec:
        """The spec of a short name. Raises SettingsError, naming the nearest, for anything else."""
        match = _NAME.fullmatch(name)
        if match is None:
            raise SettingsError(closest(name, EXAMPLES, "head"))
        kind, argmax, rank, bias, kl = match.groups()
        target = "argmax" if argmax else "next_token"
        return cls(kind, target, None if rank is None else int(rank), bool(bias), bool(kl))
