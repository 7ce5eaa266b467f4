"""How long chunks are."""

from __future__ import annotations

from kvboost_rag.chunks.registry import ChunkRegistry

_NEVER_FITS = 2**62


class TokenCounts(dict[str, int]):
    """Tokens of chunks by content hash, read from the catalog when asked for; one that is gone fits nowhere."""

    def __init__(self, registry: ChunkRegistry) -> None:
        super().__init__()
        self._catalog = registry.store.catalog

    def __missing__(self, key: str) -> int:
        record = self._catalog.get(key)
        self[key] = _NEVER_FITS if record is None else len(record.token_ids)
        return self[key]
