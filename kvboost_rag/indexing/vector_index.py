"""Nearest texts by embedding: exact up to a size, then an approximate index of the faiss library."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

logger = logging.getLogger(__name__)

Vectors = NDArray[np.float32]

_BLOCK = 256
_DECIMALS = 5
"""Cosines are rounded before they are ranked, and ties go by key: the last bits of a matrix kernel decide nothing."""


@dataclass(frozen=True)
class Hit:
    """A key and the cosine of its vector to the one asked for."""

    key: str
    cosine: float


class VectorIndex:
    """Unit vectors under keys, of one namespace.

    Contract: `nearest` is exact, and the same for the same content in whatever order it was added, while no more than
    `exact_limit` vectors are held; beyond it is approximate (HNSW: Malkov and Yashunin, 2016), where faiss is
    installed. Methods may be called from several threads.

    Args:
        exact_limit: vectors up to which every search compares with all of them.
    """

    def __init__(self, exact_limit: int = 50_000) -> None:
        self.exact_limit = exact_limit
        self._keys: list[str | None] = []
        self._rows: dict[str, int] = {}
        self._matrix: Vectors = np.zeros((0, 0), dtype=np.float32)
        self._graph: Any = None
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, key: object) -> bool:
        return key in self._rows

    def __iter__(self) -> Iterator[str]:
        """Keys held now."""
        with self._lock:
            return iter(list(self._rows))

    def add(self, keys: Sequence[str], vectors: Vectors) -> None:
        """Hold `vectors` `[num_keys, dim]` (of length one) under `keys`, in place of older ones.

        Raises:
            ValueError: not one vector a key, or another dimension than those held.
        """
        if vectors.ndim != 2 or len(vectors) != len(keys):
            raise ValueError(f"{len(keys)} keys need one vector each, got an array of shape {vectors.shape}")
        with self._lock:
            if self._rows and vectors.shape[1] != self._matrix.shape[1]:
                raise ValueError(
                    f"vectors have {vectors.shape[1]} dimensions, those held {self._matrix.shape[1]}: "
                    "was another embedding model used?"
                )
            latest = {key: i for i, key in enumerate(keys)}
            self.remove(latest)
            self._append(list(latest), vectors[list(latest.values())])

    def remove(self, keys: Iterable[str]) -> int:
        """Forget `keys`; returns how many were held."""
        with self._lock:
            rows = [row for key in keys if (row := self._rows.pop(key, None)) is not None]
            for row in rows:
                self._keys[row] = None
            if len(self._keys) > 2 * len(self._rows):
                self._compact()
            return len(rows)

    def vectors(self, keys: Sequence[str]) -> Vectors:
        """Vectors of `keys`, `[num_keys, dim]`. Raises KeyError for a key that is not held."""
        with self._lock:
            return self._matrix[[self._rows[key] for key in keys]]

    def nearest(self, vectors: Vectors, count: int) -> list[list[Hit]]:
        """For each of `vectors` `[num_queries, dim]` its `count` nearest, best first; fewer if fewer are held."""
        with self._lock:
            count = min(count, len(self._rows))
            if count < 1:
                return [[] for _ in vectors]
            approximate = len(self._rows) > self.exact_limit and self._has_graph()
            search = self._search_graph if approximate else self._search_all
            return [
                hits for start in range(0, len(vectors), _BLOCK) for hits in search(vectors[start:][:_BLOCK], count)
            ]

    def nearest_to(self, keys: Sequence[str], count: int) -> list[list[Hit]]:
        """For each of `keys` the `count` nearest others, best first."""
        with self._lock:
            found = self.nearest(self.vectors(keys), count + 1)
        return [[hit for hit in hits if hit.key != key][:count] for key, hits in zip(keys, found, strict=True)]

    def _append(self, keys: list[str], vectors: Vectors) -> None:
        used = len(self._keys)
        if not self._rows:
            self._keys, used, self._graph = [], 0, None
            self._matrix = np.zeros((0, vectors.shape[1]), dtype=np.float32)
        if used + len(keys) > len(self._matrix):
            room = np.zeros((max(2 * len(self._matrix), used + len(keys)), vectors.shape[1]), dtype=np.float32)
            room[:used] = self._matrix[:used]
            self._matrix = room
        self._matrix[used : used + len(keys)] = vectors
        self._keys += keys
        self._rows.update((key, used + i) for i, key in enumerate(keys))
        if self._graph is not None:
            self._graph.add(np.ascontiguousarray(vectors, dtype=np.float32))

    def _compact(self) -> None:
        rows = list(self._rows.items())
        self._matrix = self._matrix[[row for _, row in rows]]
        self._keys = [key for key, _ in rows]
        self._rows = {key: i for i, (key, _) in enumerate(rows)}
        self._graph = None

    def _search_all(self, vectors: Vectors, count: int) -> list[list[Hit]]:
        scores = np.round(vectors @ self._matrix[: len(self._keys)].T, _DECIMALS)
        scores[:, [row for row, key in enumerate(self._keys) if key is None]] = -np.inf
        least = np.partition(scores, -count, axis=1)[:, -count]
        return [
            self._ranked(np.flatnonzero(row >= bound), row, count) for row, bound in zip(scores, least, strict=True)
        ]

    def _search_graph(self, vectors: Vectors, count: int) -> list[list[Hit]]:
        # Removed vectors stay in the graph until it is built anew: ask for as many more.
        wanted = min(len(self._keys), 2 * count + len(self._keys) - len(self._rows))
        self._graph.hnsw.efSearch = max(64, 2 * wanted)
        scores, rows = self._graph.search(np.ascontiguousarray(vectors, dtype=np.float32), wanted)
        results = []
        for row_scores, row_ids in zip(np.round(scores, _DECIMALS), rows, strict=True):
            by_row = dict(zip(row_ids.tolist(), row_scores.tolist(), strict=True))
            results.append(self._ranked([row for row in by_row if row >= 0], by_row, count))
        return results

    def _ranked(self, rows: Iterable[int], scores: Any, count: int) -> list[Hit]:
        hits = [Hit(key, float(scores[row])) for row in rows if (key := self._keys[row]) is not None]
        return sorted(hits, key=lambda hit: (-hit.cosine, hit.key))[:count]

    def _has_graph(self) -> bool:
        if self._graph is None:
            try:
                import faiss
            except ImportError:
                logger.warning(
                    "searching %d vectors exactly; pip install 'kvboost-rag[faiss]' for an approximate index",
                    len(self._rows),
                )
                self.exact_limit = 2 * len(self._rows)  # said once for each doubling
                return False
            self._compact()
            self._graph = faiss.IndexHNSWFlat(self._matrix.shape[1], 32, faiss.METRIC_INNER_PRODUCT)
            self._graph.hnsw.efConstruction = 80
            self._graph.add(self._matrix)
        return True
