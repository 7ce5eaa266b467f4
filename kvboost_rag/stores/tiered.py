"""Fast tiers over a slow one that holds everything."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from kvboost_rag.datamodels import ChunkRecord, EntryCheck, StoreEntry
from kvboost_rag.stores.base import EntryInfo, Store, StoreStats
from kvboost_rag.stores.copies import Copies, Copy
from kvboost_rag.stores.memory import MemoryStore, OnEvict

logger = logging.getLogger(__name__)

READERS = 4


class TieredStore(Store):
    """Reads through the tiers from fast to slow, and copies what it finds into the faster ones.

    `put` stores into the fast tier next to the last and leaves writing to the last tier (the home) to a thread, off the
    caller's path; until written, the entry is pinned in the fast tier, so that the queue's bytes are within its budget.
    An entry evicted from a tier goes to the next one unless that holds it. A hit counts as a use in the slower tiers
    too, so that what is hot in memory does not look cold on disk. The catalog is the home's.

    A process that is killed loses what was not written yet; `flush` and `close` wait, and so does a normal exit.

    Args:
        tiers: fastest first, e.g. `MemoryStore(…), DiskStore(…)`. All but the last hold entries in memory.
        write_back: False: `put` returns when the home has the entry.
    """

    def __init__(self, *tiers: Store, write_back: bool = True) -> None:
        *upper, self._home = tiers
        fast = [tier for tier in upper if isinstance(tier, MemoryStore)]
        if not fast or len(fast) != len(upper):
            raise ValueError("expected memory or device tiers, and one last tier of any kind below them")
        super().__init__(self._home.catalog)
        self.tiers = tiers
        self._fast = fast[-1]
        self._write_back = write_back
        self._writer = ThreadPoolExecutor(1, "kvboost-write")
        self._readers = ThreadPoolExecutor(READERS, "kvboost-read")
        self._written = threading.Condition()
        self._pending: dict[str, StoreEntry] = {}
        self._writing: str | None = None
        self._reading: dict[str, Future[None]] = {}
        self._faults: dict[str, str] = {}
        self._copies = Copies(self._lock)
        for tier, slower in zip(fast, tiers[1:], strict=True):
            tier.on_evict = _demotion(slower)
        self._home.belong_to(self)

    def lookup(self, key: str, check: EntryCheck) -> tuple[StoreEntry | None, str | None]:
        self._await_read(key)
        with self._lock:
            reason = self._faults.pop(key, None)
        with self._copies.copy(key) as copy:
            for depth, tier in enumerate(self.tiers):
                entry, why_not = tier.lookup(key, check)
                if entry is not None:
                    self._copy_up(entry, self.tiers[:depth], copy)
                    for slower in self.tiers[depth + 1 :]:
                        slower.touch(key)
                    self._count(None, hit=True)
                    return entry, None
                reason = why_not or reason
        self._count(reason, hit=False)
        return None, reason

    def put(self, entry: StoreEntry) -> bool:
        with self._lock:
            self.stats.puts += 1
        with self._copies.change(entry.key):
            return self._put(entry)

    def _put(self, entry: StoreEntry) -> bool:
        if not self._write_back or self.is_inherited:
            return any([self._home.put(entry), self._fast.put(entry)])
        self._fast.pin(entry.key)
        if not self._fast.put(entry):
            self._fast.unpin(entry.key)
            return self._home.put(entry)
        # What waits is the copy in memory: the given tensors may hold an accelerator's until the disk has caught up.
        entry = self._fast.load(entry.key)[0] or entry
        with self._written:
            if entry.key in self._pending:
                self._fast.unpin(entry.key)
            self._pending[entry.key] = entry
        self._writer.submit(self._write, entry.key)
        return True

    def delete(self, key: str, reason: str = "deleted") -> bool:
        with self._copies.change(key):
            with self._written:
                if self._pending.pop(key, None) is not None:
                    self._fast.unpin(key)
                self._written.wait_for(lambda: self._writing != key)
            # Fast to slow: what is being demoted meanwhile arrives below before that tier is asked to delete it.
            found = [tier.delete(key, reason) for tier in self.tiers]
        if any(found):
            with self._lock:
                self.stats.evictions[reason] += 1
        return any(found)

    def __contains__(self, key: object) -> bool:
        return any(key in tier for tier in self.tiers)

    def entries(self) -> Iterator[EntryInfo]:
        seen: set[str] = set()
        for tier in reversed(self.tiers):
            for info in tier.entries():
                if info.key not in seen:
                    seen.add(info.key)
                    yield info

    def is_here(self, key: str) -> bool:
        return any(tier.is_here(key) for tier in self.tiers)

    def info(self, key: str) -> EntryInfo | None:
        return next((info for tier in reversed(self.tiers) if (info := tier.info(key)) is not None), None)

    def promote(self, entry: StoreEntry) -> None:
        with self._copies.copy(entry.key) as copy:
            self._copy_up(entry, [self._fast], copy)

    @property
    def bytes_held(self) -> Mapping[str, int]:
        return {name: held for tier in self.tiers for name, held in tier.bytes_held.items()}

    @property
    def tier_stats(self) -> Mapping[str, StoreStats]:
        return {name: stats for tier in self.tiers for name, stats in tier.tier_stats.items()}

    def tier_of(self, key: str) -> str | None:
        return next((name for tier in self.tiers if (name := tier.tier_of(key)) is not None), None)

    def touch(self, key: str) -> None:
        for tier in self.tiers:
            tier.touch(key)

    def note_deviation(self, key: str, deviation: float) -> None:
        for tier in self.tiers:
            tier.note_deviation(key, deviation)

    def prefetch(self, keys: Iterable[str]) -> None:
        for key in keys:
            if key in self.tiers[0]:
                continue
            with self._lock:
                if key not in self._reading:
                    self._reading[key] = self._readers.submit(self._read_ahead, key)

    def pin(self, key: str) -> None:
        for tier in self.tiers:
            tier.pin(key)

    def unpin(self, key: str) -> None:
        for tier in self.tiers:
            tier.unpin(key)

    def wipe(self) -> bool:
        return self._home.wipe()

    def announce(self, keys: Sequence[str], namespaces: Sequence[str] = (), touched: Sequence[str] = ()) -> None:
        self._home.announce(keys, namespaces, touched)

    def refresh(self) -> None:
        self._home.refresh()

    def agree(self, records: Sequence[ChunkRecord]) -> tuple[list[ChunkRecord], dict[str, tuple[int, ...]]]:
        return self._home.agree(records)

    def belong_to(self, whole: Store) -> None:
        self._home.belong_to(whole)

    def free_room(self, keys: Iterable[str]) -> None:
        self._home.free_room(keys)

    def flush(self) -> None:
        if self.is_inherited:  # the thread that writes stayed in the parent
            return
        with self._written:
            self._written.wait_for(lambda: not self._pending and self._writing is None)
        for tier in self.tiers:
            tier.flush()

    def close(self) -> None:
        if self.is_inherited:
            return
        self.flush()
        self._writer.shutdown()
        self._readers.shutdown()
        for tier in self.tiers:
            tier.close()

    def load(self, key: str) -> tuple[StoreEntry | None, str | None]:
        reason = None
        for tier in self.tiers:
            entry, why_not = tier.load(key)
            if entry is not None:
                return entry, None
            reason = why_not or reason
        return None, reason

    def _copy_up(self, entry: StoreEntry, tiers: Sequence[Store], copy: Copy) -> None:
        """Copy what was read into faster tiers, unless it was replaced or deleted since."""
        with self._lock:
            if copy.is_stale:
                return
            for tier in reversed(tiers):
                # A device copies from page-locked memory while others go on, from any other it would wait.
                if tier.put(entry) and tier is not tiers[0]:
                    entry = tier.load(entry.key)[0] or entry

    def _count(self, reason: str | None, hit: bool) -> None:
        with self._lock:
            self.stats.lookups += 1
            self.stats.hits += hit
            self.stats.misses += not hit
            if reason is not None:
                self.stats.rejected[reason] += 1

    def _write(self, key: str) -> None:
        """Write one entry home, in the writer's thread."""
        with self._written:
            entry = self._pending.pop(key, None)
            if entry is None:  # deleted, or written already with a later version
                return
            self._writing = key
        try:
            self._home.put(entry)
        except Exception:
            logger.exception("chunk %s is not written to the slow tier", key[:16])
        finally:
            self._fast.unpin(key)
            with self._written:
                self._writing = None
                self._written.notify_all()

    def _read_ahead(self, key: str) -> None:
        """Bring one entry into the faster tiers, in a reader's thread. Whether it is the right one, `get` checks."""
        try:
            reason = None
            with self._copies.copy(key) as copy:
                for depth, tier in enumerate(self.tiers):
                    entry, reason = tier.load(key)
                    if entry is not None:
                        self._copy_up(entry, self.tiers[:depth], copy)
                        return
            if reason is not None:
                self._note_fault(key, reason)
        except Exception:
            logger.exception("chunk %s could not be read ahead", key[:16])
        finally:
            with self._lock:
                self._reading.pop(key, None)

    def _note_fault(self, key: str, reason: str) -> None:
        """Reading ahead may remove a damaged file: the lookup that follows must still say why it is a miss."""
        with self._lock:
            self._faults[key] = reason
            self._home.stats.rejected[reason] += 1

    def _await_read(self, key: str) -> None:
        with self._lock:
            reading = self._reading.get(key)
        if reading is not None:
            reading.result()


def _demotion(slower: Store) -> OnEvict:
    def demote(entry: StoreEntry) -> None:
        if entry.key not in slower:
            slower.put(entry)

    return demote
