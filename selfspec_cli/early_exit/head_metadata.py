"""What is known of an exit head without reading its tensors: the metadata of its file, checked. Free of torch.

The header of a safetensors file names each tensor with its shape, and holds flat string metadata: "format",
"format_version" and one JSON value per field of `HeadMetadata`."""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from selfspec_cli.early_exit.errors import HeadError, SettingsError
from selfspec_cli.early_exit.heads import HEADS, HeadSpec
from selfspec_cli.early_exit.heads.base import HeadKind

FORMAT = "selfspec-exit-head"
FORMAT_VERSION = 1
SUFFIX = ".safetensors"
LEGACY_KIND = "lsq"  # of every .pt head

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class HeadMetadata:
    """What is known about a fitted head; a missing value is None, never 0.
    kind: a name of HEADS. layer: exit layer E. hidden, vocab_size: of the model. rank: of a low-rank translator. bias:
    fitted with one. draft_vocab: tag of its draft vocabulary (`draft_vocab.tag_of`), None for the full one.
    fingerprint: of the model (`model_fingerprint`). target: what it was fitted to. corpus, pairs, ridge: the data, how
    many (x, target) pairs, the relative ridge. fit: fit statistics. versions: of torch, vllm and so on."""

    kind: str
    layer: int
    hidden: int
    vocab_size: int
    rank: int | None = None
    bias: bool = False
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
        return HeadSpec(self.kind, self.target, self.rank, self.bias)


def head_filename(spec: HeadSpec, layer: int, draft_vocab: str | None = None) -> str:
    """The name of a head in a directory of heads, such as layer12_translator_r64_v4096.safetensors."""
    return "_".join([f"layer{layer}", spec.name, *([draft_vocab] if draft_vocab else [])]) + SUFFIX


def read_metadata(path: str | os.PathLike[str]) -> HeadMetadata:
    """The metadata of a .safetensors head, checked against the shapes of its tensors.
    Raises HeadError for a file that is missing, truncated, foreign or contradicts itself."""
    file = Path(path)
    header, shapes = _read_header(file)
    if header.get("format") != FORMAT:
        raise HeadError(f"{file} is a safetensors file but no exit head; its format is {header.get('format')!r}")
    if header.get("format_version") != str(FORMAT_VERSION):
        raise HeadError(
            f"head {file} has format version {header.get('format_version')}; this selfspec reads {FORMAT_VERSION}"
        )
    try:
        values = {item.name: json.loads(header[item.name]) for item in fields(HeadMetadata) if item.name in header}
        metadata = HeadMetadata(**values)
    except (TypeError, ValueError) as error:
        raise HeadError(f"head {file} has damaged metadata: {error}") from error
    require_shapes(file, shapes, metadata)
    return metadata


def require_model(file: Path, metadata: HeadMetadata, **wanted: Any) -> None:
    """Raise HeadError unless a head is for this exit layer and this model.
    wanted: layer, hidden, vocab_size, fingerprint of the model at hand; None, here or in the file, is not checked."""
    for name, want in wanted.items():
        got = getattr(metadata, name)
        if want is None or got is None or got == want:
            continue
        if name == "layer":
            raise HeadError(f"head {file} is for layer {got}; layer {want} is asked for")
        raise HeadError(f"head {file} was fitted on another model: its {name} is {got}, this model's is {want}")


def require_shapes(file: Path, shapes: Shapes, metadata: HeadMetadata) -> None:
    """Raise HeadError unless the shapes are exactly the ones of a head with these metadata."""
    of_head = {name: shape for name, shape in shapes.items() if name != "vocab_ids"}
    rows = shapes["vocab_ids"][0] if shapes.get("vocab_ids") else metadata.vocab_size
    sizes_known = {"rows": rows, "hidden": metadata.hidden} | ({} if metadata.rank is None else {"rank": metadata.rank})
    try:
        sizes = check_shapes(HEADS[metadata.spec.kind], of_head, sizes_known)
        if sizes.get("rank") is not None and metadata.rank is None:
            raise HeadError(f"its rank is {sizes['rank']}, and the metadata have none")
    except SettingsError as error:
        raise HeadError(f"head {file}: {error}") from error


def check_shapes(kind: HeadKind, shapes: Shapes, sizes: Mapping[str, int]) -> dict[str, int]:
    """The sizes "hidden", "rows" and "rank" of a head's tensors, as far as they have them. sizes: known ones. Raises
    HeadError for names that no head of this kind has, or sizes that contradict each other or the known ones."""
    possible = [kind.shapes(low, bias) for low in (False, kind.ranks) for bias in (False, kind.biases)]
    expected_shapes = next((expected for expected in possible if expected.keys() == shapes.keys()), None)
    if expected_shapes is None:
        names = " or ".join(dict.fromkeys(", ".join(expected) or "none" for expected in possible))
        raise HeadError(f"a {kind.name} head has the tensors {names}; here there are {', '.join(shapes) or 'none'}")
    fitted = dict(sizes)
    for name, shape in expected_shapes.items():
        got, known = shapes[name], dict(fitted)
        fits = len(got) == len(shape) and all(
            size == (fitted.setdefault(want, size) if isinstance(want, str) else want)
            for want, size in zip(shape, got, strict=True)
        )
        if not fits:
            expected = ", ".join(f"{want} = {known[want]}" if want in known else str(want) for want in shape)
            raise HeadError(f"{kind.name} {name} has shape {list(got)}; expected [{expected}]")
    return fitted


def legacy_layer(file: Path) -> int | None:
    """The exit layer in the name of a .pt head, ee_layer12_lsq.pt or h12.pt; None for any other name."""
    match = re.fullmatch(r"(?:ee_layer(\d+)_lsq|h(\d+))\.pt", file.name)
    return int(match[1] or match[2]) if match else None


def find_head(directory: str | os.PathLike[str], layer: int, spec: HeadSpec | None = None) -> Path:
    """The one head for `layer` in a directory, by metadata; .pt files by their name. spec: over the full vocabulary;
    None takes any. Raises HeadError when there is none (listing those that are there) or more than one."""
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
    sought = None if spec is None else (spec.name, None)
    fits = [file for at, what, vocab, file in seen if at == layer and sought in (None, (what, vocab))]
    if len(fits) == 1:
        return fits[0]
    what_for = f"layer {layer}" + (f", {spec.name}" if spec else "")
    if fits:
        raise HeadError(f"{root} has {len(fits)} heads for {what_for}; name one: {', '.join(f.name for f in fits)}")
    there = ", ".join(f"{what}{f' over {vocab}' if vocab else ''} at layer {at}" for at, what, vocab, _ in seen)
    raise HeadError("; ".join([f"{root} has no head for {what_for}; it has {there or 'no head'}", *unreadable]))


def head_file(path: str | os.PathLike[str], layer: int | None) -> Path:
    """The file that a path names: itself, or in a directory of heads the one for `layer`. Raises HeadError."""
    file = Path(path)
    if not file.is_dir():
        return file
    if layer is None:
        raise HeadError(f"{file} is a directory of heads; name a file in it, or a layer")
    return find_head(file, layer)


def spec_of(path: str | os.PathLike[str], layer: int | None = None) -> HeadSpec | None:
    """Which head a file holds, or a directory of heads for `layer`; None where that cannot be said."""
    try:
        file = head_file(path, layer)
        return HeadSpec(LEGACY_KIND) if file.suffix == ".pt" else read_metadata(file).spec
    except SettingsError:
        return None


def _read_header(file: Path) -> tuple[dict[str, str], dict[str, tuple[int, ...]]]:
    """The string metadata and the shape of every tensor of a safetensors file."""
    try:
        with safe_open(file, framework="np") as opened:
            shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
            return opened.metadata() or {}, shapes
    except FileNotFoundError as error:
        raise HeadError(f"head {file} does not exist") from error
    except (OSError, SafetensorError) as error:
        raise HeadError(f"head {file} is truncated or no safetensors file: {error}") from error
