"""Exit heads on disk: safetensors with metadata, and a safe import of older .pt files.

A file is the head's tensors (weight, or down and up; bias; vocab_ids) and flat string metadata: "format",
"format_version" and one JSON value per field of `HeadMetadata`. A head fitted on another model is refused.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.early_exit.fingerprint import model_fingerprint
from selfspec_cli.early_exit.head_module import ExitHead, check_tensors, check_vocab_ids
from selfspec_cli.early_exit.head_spec import HeadSpec
from selfspec_cli.early_exit.heads import HEADS
from selfspec_cli.early_exit.heads.base import HeadError
from selfspec_cli.early_exit.legacy import LEGACY_KIND, legacy_layer, load_pt

__all__ = [
    "HeadMetadata",
    "LoadedHead",
    "find_head",
    "head_filename",
    "load_head",
    "model_fingerprint",
    "read_metadata",
    "save_head",
]

FORMAT = "selfspec-exit-head"
FORMAT_VERSION = 1
SUFFIX = ".safetensors"


@dataclass(frozen=True)
class HeadMetadata:
    """What is known about a fitted head; a missing value is None, never 0.

    kind: a name of HEADS. layer: exit layer E. hidden, vocab_size: of the model. rank: of a low-rank
    translator. bias: fitted with one. kl: trained after its closed form. draft_vocab: tag of its draft vocabulary
    (`draft_vocab.tag_of`), None for the full one. fingerprint: of the model (`model_fingerprint`). target: what was
    fitted to (next_token, argmax, final_hidden). corpus, pairs, ridge: the data, how many (x, target) pairs, the
    relative ridge. fit: fit statistics. versions: of torch, vllm and so on.
    """

    kind: str
    layer: int
    hidden: int
    vocab_size: int
    rank: int | None = None
    bias: bool = False
    kl: bool = False
    draft_vocab: str | None = None
    fingerprint: str | None = None
    target: str | None = None
    corpus: str | None = None
    pairs: int | None = None
    ridge: float | None = None
    fit: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def spec(self) -> HeadSpec:
        """Which head this is, apart from model, layer and draft vocabulary."""
        return HeadSpec(self.kind, self.target, self.rank, self.bias, self.kl)


class LoadedHead(NamedTuple):
    """What `load_head` returns: head, metadata = load_head(path)."""

    head: ExitHead
    metadata: HeadMetadata


def head_filename(spec: HeadSpec, layer: int, draft_vocab: str | None = None) -> str:
    """The name of a head in a directory of heads, such as layer12_translator_r64_v4096.safetensors.

    draft_vocab: the tag of a draft vocabulary.
    """
    return "_".join([f"layer{layer}", spec.name, *([draft_vocab] if draft_vocab else [])]) + SUFFIX


def save_head(path: str | os.PathLike[str], head: ExitHead, metadata: HeadMetadata) -> Path:
    """Writes the head; the file is there whole or not at all (temporary file, fsync, os.replace).

    Creates the directory. Raises HeadError when head and metadata disagree, OSError when the disk does not oblige.
    """
    target = Path(path)
    if target.suffix != SUFFIX:
        raise HeadError(f"a head is saved as {SUFFIX}, not {target.name!r}")
    tensors = _unshared(head.state_dict())
    _check_tensors(target, tensors, metadata)
    header = {"format": FORMAT, "format_version": str(FORMAT_VERSION)}
    header |= {item.name: json.dumps(getattr(metadata, item.name)) for item in fields(metadata)}
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
    os.close(handle)
    try:
        save_file(tensors, temporary, metadata=header)
        os.chmod(temporary, 0o666 & ~_umask())  # mkstemp's 0600 would hide the head from other users
        with open(temporary, "rb") as written:
            os.fsync(written.fileno())
        os.replace(temporary, target)
    except BaseException:  # KeyboardInterrupt too: an interrupted save leaves nothing behind
        Path(temporary).unlink(missing_ok=True)
        raise
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
    found = loaded.metadata
    wanted = {"layer": layer, "hidden": hidden, "vocab_size": vocab_size, "fingerprint": fingerprint}
    for name, want in wanted.items():
        got = getattr(found, name)
        if want is None or got is None or got == want:
            continue
        if name == "layer":
            raise HeadError(f"head {file} is for layer {got}; layer {want} is asked for")
        raise HeadError(f"head {file} was fitted on another model: its {name} is {got}, this model's is {want}")
    return loaded


def read_metadata(path: str | os.PathLike[str]) -> HeadMetadata:
    """The metadata of a .safetensors head, without its tensors. Raises HeadError as `load_head` does."""
    file = Path(path)
    try:
        with safe_open(file, framework="pt") as opened:
            header = opened.metadata() or {}
    except FileNotFoundError as error:
        raise HeadError(f"head {file} does not exist") from error
    except (SafetensorError, OSError, ValueError) as error:
        raise HeadError(f"head {file} is truncated or no safetensors file: {error}") from error
    if header.get("format") != FORMAT:
        raise HeadError(f"{file} is a safetensors file but no exit head; its format is {header.get('format')!r}")
    if header.get("format_version") != str(FORMAT_VERSION):
        raise HeadError(f"head {file} has format version {header.get('format_version')}; this selfspec reads "
                        f"{FORMAT_VERSION}")  # fmt: skip
    try:
        known = {item.name: json.loads(header[item.name]) for item in fields(HeadMetadata) if item.name in header}
        return HeadMetadata(**known)
    except (TypeError, ValueError) as error:
        raise HeadError(f"head {file} has damaged metadata: {error}") from error


def find_head(
    directory: str | os.PathLike[str], layer: int, spec: HeadSpec | None = None, draft_vocab: str | None = None
) -> Path:
    """The one head for `layer` in a directory, by metadata; legacy .pt files by their name.

    spec: which head, over the full vocabulary or that of tag `draft_vocab`; None takes whatever is there. Raises
    HeadError when there is none (listing what is there) or more than one.
    """
    root = Path(directory)
    if not root.is_dir():
        raise HeadError(f"directory of heads {root} does not exist")
    seen: list[tuple[int, str, str | None, Path]] = []
    unreadable: list[str] = []
    for file in sorted(root.iterdir()):
        if file.suffix == SUFFIX and not file.name.startswith("."):
            try:
                metadata = read_metadata(file)
                seen.append((metadata.layer, metadata.spec.name, metadata.draft_vocab, file))
            except SettingsError as error:
                unreadable.append(str(error))
        elif (old := legacy_layer(file)) is not None:
            seen.append((old, LEGACY_KIND, None, file))
    wanted = None if spec is None else (spec.name, draft_vocab)
    fits = [file for at, what, vocab, file in seen if at == layer and wanted in (None, (what, vocab))]
    if len(fits) == 1:
        return fits[0]
    asked = f"layer {layer}" + (f", {spec.name}" if spec else "") + (f" over {draft_vocab}" if draft_vocab else "")
    if fits:
        raise HeadError(f"{root} has {len(fits)} heads for {asked}; name one: {', '.join(f.name for f in fits)}")
    there = ", ".join(f"{what}{f' over {vocab}' if vocab else ''} at layer {at}" for at, what, vocab, _ in seen)
    raise HeadError("; ".join([f"{root} has no head for {asked}; it has {there or 'no head'}", *unreadable]))


def _load_safetensors(file: Path) -> LoadedHead:
    metadata = read_metadata(file)
    try:
        with safe_open(file, framework="pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (no mapping)
    except (SafetensorError, OSError, ValueError) as error:
        raise HeadError(f"head {file} is truncated or corrupt: {error}") from error
    _check_tensors(file, tensors, metadata)
    ids = tensors.pop("vocab_ids", None)
    return LoadedHead(ExitHead(metadata.kind, tensors, ids), metadata)


def _unshared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous CPU tensors, each in memory of its own: safetensors refuses two views of one tensor."""
    taken: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        own = tensor.detach().cpu().contiguous()
        place = own.untyped_storage().data_ptr()
        result[name] = own.clone() if place in taken else own
        taken.add(place)
    return result


def _check_tensors(file: Path, tensors: Mapping[str, Tensor], metadata: HeadMetadata) -> None:
    """Tensors against metadata: exactly the expected names and shapes, and token ids inside the vocabulary."""
    ids = tensors.get("vocab_ids")
    if ids is not None:
        check_vocab_ids(ids, metadata.vocab_size)
    own = {name: tensor for name, tensor in tensors.items() if name != "vocab_ids"}
    rows = metadata.vocab_size if ids is None else len(ids)
    known = {"rows": rows, "hidden": metadata.hidden} | ({} if metadata.rank is None else {"rank": metadata.rank})
    try:
        sizes = check_tensors(HEADS[metadata.spec.kind], own, known)
        if sizes.get("rank") is not None and metadata.rank is None:
            raise HeadError(f"its rank is {sizes['rank']}, and the metadata have none")
    except SettingsError as error:
        raise HeadError(f"head {file}: {error}") from error


def _load_legacy(file: Path) -> LoadedHead:
    head, layer = load_pt(file)
    vocab_size, hidden = head.tensors["weight"].shape
    bias = "bias" in head.tensors
    return LoadedHead(head, HeadMetadata(head.kind.name, layer, hidden, vocab_size, bias=bias))


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
