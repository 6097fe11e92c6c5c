"""Copies of a model's weights that are made from data: rounded by GPTQ, and on disk, as `selfspec fit-weights` writes.

One safetensors file: for each linear layer NAME (as vLLM calls it below the decoder, such as layers.3.mlp.down_proj, or
lm_head) the tensors of its copy, "NAME.copy.TENSOR". The metadata name the kind of copies and the model."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from selfspec_cli.early_exit.draft_weights import DRAFT_WEIGHTS
from selfspec_cli.early_exit.draft_weights.base import DraftWeights
from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.whole import written

FORMAT, SUFFIX = "selfspec-draft-weights-1", ".safetensors"
LM_HEAD = "lm_head"
DAMPING = 0.01  # of the mean of M's diagonal: directions that the data hardly has are not to be trusted

Scales = Callable[[Tensor, Tensor], Tensor]
"""(a group's weights [out, group], importance of its columns [group]) -> scales [out, 1], none of them 0."""


@dataclass(frozen=True)
class About:
    """kind: of draft_weights. fingerprint: of the model (`model_fingerprint`). tokens: that the second moments are of.
    method: how copies were rounded. more: for people."""

    kind: str
    fingerprint: str
    tokens: int = 0
    method: str = "gptq"
    more: dict[str, Any] = field(default_factory=dict)


@dataclass
class FittedWeights:
    """copies: by linear layer, the tensors of its copy."""

    about: About
    copies: dict[str, dict[str, Tensor]]

    def kind_of(self, name: str, rows: Tensor | None = None) -> StoredCopy:
        """A kind of draft weights that copies the layer `name`, or only its `rows`, by what is stored."""
        tensors = self.copies[name]
        return StoredCopy(self.about.kind, tensors if rows is None else {key: t[rows] for key, t in tensors.items()})


class StoredCopy(DraftWeights):
    """A kind of draft weights whose `quantise` returns a stored copy instead of making one."""

    def __init__(self, kind: str, tensors: Mapping[str, Tensor]) -> None:
        self._kind, self._tensors = DRAFT_WEIGHTS[kind], tensors
        self.name, self.help, self.bits, self.kernels = kind, self._kind.help, self._kind.bits, self._kind.kernels

    def quantise(self, weight: Tensor) -> dict[str, Tensor]:
        """The stored copy on the weight's device. Raises SettingsError where it is of another shape."""
        copy = {name: tensor.to(weight.device) for name, tensor in self._tensors.items()}
        shape = tuple(self.dequantise(copy, weight.dtype).shape)
        if shape != tuple(weight.shape):
            raise self.impossible(f"the fitted copy has shape {shape}, and the weight {tuple(weight.shape)}")
        return copy

    def dequantise(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        return self._kind.dequantise(tensors, dtype)


def save(path: str | os.PathLike[str], fitted: FittedWeights) -> Path:
    """Write the file, whole or not at all. Creates the folder."""
    target = Path(path)
    if target.suffix != SUFFIX:
        raise SettingsError(f"draft_weights_path = {str(target)!r}: fitted copies are saved as {SUFFIX}")
    tensors = {f"{name}.copy.{key}": t for name, copy in fitted.copies.items() for key, t in copy.items()}
    header = {"format": FORMAT, **{key: json.dumps(value) for key, value in asdict(fitted.about).items()}}
    with written(target) as part:
        save_file({key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}, part, metadata=header)
    return target


def load(path: str | os.PathLike[str], kind: str, fingerprint: str) -> FittedWeights:
    """Read a file, tensors on the CPU. kind: of draft_weights. fingerprint: of the model.
    Raises SettingsError for another kind or model, and a file that is not there, or that `save` did not write."""
    place = f"draft_weights_path = {str(path)!r}"
    copies: dict[str, dict[str, Tensor]] = {}
    try:
        with safe_open(path, framework="pt") as opened:
            header = opened.metadata() or {}
            for key in opened.keys():  # noqa: SIM118 (no mapping)
                name, _, last = key.rpartition(".copy.")
                copies.setdefault(name, {})[last] = opened.get_tensor(key)
        about = None
        if header.get("format") == FORMAT:
            about = About(**{item.name: json.loads(header[item.name]) for item in fields(About)})
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise SettingsError(f"{place} cannot be read ({error}); make one with: selfspec fit-weights") from error
    if about is None:
        raise SettingsError(f"{place}: it is no file that selfspec fit-weights wrote")
    if about.kind != kind:
        raise SettingsError(
            f"{place} holds {about.kind} copies, and draft_weights is {kind!r}; allowed: draft_weights = {about.kind}"
        )
    if about.fingerprint != fingerprint:
        raise SettingsError(
            f"{place} was made of another model: its fingerprint is {about.fingerprint}, this model's is {fingerprint}"
        )
    return FittedWeights(about, copies)


# ---- rounding by GPTQ (Frantar et al., arXiv:2210.17323, section 3.3) ------------------------------------------------
#
# The data enter as the second moment of a linear layer's inputs, M = X^T X / n [in, in] over n tokens, because the
# error that counts is the product's: E|(W - Q) x|^2 = tr((W - Q) M (W - Q)^T). Column by column, each column's
# rounding error is made up for in the columns that are still to be rounded.


def rounded_in_order(
    weight: Tensor, moment: Tensor, group: int, levels: tuple[int, int], scales: Scales
) -> tuple[Tensor, Tensor]:
    """GPTQ's rounding of `weight` [out, in] to integers (float32) [out, in / group, group], with scales [out, in /
    group, 1].
    moment: M [in, in]. levels: the least and the greatest integer. scales: how a group's scale is chosen; it is asked
    when the group is reached, so it sees weights that make up for the columns before."""
    work = weight.float().clone()
    inverse = _inverse_factor(moment)
    integers, chosen = torch.empty_like(work), []
    for start in range(0, work.shape[1], group):
        block, factor = work[:, start : start + group], inverse[start : start + group, start : start + group]
        scale = scales(block, 1 / factor.diagonal().square())
        errors = torch.empty_like(block)
        for column in range(group):
            rounded = (block[:, column] / scale[:, 0]).round().clamp_(*levels)
            integers[:, start + column] = rounded
            errors[:, column] = (block[:, column] - rounded * scale[:, 0]) / factor[column, column]
            block[:, column + 1 :] -= errors[:, column : column + 1] * factor[column, column + 1 :]
        work[:, start + group :] -= errors @ inverse[start : start + group, start + group :]
        chosen.append(scale)
    return integers.unflatten(1, (-1, group)), torch.stack(chosen, dim=1)


def weighted_error(error: Tensor, moment: Tensor) -> float:
    """tr(error M error^T): the mean square error of the product, all outputs together, for a weight's [out, in]."""
    return float(((error.float() @ moment.float()) * error.float()).sum())


def _inverse_factor(moment: Tensor) -> Tensor:
    """Upper triangular U with M^-1 = U^T U; row i holds how an error in column i is made up for in later ones.
    M is damped, so that it is positive definite where columns were never used."""
    damped = moment.float().clone()
    damped.diagonal().add_(DAMPING * damped.diagonal().mean().clamp(min=1e-20))
    return torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(damped)), upper=True)
