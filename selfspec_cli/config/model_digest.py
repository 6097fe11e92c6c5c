"""Which weights a config names, by their content: two models of one name are told apart, two copies of one are equal.

    a folder           config.json, and of every weight file its size, its safetensors header and samples of each tensor
    Hugging Face id    the id and the commit of its snapshot in the local cache; before it is downloaded, the revision
    dummy weights      config.json and the seed that vLLM draws the weights from

`hf_overrides` replace entries of config.json, so they are part of all. No network is asked.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

from selfspec_cli.config import paths
from selfspec_cli.config.schema import ConfigError, RunConfig

LENGTH = 16  # hex digits of a fingerprint
SHORT = 8  # of them, how many stand in the names of folders and files
WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
BLOCK = 4096  # bytes of one sample
SAMPLES = 16  # blocks of one tensor, evenly spaced; a tensor no larger than all of them is read whole
FILE_SAMPLES = 1024  # likewise of a weight file that is not safetensors
_ABOUT_THE_FILE = ("_name_or_path", "transformers_version")  # entries of config.json that say nothing of the model

Files = tuple[tuple[str, int, int], ...]
"""Name, modification time (ns) and size (bytes) of the files that a fingerprint reads."""


def model_fingerprint(cfg: RunConfig) -> str:
    """Sixteen hex digits that name the weights of `cfg`; equal for equal content wherever it is stored. Weights are
    sampled: a change that leaves every sampled block of a tensor larger than 64 KiB as it was is not seen; no
    fine-tuning does that. Raises ConfigError where the model's folder cannot be read."""
    model, dummy = cfg.model, cfg.model.load_format == "dummy"
    folder = Path(paths.model_path(model)).expanduser()
    facts: dict[str, object] = {"overrides": model.hf_overrides} | ({"seed": cfg.seed} if dummy else {})
    if not folder.is_dir():
        file = paths.in_hub_cache(model, "config.json")  # its folder has the name of the commit
        facts["hub"] = [model.path, model.revision or "main" if file is None else file.parent.name]
    else:
        facts["folder"] = _of_folder(str(folder.resolve()), _listed(folder, weights=not dummy))
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:LENGTH]


def safe_name(name: str) -> str:
    """A model's name as part of a file's: org/M -> org--M, and no letter that a shell or a file system minds."""
    return re.sub(r"[^\w.-]", "-", name.replace("/", "--"))


def folder_name(cfg: RunConfig) -> str:
    """What files and folders that belong to one model are called: its name, for people, and a part of its
    fingerprint, which may raise ConfigError."""
    return f"{safe_name(cfg.model.name)}-{model_fingerprint(cfg)[:SHORT]}"


def head_folder(cfg: RunConfig) -> Path:
    """Where heads fitted on this model are kept: a folder a model, because file names say only layer and kind."""
    return Path(cfg.head_dir).expanduser() / folder_name(cfg)


def _listed(folder: Path, weights: bool) -> Files:
    """The files of a model folder that decide what it computes, by name."""
    try:
        found = [folder / "config.json"]
        if weights:
            found += sorted(file for file in folder.iterdir() if file.suffix in WEIGHT_FILES)
        stats = [(file.name, file.stat()) for file in found]
    except OSError as error:
        raise ConfigError(f"cannot read the model in {folder}: {error.strerror}") from error
    return tuple((name, stat.st_mtime_ns, stat.st_size) for name, stat in stats)


@lru_cache(maxsize=256)
def _of_folder(folder: str, files: Files) -> str:
    """SHA-256 of what `_listed` found; a change of a time or a size in `files` is read anew."""
    digest = hashlib.sha256()
    for name, _, size in files:
        path = Path(folder) / name
        digest.update(f"{name} ".encode())
        try:
            if name == "config.json":
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
        return
    for number in range(samples):
        yield start + number * (size - BLOCK) // (samples - 1), BLOCK
