"""Text to fit exit heads on and to count tokens of, by one word: what a user names after --corpus.

    stdlib             Python's standard library; heads are tested on the modules that are held out everywhere
    FILE.json, .jsonl  conversations as ShareGPT has them: [{"conversations": [{"from": ..., "value": ...}, ...]}, ...]
    FILE               any other file: plain text
    hf:NAME            a Hugging Face data set; hf:NAME:SPLIT and hf:NAME:SPLIT:COLUMN name its split and text column
    random             random token ids: for dummy weights, which speak no language. Says nothing about any head.

Of a user's own text every tenth block is held out for the test, and what repeats the held-out modules is left out.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfspec_cli.config.schema import ConfigError
from selfspec_cli.texts import library as corpus

if TYPE_CHECKING:
    from torch import Tensor

Texts = list[tuple[str, str]]
Encode = Callable[[str], list[int]]

BLOCK = 20_000  # characters: short documents are joined into blocks this long, so that whole windows fit in
HELD_OUT_EVERY = 10
MOST_CHARACTERS = 100_000_000  # of a data set; far more than any fit reads
COUNTED_CHARACTERS = 6_000_000  # of a corpus, for token frequencies


@dataclass(frozen=True)
class Corpus:
    """name: as artifacts and rows say it. fitting, held_out: (name, text) pairs; empty for random token ids."""

    name: str
    fitting: Texts = field(default_factory=list)
    held_out: Texts = field(default_factory=list)

    @property
    def is_random(self) -> bool:
        """Token ids without a text."""
        return not self.fitting

    def windows(
        self, part: str, encode: Encode, vocab_size: int, length: int, count: int, seed: int
    ) -> list[list[int]]:
        """`count` windows of `length` token ids from "fitting" or "held_out", the same ones for the same seed.

        Raises:
            ConfigError: the text is too short for them.
        """
        if self.is_random:
            draw = random.Random(f"{part} {seed}")
            return [[draw.randrange(vocab_size) for _ in range(length)] for _ in range(count)]
        try:
            return corpus.token_windows(encode, getattr(self, part), length, count, seed)
        except ValueError as error:
            raise ConfigError(f"corpus={self.name}: {error}") from error

    def counts(self, encode: Encode, vocab_size: int) -> Tensor:
        """How often each token occurs in the fitting part (6 million characters of it at most), int64 [V]."""
        from selfspec_cli.early_exit.draft_vocab import count_tokens

        texts = list(self.fitting)
        random.Random(0).shuffle(texts)  # a part of the text stands for all of it
        room, taken = COUNTED_CHARACTERS, []
        for _, text in texts:
            taken.append(text[:room])
            room -= len(taken[-1])
            if room <= 0:
                break
        return count_tokens(map(encode, taken), vocab_size)


def standard_library_counts(encode: Encode, vocab_size: int) -> Tensor:
    """Token counts [V] of the standard library, the default corpus."""
    return load("stdlib").counts(encode, vocab_size)


def load(source: str) -> Corpus:
    """The corpus that `source` names; see the top of this file.

    Raises:
        ConfigError: no such file, a file of another shape, too little text, or `datasets` is not installed.
    """
    if source == "stdlib":
        return Corpus("standard library, held-out modules excluded", corpus.fitting_text(), corpus.held_out_text())
    if source == "random":
        return Corpus("random token ids (not a text)")
    if source.startswith("hf:"):
        return _split(source, _data_set(source))
    path = Path(source).expanduser()
    if not path.is_file():
        raise ConfigError(f"corpus={source}: there is no such file; allowed: stdlib, random, hf:NAME, a ShareGPT .json "
                          "or .jsonl, or a text file")  # fmt: skip
    if path.suffix in (".json", ".jsonl"):
        return _split(source, _conversations(path))
    try:
        return _split(source, path.read_text(encoding="utf-8").split("\n\n"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"corpus={source}: is not UTF-8 text ({error})") from error


def _split(source: str, documents: Iterable[str]) -> Corpus:
    """Blocks of documents; every tenth is held out. Blocks that repeat the held-out modules are dropped."""
    known = corpus.fingerprints(text for _, text in corpus.held_out_text())
    blocks = [block for block in _blocks(documents) if not corpus.is_contaminated(block, known)]
    named = [(f"{source} block {number}", block) for number, block in enumerate(blocks)]
    held_out, fitting = named[::HELD_OUT_EVERY], [pair for at, pair in enumerate(named) if at % HELD_OUT_EVERY]
    if not fitting:
        raise ConfigError(f"corpus={source}: too little text ({sum(map(len, blocks)):,} characters); "
                          f"at least {2 * BLOCK:,} are needed")  # fmt: skip
    return Corpus(source, fitting, held_out)


def _blocks(documents: Iterable[str]) -> Iterator[str]:
    held: list[str] = []
    length = total = 0
    for document in documents:
        held.append(document)
        length += len(document)
        if length >= BLOCK:
            yield "\n\n".join(held)
            total, held, length = total + length, [], 0
        if total >= MOST_CHARACTERS:
            return
    if held and length:
        yield "\n\n".join(held)


def _conversations(path: Path) -> Iterator[str]:
    """The turns of each conversation, a blank line between them."""
    try:
        text = path.read_text(encoding="utf-8")
        entries = json.loads(text) if path.suffix == ".json" else [json.loads(row) for row in text.splitlines() if row]
        for entry in entries:
            yield "\n\n".join(str(turn["value"]) for turn in entry["conversations"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f'corpus={path}: is not ShareGPT: a list of {{"conversations": [{{"value": ...}}]}} '
                          f"({type(error).__name__}: {error})") from error  # fmt: skip


def _data_set(source: str) -> Iterator[str]:
    """The text column of a data set, row by row."""
    _, name, split, column = (source.split(":") + ["train", "text"][len(source.split(":")) - 2 :])[:4]
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ConfigError(f"corpus={source}: needs the package datasets; pip install datasets") from error
    try:
        rows: Any = load_dataset(name, split=split)
    except Exception as error:  # the library raises its own types, the Hub's and the network's
        raise ConfigError(f"corpus={source}: cannot be loaded ({type(error).__name__}: {error})") from error
    if column not in rows.column_names:
        raise ConfigError(f"corpus={source}: has no column {column!r}; columns: {', '.join(rows.column_names)}")
    return (str(row[column]) for row in rows)
