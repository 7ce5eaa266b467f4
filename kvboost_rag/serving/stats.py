"""Counters of an engine."""

from __future__ import annotations

from dataclasses import dataclass

from kvboost_rag.observe.shadow import Shadow, ShadowStats
from kvboost_rag.serving.faults import Faults
from kvboost_rag.stores import Store


@dataclass(frozen=True)
class EngineStats:
    """Counters since the engine was made. `fallbacks` by reason; `bytes_held` by tier; `settled_tokens`: recomputed
    exactly while nobody waited."""

    requests: int
    fallbacks: dict[str, int]
    store_lookups: int
    store_hits: int
    store_misses: int
    rejected: dict[str, int]
    evictions: dict[str, int]
    bytes_held: dict[str, int]
    num_chunks_known: int
    shadow: ShadowStats
    settled_tokens: int

    @classmethod
    def of(cls, faults: Faults, store: Store, shadow: Shadow, settled_tokens: int) -> EngineStats:
        """As things stand; cheap."""
        return cls(
            requests=faults.num_requests,
            fallbacks=dict(faults.counts),
            store_lookups=store.stats.lookups,
            store_hits=store.stats.hits,
            store_misses=store.stats.misses,
            rejected=dict(store.stats.rejected),
            evictions=dict(store.stats.evictions),
            bytes_held=dict(store.bytes_held),
            num_chunks_known=len(store.catalog),
            shadow=shadow.stats(),
            settled_tokens=settled_tokens,
        )
