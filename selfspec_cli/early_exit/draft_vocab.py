"""Draft vocabularies: which V' tokens a draft may be. Counted from text, or read from a list.

A vocabulary has a tag, which is part of the name of every head over it: v4096 for the 4,096 most frequent tokens,
v4096-1f2e3d4c for a list of 4,096 (its digest tells two lists apart)."""

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from selfspec_cli.early_exit.errors import HeadError
from selfspec_cli.early_exit.head_module import check_vocab_ids, most_frequent_ids
from selfspec_cli.whole import written

COUNTS_FILE = "token_counts.safetensors"


def tag_of(vocab: str, ids: Tensor) -> str | None:
    """The tag of the vocabulary that a user calls `vocab` ("full", a number, or a list file); None for the full one."""
    if vocab == "full":
        return None
    if vocab.isdigit():
        return f"v{len(ids)}"
    digest = hashlib.sha256(",".join(map(str, ids.tolist())).encode()).hexdigest()
    return f"v{len(ids)}-{digest[:8]}"


def read_ids(path: str | os.PathLike[str], vocab_size: int) -> Tensor:
    """Token ids from a list file, int64 [V'] ascending: a JSON list, or numbers separated by spaces or lines, in any
    order.
    Raises HeadError for no list of integers, an empty one, or an id outside 0..vocab_size-1."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        ids = json.loads(text) if text.lstrip().startswith("[") else [int(word) for word in text.split()]
    except (OSError, ValueError) as error:
        raise HeadError(f"draft vocabulary {path} is no list of token ids: {error}") from error
    if not all(isinstance(number, int) and not isinstance(number, bool) for number in ids):
        raise HeadError(f"draft vocabulary {path} holds something other than integers")
    try:
        return check_vocab_ids(torch.tensor(sorted(set(ids)), dtype=torch.int64), vocab_size)
    except HeadError as error:
        raise HeadError(f"{path}: {error}") from error
    except (ValueError, RuntimeError, OverflowError) as error:  # torch has no such integer
        raise HeadError(f"{path}: a token id is out of range; allowed: 0 to {vocab_size - 1}") from error


def ids_of(vocab: str, vocab_size: int) -> Tensor | None:
    """Token ids that a plain speculative_config's `vocab` names, int64 [V'] ascending; None for "full". A number V'
    means the first V' ids: with byte pair encoding about the most frequent. Raises HeadError as `read_ids`."""
    if vocab == "full":
        return None
    if not vocab.isdigit():
        return read_ids(vocab, vocab_size)
    if not 1 <= int(vocab) <= vocab_size:
        raise HeadError(f"vocab = {vocab} is out of range; allowed: 1 to {vocab_size}, the vocabulary, or 'full'")
    return torch.arange(int(vocab))


def spread_ids(size: int, vocab_size: int) -> Tensor:
    """`size` ids at even spacing, int64 ascending, for dummy weights. Raises HeadError for a size outside 1..V."""
    most_frequent_ids(torch.zeros(vocab_size), size)  # its check of the size
    return torch.arange(size) * vocab_size // size


def count_tokens(windows: Iterable[Sequence[int]], vocab_size: int) -> Tensor:
    """How often each token occurs, int64 [V]. Ids outside the vocabulary are left out."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for window in windows:
        counts += torch.bincount(torch.tensor(window, dtype=torch.int64), minlength=vocab_size)[:vocab_size]
    return counts


def save_counts(folder: str | os.PathLike[str], counts: Tensor, corpus: str) -> Path:
    """Keep token counts in a folder of heads, whole or not at all."""
    target = Path(folder) / COUNTS_FILE
    with written(target) as part:
        save_file({"counts": counts}, part, metadata={"corpus": corpus})
    return target


def load_counts(folder: str | os.PathLike[str], vocab_size: int, corpus: str | None = None) -> Tensor | None:
    """The token counts of a folder of heads, [V]; None if there are none for this vocabulary size and corpus.
    corpus: None takes whatever was counted last."""
    try:
        with safe_open(Path(folder) / COUNTS_FILE, framework="pt") as opened:
            counts = opened.get_tensor("counts")
            counted = (opened.metadata() or {}).get("corpus")
    except (SafetensorError, OSError):
        return None
    return counts if counts.shape == (vocab_size,) and corpus in (None, counted) else None
