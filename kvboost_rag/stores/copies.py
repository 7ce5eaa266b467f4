"""Copies between tiers that are under way, and whether what they carry has been replaced or deleted meanwhile."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class Copy:
    """One entry on its way from a slow tier to faster ones; `is_stale` once it must not arrive any more."""

    def __init__(self, is_stale: bool) -> None:
        self.is_stale = is_stale


class Copies:
    """Which copies are under way, by key.

    A copy is stale if its key was changed (put, deleted) at any time between its beginning, before the entry is read,
    and its arrival: what was read may be what was replaced. Arrivals and changes exclude each other by `lock`, which an
    arriving copy holds while it looks at `is_stale` and writes.

    Args:
        lock: the store's.
    """

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self._changing: Counter[str] = Counter()
        self._under_way: dict[str, set[Copy]] = {}

    @contextmanager
    def copy(self, key: str) -> Iterator[Copy]:
        """A copy of `key` while the block reads it and lets it arrive."""
        with self._lock:
            begun = Copy(is_stale=key in self._changing)
            self._under_way.setdefault(key, set()).add(begun)
        try:
            yield begun
        finally:
            with self._lock:
                self._under_way[key].discard(begun)
                if not self._under_way[key]:
                    del self._under_way[key]

    @contextmanager
    def change(self, key: str) -> Iterator[None]:
        """`key` is replaced or deleted in the block: no copy that was under way arrives, and none that begins now."""
        with self._lock:
            self._changing[key] += 1
            for begun in self._under_way.get(key, ()):
                begun.is_stale = True
        try:
            yield
        finally:
            with self._lock:
                self._changing[key] -= 1
                if not self._changing[key]:
                    del self._changing[key]
