"""Least-squares heads in .pt files, ee_layer{N}_lsq.pt and h{N}.pt: read safely, and written for other programs.

A file holds tensors and nothing else: "weight" [V, hidden], or that alone and bare; "bias" [V]; "after_norm", a bool:
whether the head was fitted on hidden states after the model's final norm; "scale", as in `head_scale.py`. Where
"after_norm" is missing a head is taken to have been fitted after the norm, with a warning.
"""

import functools
import logging
import os
import pickle
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from selfspec_cli.early_exit.errors import HeadError
from selfspec_cli.early_exit.head_metadata import LEGACY_KIND, HeadMetadata, legacy_layer
from selfspec_cli.early_exit.head_module import ExitHead
from selfspec_cli.whole import written

_NUMBERS, _FLAGS = {"weight", "bias", "scale"}, {"after_norm"}


class LegacyHead(NamedTuple):
    """What a .pt file holds: the head, its exit layer, and its scale, None where the file has none."""

    head: ExitHead
    layer: int
    scale: float | None


def load_pt(file: Path) -> LegacyHead:
    """The head in a .pt file; see the top of this file.

    Loaded with `weights_only=True`, so that nothing in the file is ever run. Raises HeadError for a file that holds
    anything but such tensors, is damaged, was fitted before the norm, or whose name does not say the layer.
    """
    layer = legacy_layer(file)
    if layer is None:
        raise HeadError(f"head {file}: the layer is read from the name, ee_layer<N>_lsq.pt or h<N>.pt")
    try:
        data = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise HeadError(f"head {file} holds something other than tensors, or is corrupt; not loaded") from error
    except Exception as error:  # torch.load raises many types for a damaged file; all mean the same to the user
        raise HeadError(f"head {file} is truncated or corrupt: {error}") from error
    tensors = {"weight": data} if isinstance(data, Tensor) else data
    if not isinstance(tensors, dict) or not {"weight"} <= set(tensors) <= _NUMBERS | _FLAGS:
        raise HeadError(
            f"head {file} must hold a weight [vocab, hidden], and a bias [vocab], after_norm (a bool) and "
            "a scale at most"
        )
    for name, tensor in tensors.items():
        if name in _NUMBERS and not (isinstance(tensor, Tensor) and tensor.is_floating_point()):
            raise HeadError(f"head {file}: {name!r} is no tensor of floating point numbers; not loaded")
        if name not in ("weight", "bias") and not (isinstance(tensor, Tensor) and tensor.numel() == 1):
            raise HeadError(f"head {file}: {name!r} must be a tensor of one value; not loaded")
    _check_norm(file, tensors.get("after_norm"))
    scale = None if "scale" not in tensors else float(tensors["scale"])
    parts = {name: tensor for name, tensor in tensors.items() if name in ("weight", "bias")}
    try:
        return LegacyHead(ExitHead(LEGACY_KIND, parts), layer, scale)
    except HeadError as error:
        raise HeadError(f"head {file}: {error}") from error


def save_pt(folder: str | os.PathLike[str], head: ExitHead, metadata: HeadMetadata) -> Path:
    """Write a least-squares head over all tokens as ee_layer{N}_lsq.pt; the file is there whole or not at all.

    Raises HeadError for another kind of head, or one over a draft vocabulary, which such files cannot say.
    """
    if head.kind.name != LEGACY_KIND or head.vocab_ids is not None:
        raise HeadError(f"a .pt file holds a head of kind {LEGACY_KIND} over all tokens, not {metadata.spec.name}")
    tensors = {name: tensor.detach().cpu() for name, tensor in head.tensors.items()}
    tensors["after_norm"] = torch.tensor(True)
    if metadata.fit.get("scale") is not None:
        tensors["scale"] = torch.tensor(float(metadata.fit["scale"]))
    target = Path(folder) / f"ee_layer{metadata.layer}_lsq.pt"
    with written(target) as part:
        torch.save(tensors, part)
    return target


def _check_norm(file: Path, after_norm: Tensor | None) -> None:
    if after_norm is None:
        _warn_of_norm(file)
    elif not bool(after_norm):
        raise HeadError(
            f"head {file} was fitted on hidden states before the model's final norm (after_norm is false), "
            "and exit heads here read them after it; fit it again with `selfspec fit-lsq`"
        )


@functools.cache
def _warn_of_norm(file: Path) -> None:
    """Once a file and process."""
    logging.getLogger("vllm.selfspec").warning(
        "head %s does not say whether it was fitted before or after the model's final norm; it is used after the norm. "
        'If that is right, add "after_norm": torch.tensor(True) to the file; if not, fit it again with '
        "`selfspec fit-lsq`",
        file,
    )
