"""Nearest questions: one usearch index for each scope, in memory, filled from the file when it is opened."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Any

import numpy as np

from selfspec_cli.gateway.cache.embedding import DIMENSIONS

NEAREST = 16  # entries that are looked at
FARTHEST = 0.6  # cosine below which no entry is


class Vectors:
    """Indices by scope: a search cannot leave its tenant, model or sampling."""

    def __init__(self, stored: Iterable[tuple[int, bytes, np.ndarray]]) -> None:
        """stored: (entry, scope, vector), by scope."""
        self._indices: dict[bytes, Any] = {}
        for scope, rows in groupby(stored, key=lambda row: row[1]):
            numbers, vectors = zip(*((number, vector) for number, _, vector in rows), strict=True)
            self._of(scope).add(np.array(numbers, dtype=np.uint64), np.stack(vectors))

    def _of(self, scope: bytes) -> Any:
        if scope not in self._indices:
            from usearch.index import Index

            self._indices[scope] = Index(ndim=DIMENSIONS, metric="cos", dtype="f16")
        return self._indices[scope]

    def __len__(self) -> int:
        return sum(len(index) for index in list(self._indices.values()))  # asked from another thread

    def add(self, scope: bytes, entry: int, vector: np.ndarray) -> None:
        self._of(scope).add(entry, vector)

    def remove(self, scope: bytes, entry: int) -> None:
        index = self._indices.get(scope)
        if index is not None and entry in index:
            index.remove(entry)
            if not len(index):
                del self._indices[scope]

    def nearest(self, scope: bytes, vector: np.ndarray) -> list[tuple[int, float]]:
        """(entry, cosine) of up to 16 entries of the scope, nearest first, none below a cosine of 0.6."""
        index = self._indices.get(scope)
        if index is None:
            return []
        found = index.search(vector, NEAREST)
        pairs = zip(found.keys.tolist(), (1.0 - found.distances).tolist(), strict=True)
        return [(entry, cosine) for entry, cosine in pairs if cosine >= FARTHEST]
