"""Which nodes a node is encoded behind, by the embeddings that the nodes carry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llama_index.core.schema import BaseNode

from kvboost_rag.embeddings import unit_vectors
from kvboost_rag.neighbours import NeighbourRules, choose_neighbours
from kvboost_rag.vector_index import VectorIndex

if TYPE_CHECKING:
    from kvboost_rag.library import ChunkLibrary


class NodeNeighbours:
    """Remembers the embeddings of the nodes it saw, so that later nodes find earlier ones."""

    def __init__(self) -> None:
        self._indexes: dict[str, VectorIndex] = {}
        self._texts: dict[str, str] = {}
        self._num_tokens: dict[str, int] = {}

    def choose(
        self, library: ChunkLibrary, nodes: Sequence[BaseNode], texts: Sequence[str], namespace: str, count: int
    ) -> list[list[str]] | None:
        """For each node the texts to encode it behind, nearest last; None where no node has an embedding.

        A chunk that is encoded already keeps its context: another one would be another KV.
        """
        embedded = [i for i, node in enumerate(nodes) if node.embedding is not None]
        if not embedded or count == 0:
            return None
        records = {i: library.describe(texts[i], namespace) for i in embedded}
        index = self._indexes.setdefault(namespace, VectorIndex())
        vectors = unit_vectors([nodes[i].embedding for i in embedded], len(embedded))
        index.add([records[i].content_hash for i in embedded], vectors)
        for i in embedded:
            self._texts[records[i].content_hash] = texts[i]
            self._num_tokens[records[i].content_hash] = len(records[i].token_ids)
        keys = [records[i].content_hash for i in embedded]
        self._drop_forgotten(library, set(self._texts) - set(keys))
        chosen = choose_neighbours(index, keys, self._num_tokens, NeighbourRules(count=count))
        return [
            self._context(library, records[i].content_hash, chosen) if i in records else [] for i in range(len(texts))
        ]

    def _drop_forgotten(self, library: ChunkLibrary, keys: set[str]) -> None:
        """Without this a deleted document would come back as somebody's neighbour."""
        forgotten = keys - library.store.catalog.get_many(keys).keys()
        for index in self._indexes.values():
            index.remove(forgotten)
        for key in forgotten:
            del self._texts[key], self._num_tokens[key]

    def _context(self, library: ChunkLibrary, key: str, chosen: dict[str, tuple[str, ...]]) -> list[str]:
        known = library.store.catalog.get(key)
        if known is not None and (known.neighbours or key in library.store):
            neighbours = library.store.catalog.get_many(known.neighbours)
            return [neighbours[n].text for n in known.neighbours if n in neighbours]
        return [self._texts[neighbour] for neighbour in chosen[key]]
