"""The contract of a store of chunk KV."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from kvboost_rag.datamodels import EntryCheck, StoreEntry

logger = logging.getLogger(__name__)


class StoreError(RuntimeError):
    """A store cannot do its work at all (folder not writable, wrong format). Never raised by `get`."""


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
    """Entries removed, by reason (`budget`, `deleted`, `corrupt`, …)."""


class Store(ABC):
    """Holds `StoreEntry` objects under their keys.

    Contract:
    - An entry is immutable. `get` may return tensors shared with the store: callers must not write into them.
    - `get` returns an entry only if it is whole and matches the check (token ids are compared, not only the hash);
      anything else is a miss: counted, logged at most once a key, never raised.
    - Bytes held never exceed the budget, at any moment. An entry larger than the budget is not kept (`put` says so).
    - Pinned entries are never evicted; if only pinned entries are left, `put` refuses.
    - Methods may be called from several threads.
    """

    def __init__(self) -> None:
        self.stats = StoreStats()
        self._lock = threading.RLock()

    def get(self, key: str, check: EntryCheck) -> StoreEntry | None:
        """The entry under `key` if it is the one described by `check`, else None (a counted miss)."""
        entry, reason = self._load(key)
        if entry is not None:
            reason = mismatch(entry, key, check)
        with self._lock:
            self.stats.lookups += 1
            if entry is not None and reason is None:
                self.stats.hits += 1
                return entry
            self.stats.misses += 1
            if reason is not None:
                self.stats.rejected[reason] += 1
        if reason is not None:
            logger.warning("stored entry %s not used: %s; it counts as a miss", key[:16], reason)
        return None

    @abstractmethod
    def _load(self, key: str) -> tuple[StoreEntry | None, str | None]:
        """The entry as stored, or (None, reason). Reason None = simply not there. Must not raise."""

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
    def keys(self) -> Iterator[str]:
        """Keys held now, in no particular order."""

    @property
    @abstractmethod
    def bytes_held(self) -> Mapping[str, int]:
        """Bytes held by tier, e.g. `{"memory": …, "disk": …}`."""

    def __len__(self) -> int:
        return sum(1 for _ in self.keys())

    def prefetch(self, keys: Iterable[str]) -> None:
        """Hint that `keys` will be asked for soon. May start reads in the background; never raises."""

    def pin(self, key: str) -> None:
        """Protect `key` from eviction until `unpin` (counted: as many unpins as pins)."""

    def unpin(self, key: str) -> None:
        """Undo one `pin`."""

    def flush(self) -> None:
        """Return when everything put so far is durable (disk) or at once (memory)."""

    def close(self) -> None:
        """Flush and release files and threads. The store cannot be used afterwards."""
        self.flush()


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
    return None
