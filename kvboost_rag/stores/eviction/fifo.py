"""First in, first out."""

from __future__ import annotations

from kvboost_rag.stores.eviction.base import EntryUse, EvictionPolicy


class FIFO(EvictionPolicy):
    """Evicts the entry that was stored first, however often it was used."""

    def rank(self, use: EntryUse) -> float:
        return use.added_at
