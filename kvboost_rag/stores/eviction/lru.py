"""Least recently used goes first."""

from __future__ import annotations

from kvboost_rag.stores.eviction.base import EntryUse, EvictionPolicy


class LRU(EvictionPolicy):
    """Evicts the entry whose last use (or storing) is longest ago. A long scan empties it of what was hot."""

    def rank(self, use: EntryUse) -> float:
        return use.used_at
