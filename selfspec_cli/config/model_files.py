"""Files of a model: which weights a config names, by their content, and the heads that were fitted on them.

Two models of one name are told apart, two copies of one are equal. A fingerprint is of

    a folder           config.json, and of every weight file its size, its safetensors header and samples of each tensor
    Hugging Face id    the id and the commit of its snapshot in the local cache; before it is downloaded, the revision
    dummy weights      config.json and the seed that vLLM draws the weights from

`hf_overrides` replace entries of config.json, so they are part of all. No network is asked. A head over a draft
vocabulary is derived from the full head, into a file of its own that any vLLM can load.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from selfspec_cli.config import paths
from selfspec_cli.config.facts import ModelFacts
from selfspec_cli.config.paths import REFERENCE
from selfspec_cli.config.schema import ConfigError, RunConfig, head_spec
from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.early_exit.head_metadata import HeadMetadata, find_head, head_filename, read_metadata, require_model
from selfspec_cli.early_exit.heads import HeadSpec
from selfspec_cli.early_exit.resolved import metadata_of
from selfspec_cli.whole import cache_dir

if TYPE_CHECKING:
    from torch import Tensor

LENGTH = 16  # hex digits of a fingerprint
SHORT = 8  # of them, how many stand in the names of folders and files
WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
BLOCK = 4096  # bytes of one sample
SAMPLES = 16  # blocks of one tensor, evenly spaced; a tensor no larger than all of them is read whole
FILE_SAMPLES = 1024  # likewise of a weight file that is not safetensors
_ABOUT_THE_FILE = ("_name_or_path", "transformers_version")  # entries of config.json that say nothing of the model


def model_fingerprint(cfg: RunConfig) -> str:
    """Sixteen hex digits that name the weights of `cfg`; equal for equal content wherever it is stored. Weights are
    sampled: a change that leaves every sampled block of a tensor larger than 64 KiB as it was is not seen; no
    fine-tuning does that. Raises ConfigError where the model's folder cannot be read."""
    model, dummy = cfg.model, cfg.model.load_format == "dummy"
    folder = Path(paths.model_path(model)).expanduser()
    facts: dict[str, object] = {"overrides": model.hf_overrides} | ({"seed": cfg.seed} if dummy else {})
    if folder.is_dir():
        facts["folder"] = _of_folder(folder.resolve(), weights=not dummy)
    else:
        file = paths.in_hub_cache(model, "config.json")  # its folder has the name of the commit
        facts["hub"] = [model.path, model.revision or "main" if file is None else file.parent.name]
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:LENGTH]


def safe_name(name: str) -> str:
    """A model's name as part of a file's: org/M -> org--M, and no letter that a shell or a file system minds."""
    return re.sub(r"[^\w.-]", "-", name.replace("/", "--"))


def folder_name(cfg: RunConfig) -> str:
    """A model's name, for people, with a part of its fingerprint: for files and folders. May raise ConfigError."""
    return f"{safe_name(cfg.model.name)}-{model_fingerprint(cfg)[:SHORT]}"


def head_folder(cfg: RunConfig) -> Path:
    """Where heads fitted on this model are kept: a folder a model, because file names say only layer and kind."""
    return Path(cfg.head_dir).expanduser() / folder_name(cfg)


def _of_folder(folder: Path, weights: bool) -> str:
    """SHA-256 of the files that decide what a model computes; a file whose time or size changed is read anew."""
    try:
        found = [folder / "config.json"]
        if weights:
            found += sorted(file for file in folder.iterdir() if file.suffix in WEIGHT_FILES)
        stats = [(file, file.stat()) for file in found]
    except OSError as error:
        raise ConfigError(f"cannot read the model in {folder}: {error.strerror}") from error
    return _of_files(tuple((file, stat.st_mtime_ns, stat.st_size) for file, stat in stats))


@lru_cache(maxsize=256)
def _of_files(files: tuple[tuple[Path, int, int], ...]) -> str:
    digest = hashlib.sha256()
    for path, _, size in files:
        digest.update(f"{path.name} ".encode())
        try:
            if path.name == "config.json":
                digest.update(_config(path))
                continue
            digest.update(f"{size} ".encode())
            with path.open("rb") as file:
                for offset, length in _pieces(file, path.suffix, size):
                    file.seek(offset)
                    digest.update(file.read(length))
        except OSError as error:
            raise ConfigError(f"cannot read the model file {path}: {error.strerror}") from error
    return digest.hexdigest()


def _config(path: Path) -> bytes:
    """config.json in one spelling, without what says where the file came from."""
    raw = path.read_bytes()
    try:
        content = json.loads(raw)
    except ValueError:
        return raw  # who loads the model says what is wrong with it
    if isinstance(content, dict):
        content = {key: value for key, value in content.items() if key not in _ABOUT_THE_FILE}
    return json.dumps(content, sort_keys=True).encode()


def _pieces(file: BinaryIO, suffix: str, size: int) -> Iterator[tuple[int, int]]:
    """(offset, length) of the bytes of a weight file that its digest is made of."""
    try:
        header, tensors = _safetensors(file, size) if suffix == ".safetensors" else (0, [])
    except (ValueError, KeyError, TypeError, AttributeError):
        header, tensors = 0, []  # not in that format after all
    if not tensors:
        yield from _spread(0, size, FILE_SAMPLES)
        return
    yield 0, header
    for start, end in tensors:
        yield from _spread(header + start, end - start, SAMPLES)


def _safetensors(file: BinaryIO, size: int) -> tuple[int, list[tuple[int, int]]]:
    """Bytes before the first tensor, and where each tensor begins and ends after them. The format: eight bytes with the
    header's length, the header in JSON, then the tensors back to back."""
    length = int.from_bytes(file.read(8), "little")
    if length > size:
        raise ValueError("longer than the file")
    header = json.loads(file.read(length))
    places = [facts["data_offsets"] for name, facts in header.items() if name != "__metadata__"]
    return 8 + length, sorted((int(start), int(end)) for start, end in places)


def _spread(start: int, size: int, samples: int) -> Iterator[tuple[int, int]]:
    """All of `size` bytes from `start` if they are few, otherwise evenly spaced blocks, the first and the last in."""
    if size <= samples * BLOCK:
        yield start, size
    else:
        yield from ((start + number * (size - BLOCK) // (samples - 1), BLOCK) for number in range(samples))


Counts = Callable[[], "Tensor"]  # returns token counts [V] of a corpus; called only if no fit has saved any


def check_head(cfg: RunConfig, layer: int, facts: ModelFacts) -> None:
    """Refuse (ConfigError, HeadError) a head that `layer` of such a model cannot use; reads only a file's header."""
    if (file := full_head(cfg, layer)) is None:
        return
    metadata, asked = metadata_of(file), head_spec(replace(cfg.head, path=None))
    require_model(file, metadata, layer=layer, hidden=facts.hidden, vocab_size=facts.vocab_size)
    if asked not in (HeadSpec(), metadata.spec):
        raise ConfigError(f"head={asked.name} with head.path={cfg.head.path}: the file holds {metadata.spec.name}")


def full_head(cfg: RunConfig, layer: int) -> Path | None:
    """Return the file of the head of `cfg` at `layer`, over the full vocabulary; None for a head that needs no fit.
    Raises ConfigError where it has not been fitted, HeadError where a folder of the user's has none, or several."""
    spec = head_spec(replace(cfg.head, path=None))
    if cfg.head.path is not None:
        path = Path(cfg.head.path).expanduser()
        if not path.exists():
            raise ConfigError(f"head.path={cfg.head.path}: there is no such file")
        return find_head(path, layer, None if spec == HeadSpec() else spec) if path.is_dir() else path
    if spec.target is None:
        return None
    try:
        return find_head(head_folder(cfg), layer, spec)
    except SettingsError as error:
        model = "" if cfg.model.path == REFERENCE else f" model={cfg.model.path}"
        fit = f"fit-lsq --layer {layer}" if spec.name == "lsq" else f"fit head={spec.name} layer={layer}"
        raise ConfigError(f"head={spec.name}: {error}; fit it with: selfspec {fit}{model}") from error


def draft_vocabulary(cfg: RunConfig, vocab_size: int, counts: Counts) -> Tensor | None:
    """Return the token ids of `cfg.vocab`, int64 [V'] ascending; None for the full vocabulary. A number means the most
    frequent tokens of the text of the fits (counts in the head folder), or else of `counts()`; with dummy weights
    evenly spaced ids. Raises HeadError for more tokens than the vocabulary has, or a file of anything but its ids."""
    from selfspec_cli.early_exit import draft_vocab  # imports torch
    from selfspec_cli.early_exit.head_module import most_frequent_ids

    if cfg.vocab == "full":
        return None
    if not cfg.vocab.isdigit():
        return draft_vocab.read_ids(cfg.vocab, vocab_size)
    size = int(cfg.vocab)
    if cfg.model.load_format == "dummy" or size > vocab_size:  # the latter to be refused
        return draft_vocab.spread_ids(size, vocab_size)
    saved_counts = draft_vocab.load_counts(head_folder(cfg), vocab_size)
    return most_frequent_ids(counts() if saved_counts is None else saved_counts, size)


def head_file(cfg: RunConfig, layer: int, hidden: int, vocab_size: int, counts: Counts) -> Path | None:
    """Return the head file to draft with at `layer` of a model of this shape; None for the lens over the full
    vocabulary. A derived file is made if needed, in a cache (`whole.cache_dir`), named by a digest of head and draft
    vocabulary. Raises ConfigError or HeadError as `full_head` and `draft_vocabulary`; for a head that already has a
    draft vocabulary, or is of another layer or shape; for a cache that cannot be written."""
    source, spec = full_head(cfg, layer), head_spec(cfg.head, layer)
    ids = draft_vocabulary(cfg, vocab_size, counts)
    if ids is None and (source is not None or spec == HeadSpec()):
        return source
    from selfspec_cli.early_exit.artifact import load_head, save_head
    from selfspec_cli.early_exit.draft_vocab import tag_of
    from selfspec_cli.early_exit.head_module import ExitHead, with_draft_vocabulary

    if source is None:
        head, metadata = ExitHead(spec.kind), HeadMetadata(spec.kind, layer, hidden, vocab_size)
    else:
        head, metadata = load_head(source, layer=layer, hidden=hidden, vocab_size=vocab_size)
    if ids is not None:
        head, metadata = with_draft_vocabulary(head, ids), replace(metadata, draft_vocab=tag_of(cfg.vocab, ids))
    digest = hashlib.sha256(f"{metadata}{None if ids is None else ids.tolist()}".encode())
    if source is not None:
        with open(source, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    name = Path(head_filename(metadata.spec, layer, metadata.draft_vocab))
    target = cache_dir() / "heads" / f"{name.stem}-{digest.hexdigest()[:16]}{name.suffix}"
    with suppress(SettingsError):
        read_metadata(target)
        return target  # it was derived before, and is whole
    try:
        return save_head(target, head, metadata)
    except OSError as error:
        raise ConfigError(
            f"vocab={cfg.vocab}: the head for it cannot be written to {target.parent} ({error}); set XDG_CACHE_HOME "
            "to a folder with room that can be written to"
        ) from error
