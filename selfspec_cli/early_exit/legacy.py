"""A safe import of least-squares heads in .pt files: ee_layer{N}_lsq.pt and h{N}.pt, tensors and nothing else."""

from __future__ import annotations

import pickle
from pathlib import Path

import torch
from torch import Tensor

from selfspec_cli.early_exit.head_metadata import LEGACY_KIND, legacy_layer
from selfspec_cli.early_exit.head_module import ExitHead
from selfspec_cli.early_exit.heads.base import HeadError


def load_pt(file: Path) -> tuple[ExitHead, int]:
    """The head in a .pt file, and its exit layer: {"weight": [V, hidden]}, an optional "bias" [V], or a bare weight.

    Loaded with `weights_only=True`, so that nothing in the file is ever run. Raises HeadError for a file that holds
    anything but such tensors, is damaged, or whose name does not say the layer.
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
    if not isinstance(tensors, dict) or not {"weight"} <= set(tensors) <= {"weight", "bias"}:
        raise HeadError(f"head {file} must hold a weight [vocab, hidden], and a bias [vocab] at most")
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            raise HeadError(f"head {file}: {name!r} is no tensor of floating point numbers; not loaded")
    return ExitHead(LEGACY_KIND, tensors), layer
