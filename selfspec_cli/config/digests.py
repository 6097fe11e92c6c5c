"""What the files that a config names hold, as short digests: a file that was written anew is another measurement.

Digests are kept for the life of the process by path, modification time and size, so that ten thousand configs that
share a model read it once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from selfspec_cli.config.facts import exit_layer
from selfspec_cli.config.head_files import full_head
from selfspec_cli.config.model_digest import head_folder, model_fingerprint
from selfspec_cli.config.paths import model_path, prompts_file
from selfspec_cli.config.schema import EARLY_EXIT, HUMANEVAL, PROMPTS, RunConfig, head_spec
from selfspec_cli.config.speculative import draft_of
from selfspec_cli.early_exit.errors import SettingsError

T = TypeVar("T")
DIGITS = 16
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
COUNTS_FILE = "token_counts.safetensors"  # what a fit leaves beside the heads: how often each token occurred


def digests(cfg: RunConfig) -> dict[str, str]:
    """Digests of what `cfg` reads, by name: model, tokenizer, prompts, head, vocab, draft_weights, and of
    method vllm the draft. What it does not use, and what is not here (an engine refuses it), is left out."""
    model = _unless_refused(model_fingerprint, cfg)
    found = {"model": model, "tokenizer": _unless_refused(_tokenizer, cfg)}
    if cfg.workload.prompts not in PROMPTS or cfg.workload.prompts == HUMANEVAL:
        found["prompts"] = file_digest(prompts_file(cfg.workload.prompts))
    if cfg.method in EARLY_EXIT and model is not None:
        found |= {"head": _head(cfg), "vocab": _vocabulary(cfg)}
    if (draft := draft_of(cfg)) is not None:
        found["draft"] = _unless_refused(model_fingerprint, RunConfig(model=draft))
    if cfg.method == "layer_skip" and cfg.draft_weights_path is not None:
        found["draft_weights"] = file_digest(Path(cfg.draft_weights_path).expanduser())
    return {name: digest for name, digest in found.items() if digest is not None}


def file_digest(path: Path) -> str | None:
    """Digest of a file's whole content; None where it cannot be read."""
    try:
        stat = path.stat()
        return _content_digest(str(path), stat.st_mtime_ns, stat.st_size)
    except OSError:
        return None


def _unless_refused(find: Callable[[RunConfig], T], cfg: RunConfig) -> T | None:
    """What is found; None where the config names something that is not here."""
    try:
        return find(cfg)
    except SettingsError:
        return None


def _head(cfg: RunConfig) -> str | None:
    head_spec(replace(cfg.head, path=None))  # raises SettingsError for a combination that there is not
    layer = layer_in_force(cfg) or 0  # no head is of layer 0: without a layer only a file that is named is found
    file = _unless_refused(lambda cfg: full_head(cfg, layer), cfg)
    return None if file is None else file_digest(file)


def _vocabulary(cfg: RunConfig) -> str | None:
    """Of a list of token ids the list; of a number the token counts that say which tokens are the most frequent."""
    if cfg.vocab == "full":
        return None
    return file_digest(head_folder(cfg) / COUNTS_FILE if cfg.vocab.isdigit() else Path(cfg.vocab).expanduser())


def _tokenizer(cfg: RunConfig) -> str | None:
    folder = Path(cfg.model.tokenizer or model_path(cfg.model)).expanduser()
    found = [digest for name in TOKENIZER_FILES if (digest := file_digest(folder / name)) is not None]
    return hashlib.sha256(" ".join(found).encode()).hexdigest()[:DIGITS] if found else None


def layer_in_force(cfg: RunConfig) -> int | None:
    """The exit layer of a config, half of the layers where none is given; None where nothing here says how many."""
    return _unless_refused(exit_layer, cfg)


@lru_cache(maxsize=4096)
def _content_digest(path: str, mtime_ns: int, size: int) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:DIGITS]
