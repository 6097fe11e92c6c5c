"""Exit heads on disk: safetensors with metadata (`head_metadata.py`), and a safe import of older .pt files.

A file is the head's tensors as its kind names them, and vocab_ids. A head fitted on another model is refused.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from selfspec_cli.early_exit.errors import HeadError
from selfspec_cli.early_exit.head_metadata import (
    FORMAT,
    FORMAT_VERSION,
    LEGACY_KIND,
    SUFFIX,
    HeadMetadata,
    find_head,
    read_metadata,
    require_model,
    require_shapes,
)
from selfspec_cli.early_exit.head_module import ExitHead, check_vocab_ids
from selfspec_cli.early_exit.legacy import load_pt
from selfspec_cli.whole import written


class LoadedHead(NamedTuple):
    """What `load_head` returns: head, metadata = load_head(path)."""

    head: ExitHead
    metadata: HeadMetadata


def save_head(path: str | os.PathLike[str], head: ExitHead, metadata: HeadMetadata) -> Path:
    """Write the head; the file is there whole or not at all.

    Creates the directory. Raises HeadError when head and metadata disagree, OSError when the disk does not oblige.
    """
    target = Path(path)
    if target.suffix != SUFFIX:
        raise HeadError(f"a head is saved as {SUFFIX}, not {target.name!r}")
    tensors = _unshared(head.state_dict())
    _check_tensors(target, tensors, metadata)
    header = {"format": FORMAT, "format_version": str(FORMAT_VERSION)}
    header |= {item.name: json.dumps(getattr(metadata, item.name)) for item in fields(metadata)}
    with written(target) as part:
        save_file(tensors, part, metadata=header)
    return target


def load_head(
    path: str | os.PathLike[str],
    *,
    layer: int | None = None,
    hidden: int | None = None,
    vocab_size: int | None = None,
    fingerprint: str | None = None,
) -> LoadedHead:
    """Reads a head from .safetensors or a legacy .pt, or from a directory of heads (then `layer` picks it).

    layer, hidden, vocab_size, fingerprint: what the model at hand needs; each is checked if given. A file that knows no
    fingerprint (a legacy .pt) passes that check. Tensors arrive on the CPU in the dtype they were saved in. Raises
    HeadError for a missing, truncated or foreign file, or a head fitted on another model, layer or shape.
    """
    file = Path(path)
    if file.is_dir():
        if layer is None:
            raise HeadError(f"{file} is a directory of heads; name a file in it, or a layer")
        file = find_head(file, layer)
    if not file.is_file():
        raise HeadError(f"head {file} does not exist")
    if file.suffix == ".pt":
        loaded = _load_legacy(file)
    elif file.suffix == SUFFIX:
        loaded = _load_safetensors(file)
    else:
        raise HeadError(f"head {file}: suffix {file.suffix!r} is not known; allowed: {SUFFIX}, .pt")
    wanted = {"layer": layer, "hidden": hidden, "vocab_size": vocab_size, "fingerprint": fingerprint}
    require_model(file, loaded.metadata, **wanted)
    return loaded


def _load_safetensors(file: Path) -> LoadedHead:
    metadata = read_metadata(file)
    with safe_open(file, framework="pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (no mapping)
    _check_tensors(file, tensors, metadata)
    ids = tensors.pop("vocab_ids", None)
    return LoadedHead(ExitHead(metadata.kind, tensors, ids), metadata)


def _unshared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous CPU tensors, each in memory of its own: safetensors refuses two views of one tensor."""
    taken: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        apart = tensor.detach().cpu().contiguous()
        memory = apart.untyped_storage().data_ptr()
        result[name] = apart.clone() if memory in taken else apart
        taken.add(memory)
    return result


def _check_tensors(file: Path, tensors: Mapping[str, Tensor], metadata: HeadMetadata) -> None:
    """Tensors against metadata: exactly the expected names and shapes, and token ids inside the vocabulary."""
    if "vocab_ids" in tensors:
        check_vocab_ids(tensors["vocab_ids"], metadata.vocab_size)
    require_shapes(file, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, metadata)


def _load_legacy(file: Path) -> LoadedHead:
    head, layer, scale = load_pt(file)
    vocab_size, hidden = head.tensors["weight"].shape
    bias = "bias" in head.tensors
    fit = {} if scale is None else {"scale": scale}
    return LoadedHead(head, HeadMetadata(LEGACY_KIND, layer, hidden, vocab_size, bias=bias, fit=fit))
