"""A machine's own store over one that many machines share."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

from kvboost_rag.datamodels import EntryCheck, StoreEntry
from kvboost_rag.stores.base import EntryInfo, Store, StoreStats
from kvboost_rag.stores.copies import Copies
from kvboost_rag.stores.remote.store import RemoteStore

logger = logging.getLogger(__name__)

QUEUE_BYTES = 1 << 30


class SharedStore(Store):
    """Reads from the local store, then from the shared one, and copies what it finds into the local one.

    `put` writes to the local store and leaves the shared one to a thread. What does not fit into the queue is not
    shared (`put_failures["queue_full"]`): another machine computes it. The catalog, eviction and pins are the local
    store's; deleting reaches both, and is noted as unfinished while the shared one cannot be reached.

    Args:
        local: a `DiskStore`, or a `MemoryStore` where a machine keeps nothing.
        queue_bytes: of entries waiting to be shared.
    """

    def __init__(self, local: Store, remote: RemoteStore, queue_bytes: int = QUEUE_BYTES) -> None:
        super().__init__(local.catalog)
        self.tiers = (local, remote)
        self._local, self._remote = local, remote
        self._queue_bytes = queue_bytes
        self._writer = ThreadPoolExecutor(1, "kvboost-share")
        self._changed = threading.Condition()
        self._pending: dict[str, StoreEntry] = {}
        self._writing: str | None = None
        self._copies = Copies(self._lock)

    def lookup(self, key: str, check: EntryCheck) -> tuple[StoreEntry | None, str | None]:
        with self._copies.copy(key) as copy:
            entry, reason = self._local.lookup(key, check)
            if entry is None:
                entry, why_not = self._remote.lookup(key, check)
                reason = why_not or reason
                with self._lock:
                    if entry is not None and not copy.is_stale:
                        self._local.put(entry)
        return self._count(entry, reason)

    def load(self, key: str) -> tuple[StoreEntry | None, str | None]:
        entry, reason = self._local.load(key)
        return (entry, None) if entry is not None else self._or(reason, *self._remote.load(key))

    def put(self, entry: StoreEntry) -> bool:
        with self._copies.change(entry.key):
            kept = self._local.put(entry)
        with self._changed:
            waiting = sum(e.num_bytes for e in self._pending.values())
            if self.is_inherited or waiting + entry.num_bytes > self._queue_bytes:
                self.stats.put_failures["queue_full"] += 1
                return kept
            self._pending[entry.key] = entry
        self.stats.puts += 1
        self._writer.submit(self._share, entry.key)
        return True

    def delete(self, key: str, reason: str = "deleted") -> bool:
        with self._copies.change(key):
            with self._changed:
                self._pending.pop(key, None)
                self._changed.wait_for(lambda: self._writing != key)
            found = self._local.delete(key, reason)
            # What only makes room here, or mends a file of ours, is no reason to take it from the others.
            return (reason == "deleted" and self._remote.delete(key, reason)) or found

    def __contains__(self, key: object) -> bool:
        return key in self._local or key in self._remote

    def entries(self) -> Iterator[EntryInfo]:
        """What is held here, then what is only shared. Raises StoreError if that cannot be listed."""
        seen: set[str] = set()
        for info in self._local.entries():
            seen.add(info.key)
            yield info
        yield from (info for info in self._remote.entries() if info.key not in seen)

    def is_here(self, key: str) -> bool:
        return self._local.is_here(key)

    def info(self, key: str) -> EntryInfo | None:
        return self._local.info(key) or self._remote.info(key)

    @property
    def bytes_held(self) -> Mapping[str, int]:
        return {**self._local.bytes_held, **self._remote.bytes_held}

    @property
    def tier_stats(self) -> Mapping[str, StoreStats]:
        return {**self._local.tier_stats, **self._remote.tier_stats}

    def tier_of(self, key: str) -> str | None:
        return self._local.tier_of(key) or self._remote.tier_of(key)

    def touch(self, key: str) -> None:
        self._local.touch(key)

    def note_deviation(self, key: str, deviation: float) -> None:
        self._local.note_deviation(key, deviation)

    def pin(self, key: str) -> None:
        self._local.pin(key)

    def unpin(self, key: str) -> None:
        self._local.unpin(key)

    def wipe(self) -> bool:
        return self._local.wipe()

    def flush(self) -> None:
        if self.is_inherited:
            return
        with self._changed:
            self._changed.wait_for(lambda: not self._pending and self._writing is None)
        self._local.flush()

    def close(self) -> None:
        if self.is_inherited:
            return
        self.flush()
        self._writer.shutdown()
        self._local.close()
        self._remote.close()

    def _share(self, key: str) -> None:
        """Write one entry to the shared store, in the writer's thread."""
        with self._changed:
            entry = self._pending.pop(key, None)
            if entry is None:
                return
            self._writing = key
        try:
            self._remote.put(entry)
        except Exception:
            logger.exception("chunk %s is not shared", key[:16])
        finally:
            with self._changed:
                self._writing = None
                self._changed.notify_all()

    def _count(self, entry: StoreEntry | None, reason: str | None) -> tuple[StoreEntry | None, str | None]:
        with self._lock:
            self.stats.lookups += 1
            self.stats.hits += entry is not None
            self.stats.misses += entry is None
            if entry is None and reason is not None:
                self.stats.rejected[reason] += 1
        return entry, None if entry is not None else reason

    @staticmethod
    def _or(first: str | None, entry: StoreEntry | None, reason: str | None) -> tuple[StoreEntry | None, str | None]:
        return entry, None if entry is not None else reason or first
