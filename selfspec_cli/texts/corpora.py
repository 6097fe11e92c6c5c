"""Text to fit exit heads on, to count tokens of and to score, by the value of --corpus.

    stdlib          Python's standard library; heads are tested on the modules that are held out everywhere
    FILE            plain text
    FILE[:COLUMN]   rows in a .json, .jsonl or .parquet file
    random          random token ids, for dummy weights, which speak no language; says nothing about heads

COLUMN holds the text; the default is `text`, or `conversations` in ShareGPT's form: [{"from": ..., "value": ...}, ...].
Every tenth block of a user's own text is held out for the test, and blocks that repeat the held-out modules are left
out.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfspec_cli.config.schema import PROMPT_TABLES, ConfigError
from selfspec_cli.texts import library, prompt_files

if TYPE_CHECKING:
    from torch import Tensor

Texts = list[tuple[str, str]]
Encode = Callable[[str], list[int]]

BLOCK = 20_000  # characters; short documents are joined into blocks of this length, so that whole windows fit
HELD_OUT_EVERY = 10
MOST_CHARACTERS = 100_000_000  # of a data set; far more than any fit reads
COLUMNS = ("text", "conversations")  # the first of these that exists, unless the user names one
COUNTED_CHARACTERS = 6_000_000  # of a corpus, for token frequencies


@dataclass(frozen=True)
class Corpus:
    """A text to fit on. name: in artifacts and rows. fitting, held_out: (name, text) pairs; empty for random ids."""

    name: str
    fitting: Texts = field(default_factory=list)
    held_out: Texts = field(default_factory=list)

    @property
    def is_random(self) -> bool:
        return not self.fitting

    def windows(
        self, part: str, encode: Encode, vocab_size: int, length: int, count: int, seed: int
    ) -> list[list[int]]:
        """Draw `count` windows of `length` token ids from part "fitting" or "held_out"; equal seeds give equal windows.
        Raises ConfigError where the text is too short."""
        if self.is_random:
            draw = random.Random(f"{part} {seed}")
            return [[draw.randrange(vocab_size) for _ in range(length)] for _ in range(count)]
        try:
            return library.token_windows(encode, getattr(self, part), length, count, seed)
        except ValueError as error:
            raise ConfigError(f"corpus={self.name}: {error}") from error

    def counts(self, encode: Encode, vocab_size: int) -> Tensor:
        """Count each token in at most 6 million characters of the fitting part; int64 [V]."""
        from selfspec_cli.early_exit.draft_vocab import count_tokens

        texts = list(self.fitting)
        random.Random(0).shuffle(texts)  # so that the first texts are a sample
        room, taken = COUNTED_CHARACTERS, []
        while texts and room:
            taken.append(texts.pop(0)[1][:room])
            room -= len(taken[-1])
        return count_tokens(map(encode, taken), vocab_size)


def load(source: str) -> Corpus:
    """Return the corpus that `source` names in a form of this file's docstring. Raises ConfigError for too little."""
    if source == "stdlib":
        return Corpus("standard library, held-out modules excluded", library.fitting_text(), library.held_out_text())
    if source == "random":
        return Corpus("random token ids (not a text)")
    blocks = _uncontaminated(_rows(source))
    named = [(f"{source} block {at}", "\n\n".join(block)) for at, block in enumerate(blocks)]
    held_out, fitting = named[::HELD_OUT_EVERY], [pair for at, pair in enumerate(named) if at % HELD_OUT_EVERY]
    if not fitting:
        size = sum(len(block) for _, block in named)
        raise ConfigError(f"corpus={source}: too little text ({size:,} characters); at least {2 * BLOCK:,} are needed")
    return Corpus(source, fitting, held_out)


def documents(source: str, most: int, *, held_out: bool = False) -> Texts:
    """Return (name, text) of at most `most` documents to score: held-out modules, rows of a table, or blocks of plain
    text. held_out: only blocks that no fit on this corpus reads. Raises ConfigError, also for random token ids."""
    if source == "random":
        raise ConfigError("corpus=random: random token ids are no text, and their perplexity says nothing")
    if source == "stdlib":
        return library.held_out_text()[:most]
    pieces = _rows(source)
    if held_out:
        pieces = (piece for block in _uncontaminated(pieces)[::HELD_OUT_EVERY] for piece in block)
    if _file(source)[0].suffix not in PROMPT_TABLES:
        pieces = ("\n\n".join(block) for block in _blocks(pieces))
    named = ((f"{source} {number}", piece) for number, piece in enumerate(pieces) if piece.strip())
    texts = list(islice(named, most))
    if not texts:
        raise ConfigError(f"corpus={source}: it holds no text to score")
    return texts


def _rows(source: str) -> Iterator[str]:
    """Yield the rows of a table, or the paragraphs of a plain text; raises as `load`."""
    check(source)
    path, column = _file(source)
    if path.suffix in PROMPT_TABLES:
        yield from _texts(source, prompt_files.rows(str(path), "corpus"), column)
        return
    try:
        yield from path.read_text(encoding="utf-8").split("\n\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"corpus={source}: is not UTF-8 text ({error})") from error


def check(source: str) -> None:
    """Refuse an unknown form or a missing file, without reading a corpus; raises ConfigError."""
    if source not in ("stdlib", "random") and not _file(source)[0].is_file():
        allowed = "stdlib, random, a .json, .jsonl or .parquet file, or a text file"
        raise ConfigError(f"corpus={source}: there is no such file; allowed: {allowed}")


def _uncontaminated(documents: Iterable[str]) -> list[list[str]]:
    """Return blocks of documents, without blocks that repeat the held-out modules."""
    known = library.fingerprints(text for _, text in library.held_out_text())
    return [block for block in _blocks(documents) if not library.is_contaminated("\n\n".join(block), known)]


def _blocks(documents: Iterable[str]) -> Iterator[list[str]]:
    held: list[str] = []
    length = total = 0
    for document in documents:
        held.append(document)
        length += len(document)
        if length >= BLOCK:
            yield held
            total, held, length = total + length, [], 0
        if total >= MOST_CHARACTERS:
            return
    if length:
        yield held


def _file(source: str) -> tuple[Path, str | None]:
    """Split a path from the column after it, if there is one; a file with the whole name takes precedence."""
    path = Path(source).expanduser()
    name, colon, column = source.rpartition(":")
    if colon and not path.exists() and Path(name).suffix in PROMPT_TABLES:
        return Path(name).expanduser(), column
    return path, None


def _texts(source: str, rows: Iterable[Mapping[str, Any]], column: str | None) -> Iterator[str]:
    """Yield the text of each row; a conversation is its turns with a blank line between them."""
    try:
        for row in rows:
            name = column or next((known for known in COLUMNS if known in row), None)
            if name is None or name not in row:
                wanted = f"no column {column!r}" if column else f"no column {' or '.join(map(repr, COLUMNS))}"
                raise ConfigError(f"corpus={source}: has {wanted}; columns: {', '.join(row)}")
            content = row[name]
            if isinstance(content, str):
                yield content
            elif content is not None:
                yield "\n\n".join(str(turn["value"]) for turn in content)
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f"corpus={source}: a row's {name!r} is neither text nor a ShareGPT conversation, a list of "
            '{"value": ...}'
        ) from error
