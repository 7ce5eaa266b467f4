"""Entries in memory: host RAM, or an accelerator's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

import torch

from kvboost_rag.datamodels import StoreEntry
from kvboost_rag.stores.base import EntryInfo, Store
from kvboost_rag.stores.budget import DEFAULT_RATIO, host_memory_bytes, resolve_budget
from kvboost_rag.stores.catalog.catalog import Catalog
from kvboost_rag.stores.eviction import EntryUse, EvictionPolicy, make_policy
from kvboost_rag.stores.payload import own

OnEvict = Callable[[StoreEntry], None]


class MemoryStore(Store):
    """Holds entries in host memory, evicting by `policy` when the budget is reached.

    Bytes are the payload's tensor bytes (`StoreEntry.num_bytes`), page-locked ones as many as torch takes for them: the
    next power of two for each tensor. Room is made before an entry comes in. `put` keeps the given tensors where they
    hold nothing but their own bytes, and copies of them otherwise.

    Args:
        budget_bytes: absolute, or None for `kv_cache_size_ratio` (default 0.35) of the memory this process can have.
        policy: name or object, see `stores.eviction.make_policy`.
        pin_memory: page-locked buffers; default: where CUDA is present.

    Attributes:
        on_evict: set by a tiered store; called with an entry evicted for lack of room before it is dropped.
    """

    tier = "memory"

    def __init__(
        self,
        budget_bytes: int | None = None,
        *,
        kv_cache_size_ratio: float = DEFAULT_RATIO,
        policy: str | EvictionPolicy = "importance",
        pin_memory: bool | None = None,
        catalog: Catalog | None = None,
    ) -> None:
        super().__init__(catalog)
        self.budget_bytes = resolve_budget(budget_bytes, kv_cache_size_ratio, self._total_bytes())
        self.on_evict: OnEvict | None = None
        self._policy = make_policy(policy)
        self._pin_memory = torch.cuda.is_available() if pin_memory is None else pin_memory
        self._entries: dict[str, StoreEntry] = {}
        self._held = 0

    def put(self, entry: StoreEntry) -> bool:
        try:
            entry = self._take(entry)
        except (MemoryError, torch.OutOfMemoryError):  # others use it too: an entry less is no fault of the request
            with self._lock:
                self.stats.put_failures["no_memory"] += 1
            return False
        with self._lock:
            self._drop_expired()
            old = self._entries.get(entry.key)
            reason = self._make_room(entry, self._bytes_of(old) if old else 0)
            if reason is not None:
                self.stats.put_failures[reason] += 1
                return False
            if old is not None:
                self._held -= self._bytes_of(old)
            self._entries[entry.key] = entry
            self._held += self._bytes_of(entry)
            self._policy.add(entry.key, self._bytes_of(entry))
            self.stats.puts += 1
            return True

    def delete(self, key: str, reason: str = "deleted") -> bool:
        with self._lock:
            return self._drop(key, reason) is not None

    def __contains__(self, key: object) -> bool:
        with self._lock:
            return key in self._entries

    def entries(self) -> Iterator[EntryInfo]:
        with self._lock:
            held = [(entry, self._policy.entries[key]) for key, entry in self._entries.items()]
        return (_info_of(entry, use) for entry, use in held)

    def info(self, key: str) -> EntryInfo | None:
        with self._lock:
            entry = self._entries.get(key)
            return None if entry is None else _info_of(entry, self._policy.entries[key])

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def bytes_held(self) -> Mapping[str, int]:
        return {self.tier: self._held}

    def touch(self, key: str) -> None:
        with self._lock:
            self._policy.hit(key)

    def note_deviation(self, key: str, deviation: float) -> None:
        with self._lock:
            self._policy.note_deviation(key, deviation)

    def close(self) -> None:
        super().close()
        with self._lock:
            self._entries.clear()
            self._held = 0

    def _total_bytes(self) -> int:
        return host_memory_bytes()

    def _take(self, entry: StoreEntry) -> StoreEntry:
        """`entry` in this tier's memory."""
        return own(entry, "cpu", self._pin_memory)

    def _bytes_of(self, entry: StoreEntry) -> int:
        if not self._pin_memory:
            return entry.num_bytes
        # What torch's allocator of page-locked memory takes.
        return sum(1 << (t.numel() * t.element_size() - 1).bit_length() for t in entry.tensors.values() if t.numel())

    def load(self, key: str) -> tuple[StoreEntry | None, str | None]:
        with self._lock:
            if self._policy.is_expired(key):
                self._drop(key, "expired")
            entry = self._entries.get(key)
        return None if entry is None else self._readable(entry), None

    def _readable(self, entry: StoreEntry) -> StoreEntry:
        """A held entry for others to read."""
        return entry

    def _on_hit(self, entry: StoreEntry) -> None:
        self._policy.hit(entry.key)

    def _drop_expired(self) -> None:
        for key in self._policy.expired():
            self._drop(key, "expired")

    def _make_room(self, entry: StoreEntry, freed_bytes: int) -> str | None:
        """Evict until `entry` fits in place of its old version of `freed_bytes`; why it cannot, or None if it can."""
        needed = self._bytes_of(entry)
        if needed > self.budget_bytes:
            return "too_large"
        while self._held - freed_bytes + needed > self.budget_bytes:
            victim = self._policy.victim(_Either(self._pins, entry.key))
            if victim is None:
                return "pinned"
            if self.on_evict is not None:
                self.on_evict(self._readable(self._entries[victim]))
            self._drop(victim, self._policy.reason)
        return None

    def _drop(self, key: str, reason: str) -> StoreEntry | None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._held -= self._bytes_of(entry)
            self._policy.remove(key)
            self.stats.evictions[reason] += 1
        return entry


def _info_of(entry: StoreEntry, use: EntryUse) -> EntryInfo:
    return EntryInfo(
        entry.key,
        entry.namespace,
        entry.fingerprint,
        len(entry.token_ids),
        entry.num_bytes,
        use.added,
        use.last_used,
        entry.meta,
        entry.context_hash,
    )


class _Either:
    """Keys that may not be evicted: the pinned ones and the one being stored."""

    def __init__(self, pins: Counter[str], key: str) -> None:
        self._pins = pins
        self._key = key

    def __contains__(self, key: object) -> bool:
        return key == self._key or key in self._pins
