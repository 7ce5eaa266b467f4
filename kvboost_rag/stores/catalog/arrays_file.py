"""The file beside a catalog that holds what was computed from its chunks: embeddings, MinHash signatures."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvboost_rag.stores.catalog.chunk_arrays import ChunkArrays, forget_chunks, open_arrays
from kvboost_rag.stores.catalog.database import DamagedDatabaseError, Database

logger = logging.getLogger(__name__)

FILE_NAME = "arrays.sqlite"


class ArraysFile:
    """Opens `arrays.sqlite` beside a catalog when it is first needed (in memory for a catalog in memory).

    A damaged file is made anew: what it held is computed again from the catalog. Thread-safe.

    Args:
        catalog_path: of the catalog's database.
    """

    def __init__(self, catalog_path: str) -> None:
        self.path = catalog_path if catalog_path == ":memory:" else str(Path(catalog_path).with_name(FILE_NAME))
        self._database: Database | None = None
        self._lock = threading.RLock()

    def table(self, kind: str, fingerprint: str, namespace: str, dtype: Any) -> ChunkArrays:
        """Arrays of one kind, model and namespace."""
        return ChunkArrays(self._open(), kind, fingerprint, namespace, dtype)

    def forget(self, keys: Iterable[str]) -> None:
        """Delete all that was computed from these chunks. Makes no file where there is none."""
        with self._lock:
            there = self._database is not None or (self.path != ":memory:" and Path(self.path).exists())
            if there:
                forget_chunks(self._open(), keys)

    def close(self) -> None:
        """Release the file."""
        with self._lock:
            if self._database is not None:
                self._database.close()

    def _open(self) -> Database:
        with self._lock:
            if self._database is None:
                try:
                    self._database = open_arrays(self.path)
                except DamagedDatabaseError as error:
                    logger.warning("%s; it is made anew from the catalog, which takes time", error)
                    for suffix in ("", "-wal", "-shm"):
                        Path(self.path + suffix).unlink(missing_ok=True)
                    self._database = open_arrays(self.path)
            return self._database
