"""Documents in and out of an engine: made known, given encoding contexts, encoded, forgotten."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvboost_rag.chunks.donors import Donors
from kvboost_rag.chunks.fetcher import ChunkFetcher
from kvboost_rag.config import EncodingConfig
from kvboost_rag.datamodels import WarmReport
from kvboost_rag.indexing.neighbours import NeighbourRules
from kvboost_rag.indexing.similar_chunks import SimilarChunks
from kvboost_rag.indexing.warm import WarmProgress, neighbour_choice, nothing_encoded, register_documents, warm
from kvboost_rag.stores.maintenance import Removed


@dataclass(frozen=True)
class Warmer:
    """What `KVBoost.warm` and `KVBoost.evict` do, and the document index with it.

    Attributes:
        donors_wanted: whether requests may use donors as things stand.
        run: runs a job between requests.
    """

    fetcher: ChunkFetcher
    similar: SimilarChunks
    donors: Donors
    encoding: EncodingConfig
    donors_wanted: Callable[[], bool]
    run: Callable[[Callable[[], Any]], Any]

    def warm(
        self,
        texts: Sequence[str],
        namespace: str,
        neighbours: Any = "auto",
        embeddings: Any = None,
        progress: Callable[[WarmProgress], None] | None = None,
        encode: bool = True,
    ) -> WarmReport:
        """As `KVBoost.warm`."""
        count, given = neighbour_choice(neighbours, self.encoding.neighbours or 0)
        records = register_documents(self.fetcher.registry, texts, given, namespace)
        if count:
            rules = NeighbourRules(count, contexts=self.encoding.contexts or 1)
            records = self.similar.assign(records, rules, embeddings, namespace, self.encoding.groups)
        if self.donors_wanted():  # now, so that no request has to wait for it
            self.donors.update(namespace)
        if not encode:
            return nothing_encoded(records)
        # Chunk by chunk, so that requests are served in between.
        return warm(self.fetcher, records, progress, run=self.run)

    def forget(
        self,
        content_hashes: Sequence[str],
        namespace: str,
        sources: Sequence[tuple[str, str]] = (),
        unknown: bool = False,
    ) -> Removed:
        """Forget chunks: text, KV, vectors, exact blocks, also those made with other adapters or weights.

        Args:
            sources: `(namespace, source_id)` to be forgotten in the same transaction.
            unknown: texts that are no chunks are to be forgotten as well: exact blocks may hold them.

        Raises:
            StoreError: as `stores.maintenance.forget`.
        """
        registry = self.fetcher.registry
        texts = {record.token_ids for record in registry.store.catalog.get_many(content_hashes).values()}
        keys = list(dict.fromkeys((*content_hashes, *registry.twins(content_hashes))))
        removed: Removed = self.run(lambda: registry.forget(keys, sources, [namespace] if unknown else []))
        self.similar.forget(keys, namespace)
        return replace(removed, num_chunks=len(texts))  # the same text in other states of the model is no other chunk

    def evict(self, texts: Sequence[str], namespace: str) -> int:
        """As `KVBoost.evict`."""
        keys = [self.fetcher.registry.keys_of(text, namespace) for text in texts]
        self.forget([key for found in keys for key in found], namespace, unknown=bool(texts))
        return sum(bool(found) for found in keys)
