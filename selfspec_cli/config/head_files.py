"""The file of a config's exit head: looked up, or derived from the full head for a draft vocabulary.

A head over a draft vocabulary has the rows, or the translator, of the same head over all tokens. So it is derived from
that head, into a file of its own that any vLLM can load.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from selfspec_cli.config.facts import ModelFacts
from selfspec_cli.config.model_digest import head_folder
from selfspec_cli.config.paths import REFERENCE
from selfspec_cli.config.schema import ConfigError, RunConfig, head_spec
from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.early_exit.head_metadata import HeadMetadata, find_head, head_filename, read_metadata, require_model
from selfspec_cli.early_exit.heads import HeadSpec
from selfspec_cli.early_exit.resolved import metadata_of
from selfspec_cli.whole import cache_dir

if TYPE_CHECKING:
    from torch import Tensor

Counts = Callable[[], "Tensor"]
"""Returns token counts [V] of a corpus; called only if no fit has saved any."""


def check_head(cfg: RunConfig, layer: int, facts: ModelFacts) -> None:
    """Refuse (ConfigError, HeadError) a head that cannot be used at `layer` of a model with these facts; reads only a
    file's header."""
    file = full_head(cfg, layer)
    if file is None:
        return
    metadata = metadata_of(file)
    require_model(file, metadata, layer=layer, hidden=facts.hidden, vocab_size=facts.vocab_size)
    asked = head_spec(replace(cfg.head, path=None))
    if asked not in (HeadSpec(), metadata.spec):
        raise ConfigError(f"head={asked.name} with head.path={cfg.head.path}: the file holds {metadata.spec.name}")


def full_head(cfg: RunConfig, layer: int) -> Path | None:
    """Return the file of the head of `cfg` at `layer`, over the full vocabulary; None for a head that needs no fit.

    Raises ConfigError where it has not been fitted, HeadError where a folder of the user's has none, or several.
    """
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
    """Return the token ids of `cfg.vocab`, int64 [V'] ascending; None for the full vocabulary.

    A number means the most frequent tokens of the text on which heads were fitted (counts in the head folder), or else
    of the text that `counts()` counts. With dummy weights, which speak no language, ids are evenly spaced. Raises
    HeadError for more tokens than the vocabulary has, or a list file with anything but its ids.
    """
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
    vocabulary.

    A derived file is made if needed, in a cache (`whole.cache_dir`), named by a digest of head and draft vocabulary.
    Raises ConfigError or HeadError as `full_head` and `draft_vocabulary`; for a head that already has a draft
    vocabulary, or is of another layer or shape; for a cache that cannot be written.
    """
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
    name = Path(head_filename(metadata.spec, layer, metadata.draft_vocab))
    target = cache_dir() / "heads" / f"{name.stem}-{_digest(source, metadata, ids)}{name.suffix}"
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


def _digest(source: Path | None, metadata: HeadMetadata, ids: Tensor | None) -> str:
    digest = hashlib.sha256(f"{metadata}{None if ids is None else ids.tolist()}".encode())
    if source is not None:
        with open(source, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]
