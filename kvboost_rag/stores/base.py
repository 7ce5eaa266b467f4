"""The contract of a store of chunk KV."""

from __future__ import annotations

import logging
import os
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvboost_rag.datamodels import ChunkRecord, EntryCheck, StoreEntry
from kvboost_rag.stores.catalog.catalog import Catalog
from kvboost_rag.stores.catalog.database import StoreError

__all__ = ["EntryInfo", "Store", "StoreError", "StoreStats", "mismatch"]

logger = logging.getLogger(__name__)

MAX_REMEMBERED_WARNINGS = 10_000


@dataclass
class StoreStats:
    """Counters of one store since it was opened. `lookups` = `hits` + `misses`; `rejected` is part of `misses`."""

    lookups: int = 0
    hits: int = 0
    misses: int = 0
    puts: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    """Entries found but not usable, by reason (`corrupt`, `token_ids`, `context`, `fingerprint`, `namespace`, …)."""
    evictions: Counter[str] = field(default_factory=Counter)
    """Entries removed, by reason (`importance_low`, `budget`, `expired`, `deleted`, `corrupt`, …)."""
    put_failures: Counter[str] = field(default_factory=Counter)
    """Entries that `put` did not keep, by reason (`too_large`, `pinned`, `io_error`)."""


@dataclass(frozen=True)
class EntryInfo:
    """What a store knows of an entry it holds, without its payload. Times are seconds since the epoch."""

    key: str
    namespace: str
    fingerprint: str
    num_tokens: int
    num_bytes: int
    created: float
    last_used: float
    meta: Mapping[str, str] = field(default_factory=dict)
    context_hash: str = ""


class Store(ABC):
    """Holds `StoreEntry` objects under their keys.

    Contract:
    - An entry is immutable. `get` may return tensors shared with the store: callers must not write into them.
    - `get` returns an entry only if it is whole and matches the check (token ids are compared, not only the hash);
      anything else is a miss: counted, logged at most once a key, never raised.
    - Bytes held never exceed the budget, at any moment. An entry larger than the budget is not kept (`put` says so).
    - Pinned entries are never evicted; if only pinned entries are left, `put` refuses.
    - Methods may be called from several threads.
    - `catalog` remembers the chunks (text, token ids, encoding context), whether or not their KV is held. It belongs
      to the store: a folder's catalog lies in the folder. Deleting KV leaves the catalog alone and the other way
      round; `stores.maintenance` does both.
    """

    def __init__(self, catalog: Catalog | None = None) -> None:
        self.stats = StoreStats()
        self._lock = threading.RLock()
        self._catalog = catalog if catalog is not None else Catalog(":memory:")
        self._pins: Counter[str] = Counter()
        self._warned: set[tuple[str, str]] = set()
        self._pid = os.getpid()

    @property
    def is_inherited(self) -> bool:
        """Whether this is a forked child's copy: files, threads and use counts are the parent's."""
        return self._pid != os.getpid()

    @property
    def catalog(self) -> Catalog:
        """What is remembered of the chunks of this store."""
        return self._catalog

    def get(self, key: str, check: EntryCheck) -> StoreEntry | None:
        """The entry under `key` if it is the one described by `check`, else None (a counted miss)."""
        return self.lookup(key, check)[0]

    def lookup(self, key: str, check: EntryCheck) -> tuple[StoreEntry | None, str | None]:
        """`get`, and where that is None the reason why a found entry was not used (None: nothing was found)."""
        return self._judge(key, check, *self.load(key))

    def _judge(
        self, key: str, check: EntryCheck, entry: StoreEntry | None, reason: str | None
    ) -> tuple[StoreEntry | None, str | None]:
        """What was found, if it is what was asked for; counted and logged."""
        if entry is not None:
            reason = mismatch(entry, key, check)
        with self._lock:
            self.stats.lookups += 1
            if entry is not None and reason is None:
                self.stats.hits += 1
                self._on_hit(entry)
                return entry, None
            self.stats.misses += 1
            if reason is None:
                return None, None
            self.stats.rejected[reason] += 1
        self._warn_once(key, reason, "stored entry %s not used: %s; it counts as a miss", key[:16], reason)
        return None, reason

    def _warn_once(self, key: str, reason: str, message: str, *args: object) -> None:
        with self._lock:
            if (key, reason) in self._warned or len(self._warned) >= MAX_REMEMBERED_WARNINGS:
                return
            self._warned.add((key, reason))
        logger.warning(message, *args)

    @abstractmethod
    def load(self, key: str) -> tuple[StoreEntry | None, str | None]:
        """The entry as stored, or (None, reason). Reason None = simply not there. Must not raise."""

    def _on_hit(self, entry: StoreEntry) -> None:  # noqa: B027 - a hook, empty where uses do not matter
        """Called under the lock when `get` is about to return `entry`: eviction policies learn of the use here."""

    @abstractmethod
    def put(self, entry: StoreEntry) -> bool:
        """Keep `entry`; True if it is held afterwards. Replaces an entry of the same key."""

    @abstractmethod
    def delete(self, key: str, reason: str = "deleted") -> bool:
        """Remove `key` from every tier; True if it was there."""

    @abstractmethod
    def __contains__(self, key: object) -> bool:
        """Whether an entry is held under `key` (unchecked; counts nothing)."""

    @abstractmethod
    def entries(self) -> Iterator[EntryInfo]:
        """What is held now, in no particular order, without payloads."""

    @property
    @abstractmethod
    def bytes_held(self) -> Mapping[str, int]:
        """Bytes held by tier, e.g. `{"memory": …, "disk": …}`."""

    @property
    def tier_stats(self) -> Mapping[str, StoreStats]:
        """Counters by tier; the store's own count each lookup once, however many tiers it went through."""
        return dict.fromkeys(self.bytes_held, self.stats)

    def keys(self) -> Iterator[str]:
        """Keys held now, in no particular order."""
        return (info.key for info in self.entries())

    def __len__(self) -> int:
        return sum(1 for _ in self.keys())

    def tier_of(self, key: str) -> str | None:
        """Name of the fastest tier that holds `key`, or None."""
        return next(iter(self.bytes_held)) if key in self else None

    def is_here(self, key: str) -> bool:
        """Whether this machine holds an entry under `key`: what only others can decide about does not count."""
        return key in self

    def info(self, key: str) -> EntryInfo | None:
        """What is known of the entry under `key`, without its payload, or None if it is not held (counts nothing)."""
        return next((info for info in self.entries() if info.key == key), None)

    def promote(self, entry: StoreEntry) -> None:  # noqa: B027 - optional
        """Take `entry`, which a slow tier holds already, into a faster one without reading it; a hint, never raises."""

    def touch(self, key: str) -> None:  # noqa: B027 - optional
        """Tell the eviction policy that `key` was used, although not read from here; counts nothing."""

    def note_deviation(self, key: str, deviation: float) -> None:  # noqa: B027 - optional
        """Tell the eviction policy how far the entry's values were from freshly computed ones (relative L2)."""

    def prefetch(self, keys: Iterable[str]) -> None:  # noqa: B027 - optional
        """Hint that `keys` will be asked for soon. May start reads in the background; never raises."""

    def pin(self, key: str) -> None:
        """Protect `key` from eviction until `unpin` (counted: as many unpins as pins)."""
        with self._lock:
            self._pins[key] += 1

    def unpin(self, key: str) -> None:
        """Undo one `pin`."""
        with self._lock:
            if self._pins[key] <= 1:
                del self._pins[key]
            else:
                self._pins[key] -= 1

    def flush(self) -> None:  # noqa: B027 - nothing to wait for in memory
        """Return when everything put so far is durable (disk) or at once (memory)."""

    def wipe(self) -> bool:
        """After deletions: overwrite what of it is left in files of ours (logs, damaged copies); whether all of it."""
        return self._catalog.database.wipe_log()

    def free_room(self, keys: Iterable[str]) -> None:  # noqa: B027 - nothing to free in memory
        """On a full disk: make room for the catalog to note a deletion, by dropping the payloads that are to go."""

    def announce(  # noqa: B027 - nobody to tell
        self, keys: Sequence[str], namespaces: Sequence[str] = (), touched: Sequence[str] = ()
    ) -> None:
        """Tell the machines that share this store that chunks, or whole namespaces, are about to be deleted here.

        Args:
            touched: namespaces whose exact blocks have to go, besides those of the chunks.

        Raises:
            StoreError: they cannot be told.
        """

    def refresh(self) -> None:  # noqa: B027 - nobody to ask
        """Carry out what machines that share this store have deleted. Never raises."""

    def agree(self, records: Sequence[ChunkRecord]) -> tuple[list[ChunkRecord], dict[str, tuple[int, ...]]]:
        """The records with the contexts that all machines use which share this store: the first to choose decides.

        Returns:
            The records, and the token ids of neighbours that were adopted with them.
        """
        return list(records), {}

    def belong_to(self, whole: Store) -> None:  # noqa: B027 - of no interest to most
        """Say which store this is a tier of: deletions have to reach all of it."""

    def close(self) -> None:
        """Flush and release files and threads. The store cannot be used afterwards. In a forked child: does nothing."""
        if self.is_inherited:
            return
        self.flush()
        self._catalog.close()


def mismatch(entry: StoreEntry, key: str, check: EntryCheck) -> str | None:
    """Why `entry` is not what `check` asks for, or None if it is."""
    if entry.key != key:
        return "key"
    if entry.fingerprint != check.fingerprint:
        return "fingerprint"
    if entry.namespace != check.namespace:
        return "namespace"
    if entry.token_ids != check.token_ids:
        return "token_ids"
    if entry.context_hash != check.context_hash:
        return "context"
    if check.setting is not None and entry.meta.get("setting") != check.setting:
        return "setting"  # KV of another codec has other bits than encoding the chunk here would give
    return None
