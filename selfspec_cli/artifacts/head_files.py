"""From a config to the file of its exit head: looked up, or gathered from the full one for a draft vocabulary.

A head over a draft vocabulary has the rows, or the translator, of the same head over all tokens, so it is derived from
that one (as `make` would: again whenever its source is newer) and is a file of its own, which any vLLM can be given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from selfspec_cli.config.model_digest import head_folder
from selfspec_cli.config.paths import REFERENCE
from selfspec_cli.config.schema import ConfigError, HeadKind, RunConfig, head_spec
from selfspec_cli.early_exit.errors import SettingsError

if TYPE_CHECKING:
    from torch import Tensor

Counts = Callable[[], "Tensor"]
"""Token counts [V] of a corpus, asked for only when they are needed and no fit has left any."""


def full_head(cfg: RunConfig, layer: int) -> Path | None:
    """The file of the head that `cfg` names at `layer`, over the full vocabulary; None for the lens, which has none.

    Raises:
        ConfigError: it has not been fitted (says how to), or the path is not there.
        HeadError: a .pt file that holds anything but tensors.
    """
    spec = head_spec(cfg.head)
    from selfspec_cli.early_exit.artifact import find_head, load_head  # imports torch

    if cfg.head.path is not None:
        path = Path(cfg.head.path).expanduser()
        if not path.exists():
            raise ConfigError(f"head.path={cfg.head.path}: there is no such file")
        if path.is_dir():
            return find_head(path, layer, None if cfg.head.kind is HeadKind.lens else spec)
        if path.suffix == ".pt":
            load_head(path, layer=layer)  # refused here and not by a worker, whose errors are wrapped
        return path
    if cfg.head.kind is HeadKind.lens:
        return None
    try:
        return find_head(head_folder(cfg), layer, spec)
    except SettingsError as error:
        model = "" if cfg.model.path == REFERENCE else f" model={cfg.model.path}"
        fit = f"fit-lsq --layer {layer}" if spec.name == "lsq" else f"fit head={spec.name} layer={layer}"
        raise ConfigError(f"head={spec.name}: {error}; fit it with: selfspec {fit}{model}") from error


def draft_vocabulary(cfg: RunConfig, vocab_size: int, counts: Counts) -> Tensor | None:
    """Token ids of `cfg.vocab`, int64 [V'] ascending; None for the full vocabulary.

    A number means the most frequent tokens of the text that heads were fitted on (`counts` of the head folder), or of
    what `counts()` counts; with dummy weights, which speak no language, ids at even spacing.

    Raises:
        HeadError: larger than the vocabulary, or a list file with something other than ids of it.
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
    known = draft_vocab.load_counts(head_folder(cfg), vocab_size)
    return most_frequent_ids(counts() if known is None else known, size)


def head_file(cfg: RunConfig, layer: int, hidden: int, vocab_size: int, counts: Counts) -> Path | None:
    """The file to draft with at `layer`; None for the lens over the full vocabulary. A derived file is made if needed.

    Args:
        hidden, vocab_size: of the model.

    Raises:
        ConfigError, HeadError: as `full_head` and `draft_vocabulary`; a head that has a draft vocabulary already.
    """
    source = full_head(cfg, layer)
    ids = draft_vocabulary(cfg, vocab_size, counts)
    if ids is None:
        return source
    from selfspec_cli.early_exit.artifact import HeadMetadata, head_filename, load_head, save_head
    from selfspec_cli.early_exit.draft_vocab import tag_of
    from selfspec_cli.early_exit.head_module import ExitHead, with_draft_vocabulary

    tag = tag_of(cfg.vocab, ids)
    if source is None:
        lens = HeadMetadata("lens", layer, hidden, vocab_size, draft_vocab=tag)
        folder = head_folder(cfg)
        return save_head(
            folder / head_filename(lens.spec, layer, tag), ExitHead("lens", vocab_ids=ids), lens
        )  # a list: cheap to write anew
    target = source.parent / f"{source.stem}_{tag}.safetensors"
    if target.is_file() and target.stat().st_mtime_ns >= source.stat().st_mtime_ns and _is_over(target, ids):
        return target
    head, metadata = load_head(source, layer=layer, hidden=hidden, vocab_size=vocab_size)
    return save_head(target, with_draft_vocabulary(head, ids), replace(metadata, draft_vocab=tag))


def _is_over(path: Path, ids: Tensor) -> bool:
    """Whether the head in a file is over exactly this draft vocabulary."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as opened:
            found = opened.get_tensor("vocab_ids")
    except (SafetensorError, OSError):
        return False
    return found.shape == ids.shape and bool((found == ids).all())
