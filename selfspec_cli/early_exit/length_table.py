"""Upper limits of the draft length by load: a table over running requests and a request's context. No torch.

As users write it: "33:3 129:0 129@8192:2" drafts at most the engine's k tokens up to 32 running requests, 3 from 33 on,
and none from 129 on, but 2 for a request of 8192 tokens of context or more. vLLM's own
`num_speculative_tokens_per_batch_size` is read too."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Integral

from selfspec_cli.early_exit.errors import SettingsError

KEY, VLLM_KEY = "length_table", "num_speculative_tokens_per_batch_size"
FORM = "REQUESTS[@CONTEXT]:K, entries separated by spaces, such as 33:3 129:0 129@8192:2"
LARGEST = 2**31 - 1
"""Of a number of requests or tokens: the table is int32 on the device."""


@dataclass(frozen=True)
class Cell:
    """An entry: from `requests` running requests and `context` tokens on, draft at most k tokens a step."""

    requests: int
    context: int
    k: int

    def __str__(self) -> str:
        return f"{self.requests}{f'@{self.context}' if self.context else ''}:{self.k}"


@dataclass(frozen=True)
class LengthTable:
    """Entries in the order of their loads, and of their contexts within one load; the first is for any batch.
    Every load has an entry for any context, so the entry in force is the last one that is reached."""

    cells: tuple[Cell, ...]

    def __str__(self) -> str:
        return " ".join(map(str, self.cells))

    def at(self, requests: int, context: int = 0) -> Cell:
        """The entry in force for a request with `context` tokens in a batch of `requests`."""
        return next(cell for cell in reversed(self.cells) if cell.requests <= requests and cell.context <= context)

    def row(self, requests: int) -> tuple[Cell, ...]:
        """The entries of the load that `requests` reaches; the first is for any context."""
        reached = max(cell.requests for cell in self.cells if cell.requests <= requests)
        return tuple(cell for cell in self.cells if cell.requests == reached)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Every draft length in the table, the longest first."""
        return tuple(sorted({cell.k for cell in self.cells}, reverse=True))

    @property
    def by_context(self) -> bool:
        """Whether requests of one batch may have different lengths."""
        return any(cell.context for cell in self.cells)

    @classmethod
    def fixed(cls, k: int) -> LengthTable:
        return cls((Cell(1, 0, k),))

    @classmethod
    def parse(cls, text: str, k: int) -> LengthTable:
        """The table that a user wrote, for an engine that drafts at most `k` tokens. Raises SettingsError."""
        if not isinstance(text, str):
            raise SettingsError(f"{KEY} = {text!r} must be text, not {type(text).__name__}; it is written {FORM}")
        cells = []
        for word in text.split():
            entry = re.fullmatch(r"(\d+)(?:@(\d+))?:(\d+)", word)
            if entry is None:
                raise SettingsError(f"{KEY} = {text!r}: {word!r} is no entry; it is written {FORM}")
            cells.append(Cell(int(entry[1]), int(entry[2] or 0), int(entry[3])))
        if not cells:
            raise SettingsError(f"{KEY} = {text!r} has no entry; it is written {FORM}")
        return cls(_ordered(cells, k, f"{KEY} = {text!r}"))

    @classmethod
    def from_vllm(cls, ranges: object, k: int) -> LengthTable:
        """The table for vLLM's list of (first, last, k), lengths cut to `k` as vLLM cuts them. Raises SettingsError."""
        if not isinstance(ranges, (list, tuple)) or not ranges:
            raise SettingsError(
                f"{VLLM_KEY} = {ranges!r} must be a list of [first batch size, last batch size, tokens]"
            )
        for entry in ranges:
            whole = isinstance(entry, (list, tuple)) and len(entry) == 3
            if not whole or any(isinstance(number, bool) or not isinstance(number, Integral) for number in entry):
                raise SettingsError(f"{VLLM_KEY}: entry {entry!r} must be [first batch size, last batch size, tokens]")
        rows = sorted((int(first), int(last), int(length)) for first, last, length in ranges)
        before = 0
        for first, last, length in rows:
            if not before < first <= last or length < 0 or (before == 0 and first != 1):
                raise SettingsError(
                    f"{VLLM_KEY} = {ranges!r}: ranges begin at 1, do not overlap, and end at or after "
                    f"their beginning, and no length is negative; wrong: {[first, last, length]}"
                )
            before = last
        return cls(_ordered([Cell(first, 0, min(length, k)) for first, _, length in rows], k, VLLM_KEY))


def _ordered(cells: Iterable[Cell], k: int, what: str) -> tuple[Cell, ...]:
    """The entries in order; the first is for any batch, k where the user wrote none."""
    by_load: dict[tuple[int, int], Cell] = {}
    for cell in cells:
        if not 1 <= cell.requests <= LARGEST or cell.context > LARGEST:
            raise SettingsError(
                f"{what}: {str(cell)!r} is out of range; allowed: 1 to {LARGEST} requests, and a "
                f"context of 0 to {LARGEST} tokens"
            )
        if cell.k > k:
            raise SettingsError(f"{what}: {str(cell)!r} drafts more than the engine's k; allowed: 0 to {k}")
        if by_load.setdefault((cell.requests, cell.context), cell) is not cell:
            raise SettingsError(
                f"{what}: two entries are for the same load, {by_load[cell.requests, cell.context]} and "
                f"{cell}; give one of them"
            )
    by_load.setdefault((1, 0), Cell(1, 0, k))
    for requests, _ in list(by_load):
        if (requests, 0) not in by_load:
            raise SettingsError(
                f"{what}: from {requests} requests on there are entries for long contexts only; add "
                f"one for the others, such as {requests}:{k}"
            )
    return tuple(by_load[load] for load in sorted(by_load))
