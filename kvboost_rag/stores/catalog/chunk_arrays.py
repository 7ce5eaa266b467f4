"""Small arrays kept with chunks, such as embeddings and MinHash signatures. Losing them costs time, nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvboost_rag.stores.catalog.database import Database
from kvboost_rag.stores.catalog.erasures import Erasures

_SCOPE = "kind = ? AND fingerprint = ? AND namespace = ?"
_PAGE = 500


class ChunkArrays:
    """One-dimensional arrays under chunk keys, of one kind, model and namespace. Get them by `Catalog.arrays`.

    Contract: `put` is durable when it returns and replaces older arrays, but brings nothing of a deleted chunk back;
    arrays of another kind, model or namespace are never seen, damaged ones count as missing. They go with the chunk, in
    the same transaction. Several threads and processes may share the database.

    Args:
        database: the catalog's.
        kind: what the arrays are and how they were made (`minhash/…`, `embedding/<model>`): change it with that.
        dtype: of the arrays.
    """

    def __init__(self, database: Database, kind: str, fingerprint: str, namespace: str, dtype: Any) -> None:
        self.database = database
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self._scope = (kind, fingerprint, namespace)

    def put(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Keep `arrays`, each `[size]`, in one transaction."""
        erased = Erasures(self.database)
        with self.database.transaction() as db:
            rows = (
                (*self._scope, key, np.asarray(array, self.dtype).tobytes())
                for key, array in arrays.items()
                if key not in erased
            )
            db.executemany("INSERT OR REPLACE INTO arrays VALUES (?, ?, ?, ?, ?)", rows)

    def get(self, keys: Iterable[str]) -> dict[str, NDArray[Any]]:
        """The arrays of those `keys` that have one."""
        wanted = list(keys)
        found: dict[str, NDArray[Any]] = {}
        for start in range(0, len(wanted), _PAGE):
            page = wanted[start : start + _PAGE]
            marks = ", ".join("?" * len(page))
            rows = self.database.read(
                f"SELECT key, bytes FROM arrays WHERE {_SCOPE} AND key IN ({marks})", self._args(page)
            )
            found.update((key, self._array(raw)) for key, raw in rows if self._is_whole(raw))
        return found

    def items(self) -> Iterator[tuple[str, NDArray[Any]]]:
        """All keys with their arrays, in order of the keys."""
        after = ""
        while True:
            rows = self.database.read(
                f"SELECT key, bytes FROM arrays WHERE {_SCOPE} AND key > ? ORDER BY key LIMIT {_PAGE}",
                self._args([after]),
            )
            yield from ((key, self._array(raw)) for key, raw in rows if self._is_whole(raw))
            if len(rows) < _PAGE:
                return
            after = rows[-1][0]

    def keys(self) -> list[str]:
        """All keys that have an array, in order."""
        return [
            row[0] for row in self.database.read(f"SELECT key FROM arrays WHERE {_SCOPE} ORDER BY key", self._scope)
        ]

    def delete(self, keys: Iterable[str]) -> None:
        """Forget the arrays of `keys`; keys without one are passed over."""
        with self.database.transaction() as db:
            db.executemany(f"DELETE FROM arrays WHERE {_SCOPE} AND key = ?", ((*self._scope, key) for key in keys))

    def _args(self, more: list[str]) -> list[str]:
        return [*self._scope, *more]

    def _is_whole(self, raw: object) -> bool:
        return isinstance(raw, bytes) and len(raw) % self.dtype.itemsize == 0

    def _array(self, raw: bytes) -> NDArray[Any]:
        return np.frombuffer(raw, self.dtype)
