"""Exit heads on disk, tensors included, and the fingerprint that ties a head to its model.

A head is a safetensors file: its tensors as its kind names them, vocab_ids, and metadata (`head_metadata.py`).
Least-squares heads of other programs, ee_layer{N}_lsq.pt and h{N}.pt, are read and written too, as tensors and nothing
else: "weight" [V, hidden], or that alone and bare; "bias" [V]; "after_norm", a bool: whether it was fitted on hidden
states after the model's final norm; "scale", as in `fitting.py`."""

import functools
import hashlib
import json
import logging
import os
import pickle
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
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
    head_file,
    legacy_layer,
    read_metadata,
    require_model,
    require_shapes,
)
from selfspec_cli.early_exit.head_module import ExitHead, check_vocab_ids
from selfspec_cli.whole import written


class LoadedHead(NamedTuple):
    """What `load_head` returns: head, metadata = load_head(path)."""

    head: ExitHead
    metadata: HeadMetadata


def save_head(path: str | os.PathLike[str], head: ExitHead, metadata: HeadMetadata) -> Path:
    """Write the head, whole or not at all; creates the directory.
    Raises HeadError when head and metadata disagree, OSError when it cannot be written."""
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
    """Read a head from .safetensors or .pt, or the one for `layer` from a directory of heads, on the CPU. layer,
    hidden, vocab_size, fingerprint: of the model at hand; each is checked if given, but a .pt file has no fingerprint.
    Raises HeadError for a missing, truncated or foreign file, or a head of another model, layer or shape."""
    file = head_file(path, layer)
    if not file.is_file():
        raise HeadError(f"head {file} does not exist")
    if file.suffix == ".pt":
        loaded = _load_pt(file)
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


def save_pt(folder: str | os.PathLike[str], head: ExitHead, metadata: HeadMetadata) -> Path:
    """Write a least-squares head over all tokens as ee_layer{N}_lsq.pt, whole or not at all.
    Raises HeadError for another kind of head, or one over a draft vocabulary, which such files cannot say."""
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


def _load_pt(file: Path) -> LoadedHead:
    """The head in a .pt file; nothing in the file is ever run (`weights_only=True`). Raises HeadError for a file that
    is damaged, holds anything else, was fitted before the norm, or whose name does not say the layer."""
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
    known = {"weight", "bias", "scale", "after_norm"}
    if not isinstance(tensors, dict) or not {"weight"} <= set(tensors) <= known:
        raise HeadError(
            f"head {file} must hold a weight [vocab, hidden], and a bias [vocab], after_norm (a bool) and "
            "a scale at most"
        )
    for name, tensor in tensors.items():
        if name != "after_norm" and not (isinstance(tensor, Tensor) and tensor.is_floating_point()):
            raise HeadError(f"head {file}: {name!r} is no tensor of floating point numbers; not loaded")
        if name not in ("weight", "bias") and not (isinstance(tensor, Tensor) and tensor.numel() == 1):
            raise HeadError(f"head {file}: {name!r} must be a tensor of one value; not loaded")
    if "after_norm" not in tensors:
        _warn_of_norm(file)
    elif not bool(tensors["after_norm"]):
        raise HeadError(
            f"head {file} was fitted on hidden states before the model's final norm (after_norm is false), "
            "and exit heads here read them after it; fit it again with `selfspec fit-lsq`"
        )
    fit = {"scale": float(tensors["scale"])} if "scale" in tensors else {}
    try:
        head = ExitHead(LEGACY_KIND, {name: tensors[name] for name in ("weight", "bias") if name in tensors})
    except HeadError as error:
        raise HeadError(f"head {file}: {error}") from error
    vocab_size, hidden = head.tensors["weight"].shape
    return LoadedHead(head, HeadMetadata(LEGACY_KIND, layer, hidden, vocab_size, bias="bias" in tensors, fit=fit))


@functools.cache
def _warn_of_norm(file: Path) -> None:
    """Once a file and process."""
    logging.getLogger("vllm.selfspec").warning(
        "head %s does not say whether it was fitted before or after the model's final norm; it is used after the norm. "
        'If that is right, add "after_norm": torch.tensor(True) to the file; if not, fit it again with '
        "`selfspec fit-lsq`",
        file,
    )


# ---- which model a head is of ---------------------------------------------------------------------------------------

CONFIG_FIELDS = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
)
"""The fields of a Hugging Face config.json that define the shape; those that libraries rewrite are left out."""

_SAMPLES = 64  # values per axis at most: enough to tell fine-tunes apart, nothing to read


def model_fingerprint(config: Mapping[str, Any], embedding: Tensor) -> str:
    """Sixteen hexadecimal digits of a SHA-256 over the architecture and a small sample of weights.
    config: of the text model. embedding: of its tokens, [V or more, hidden], which every way of loading the model
    leaves unquantised; gathered where ranks share it. Rows beyond `vocab_size` (padding) are not sampled.
    Up to 64 x 64 values at even spacing are rounded to bfloat16, so that fp32 and bf16 of one model have one
    fingerprint. Weights in fp16 may have another (fp16 cannot hold the smallest values)."""
    shape = {name: config.get(name) for name in CONFIG_FIELDS}
    digest = hashlib.sha256(json.dumps(shape, sort_keys=True).encode())
    rows = min(len(embedding), shape["vocab_size"] or len(embedding))
    sample = embedding.detach()[_spaced(rows, embedding.device)][:, _spaced(embedding.shape[1], embedding.device)]
    # The float32 step makes every storage dtype round once, to the same bfloat16; adding 0 turns -0 into 0.
    rounded = (sample.float().to(torch.bfloat16) + 0.0).cpu().contiguous()
    digest.update(bytes(rounded.view(torch.uint8).flatten().tolist()))  # no numpy here
    return digest.hexdigest()[:16]


def _spaced(length: int, device: torch.device) -> Tensor:
    """Up to 64 indices from 0 to length - 1 at even spacing, in integer arithmetic: the same on every device."""
    count = min(length, _SAMPLES)
    return torch.arange(count, device=device) * (length - 1) // max(count - 1, 1)
