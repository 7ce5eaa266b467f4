"""Automatic neighbours: the similar chunks that a new chunk is encoded after, by embeddings kept beside the store."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from kvboost_rag.chunks.registry import ChunkRegistry
from kvboost_rag.datamodels import ChunkRecord
from kvboost_rag.indexing.embeddings import UNNAMED, Embedder, ModelVectors, load_embedder, unit_vectors
from kvboost_rag.indexing.neighbour_groups import group_chunks, group_contexts
from kvboost_rag.indexing.neighbours import Contexts, NeighbourRules, Places, RewarmPlan, choose_contexts, plan_rewarm
from kvboost_rag.indexing.token_counts import TokenCounts
from kvboost_rag.indexing.vector_index import VectorIndex
from kvboost_rag.models.errors import ModelLoadError
from kvboost_rag.stores.catalog.chunk_arrays import ChunkArrays
from kvboost_rag.stores.maintenance import set_contexts

logger = logging.getLogger(__name__)

_BATCH = 32
_ASSIGNED = "assigned"


class NoEmbedderError(RuntimeError):
    """Texts are to be compared and no embedding model can be loaded. The message says how to get one."""


@dataclass
class _Space:
    """Vectors of one kind (one embedding model) of one namespace, in memory."""

    arrays: ChunkArrays
    index: VectorIndex = field(default_factory=VectorIndex)
    last_seq: int = 0
    removals: int = -1


class SimilarChunks:
    """Chooses encoding contexts by similarity, and remembers what it chose from.

    Contract: a chunk's context is chosen once. It is kept if it names neighbours already, if its KV is stored, or if
    it was chosen here before (also when nothing similar was known then); only `replan` with `NeighbourRules` gives
    another one. Vectors lie in the store's catalog, per embedding model, language model and namespace, and go when the
    chunk goes. Methods may be called from any thread.

    Args:
        registry: whose chunks are compared.
        embedder: what `embeddings.load_embedder` takes; None: all-MiniLM-L6-v2, loaded at first use.
        siblings: whether a chunk is encoded after what stands before it in its document, too.
    """

    def __init__(self, registry: ChunkRegistry, embedder: Any = None, siblings: bool = True) -> None:
        self.registry = registry
        self._embedder = embedder
        self._siblings = siblings
        self._embed: Embedder | None = None
        self._spaces: dict[tuple[str, str], _Space] = {}
        self._no_embedder: str | None = None
        self._lock = threading.RLock()

    def assign(
        self,
        records: Sequence[ChunkRecord],
        rules: NeighbourRules,
        embeddings: Any = None,
        namespace: str = "",
        groups: bool = False,
    ) -> list[ChunkRecord]:
        """Give those of `records` that have no encoding context yet what the rules say.

        Args:
            records: known chunks of one namespace.
            embeddings: their vectors `[num_records, dim]`, if the caller has them. With the model that made them
                (`ModelVectors`) they are compared with all of that model's, without only with each other.
            groups: among themselves only: chains of up to `rules.count` + 1, each after those before it, to be encoded
                in one forward.

        Returns:
            The records as the catalog has them now. Without an embedding model they come back as they are: that is
            said once.

        Raises:
            ValueError: not one finite embedding a record, or of another dimension than those given before.
        """
        if not records:
            return []
        if embeddings is None and len(self._settled(records, namespace)) == len({r.content_hash for r in records}):
            return self._as_known(records)  # no embedding model is needed
        with self._lock:
            try:
                space = self._with_vectors(records, embeddings, namespace)
            except NoEmbedderError as error:
                if self._no_embedder is None:
                    self._no_embedder = str(error)
                    logger.warning("chunks are encoded without neighbours: %s", error)
                return list(records)
            open_ones = self._unassigned(records, namespace)
            if groups:
                chains = self._chains(space, list(open_ones), rules.count)
                contexts = group_contexts(chains, rules.contexts)
                self._write(contexts, open_ones, namespace, self._lengths(chains, open_ones))
            else:
                places = self._places(list(open_ones), namespace)
                chosen = choose_contexts(space.index, list(open_ones), self._num_tokens(), rules, places)
                self._write(chosen, open_ones, namespace)
        return self._as_known(records)

    def search(self, text: str, count: int, namespace: str) -> list[str]:
        """Content hashes of the namespace's chunks nearest to `text`, best first; vectors that are missing are made.

        Raises:
            NoEmbedderError: no embedding model can be loaded.
        """
        with self._lock:
            space = self._with_vectors(self._records(namespace), None, namespace)
            return [hit.key for hit in space.index.nearest(self._load_embedder()([text]), count)[0]]

    def embed(self, texts: Sequence[str]) -> Any:
        """Unit vectors of texts by the model that chunks are compared with, float32 `[num_texts, dim]`.

        Raises:
            NoEmbedderError: there is none.
        """
        with self._lock:
            return self._load_embedder()(texts)

    def replan(self, namespace: str, rules: NeighbourRules) -> RewarmPlan:
        """What would change if all contexts were chosen anew today; nothing is changed.

        Raises:
            NoEmbedderError: no embedding model can be loaded.
        """
        with self._lock:
            records = self._records(namespace)
            space = self._with_vectors(records, None, namespace)
            current = {r.content_hash: r.contexts for r in records}
            return plan_rewarm(space.index, current, self._num_tokens(), rules, self._places(list(current), namespace))

    def apply(self, plan: RewarmPlan, namespace: str) -> list[ChunkRecord]:
        """Give chunks the contexts of a plan; their stored KV becomes a miss. Returns their records."""
        with self._lock:
            known = self.registry.store.catalog.get_many(plan.changes)
            self._write(plan.changes, known, namespace)
            found = self.registry.store.catalog.get_many(known)
        return list(found.values())

    def forget(self, content_hashes: Iterable[str], namespace: str) -> None:
        """Drop the vectors of chunks from memory; from the catalog they went with the chunks."""
        keys = list(content_hashes)
        with self._lock:
            for (name, _), space in self._spaces.items():
                if name == namespace:
                    space.index.remove(keys)

    def _with_vectors(self, records: Sequence[ChunkRecord], embeddings: Any, namespace: str) -> _Space:
        """The namespace's vectors, those of `records` among them."""
        distinct = {r.content_hash: (i, r) for i, r in enumerate(records)}
        if embeddings is not None:
            given = ModelVectors.of(embeddings)
            vectors = unit_vectors(given.rows, len(records))
            space = self._space(namespace, given.space, vectors.shape[1])
            space.arrays.put({key: vectors[i] for key, (i, _) in distinct.items()})
            space.index.add(list(distinct), vectors[[i for i, _ in distinct.values()]])
            return space
        space = self._space(namespace, self._load_embedder().space)
        missing = [r for key, (_, r) in distinct.items() if key not in space.index]
        for start in range(0, len(missing), _BATCH):
            self._add(space, missing[start : start + _BATCH])
        return space

    def _add(self, space: _Space, records: Sequence[ChunkRecord]) -> None:
        keys = [r.content_hash for r in records]
        known = space.arrays.get(keys)
        fresh = [r for r in records if r.content_hash not in known]
        if fresh:
            vectors = self._load_embedder()([r.text for r in fresh])
            known |= {r.content_hash: v for r, v in zip(fresh, vectors, strict=True)}
            space.arrays.put({r.content_hash: known[r.content_hash] for r in fresh})
        space.index.add(keys, np.stack([known[key] for key in keys]).astype(np.float32))

    def _space(self, namespace: str, name: str, dim: int | None = None) -> _Space:
        """The namespace's vectors of one space, up to date with chunks that were added and removed elsewhere."""
        kind = f"embedding/{name}" + (f"/{dim}" if name == UNNAMED else "")
        space = self._spaces.get((namespace, kind))
        if space is None:
            space = _Space(self._arrays(kind, namespace, np.float32))
            self._spaces[namespace, kind] = space
        catalog, fingerprint = self.registry.store.catalog, self.registry.fingerprint
        version = catalog.version()
        new = [key for _, key, _ in catalog.texts(fingerprint, namespace, after=space.last_seq)]
        held = space.arrays.get(key for key in new if key not in space.index)
        if held:
            space.index.add(list(held), np.stack(list(held.values())).astype(np.float32))
        if space.removals != version.removals:
            live = set(catalog.hashes(namespace))
            space.index.remove([key for key in space.index if key not in live])
        space.last_seq, space.removals = version.last_seq, version.removals
        return space

    def _unassigned(self, records: Sequence[ChunkRecord], namespace: str) -> dict[str, ChunkRecord]:
        store, settled = self.registry.store, self._settled(records, namespace)
        return {
            r.content_hash: r
            for r in records
            if not r.neighbours and r.content_hash not in settled and not store.is_here(r.content_hash)
        }

    def _settled(self, records: Sequence[ChunkRecord], namespace: str) -> Mapping[str, Any]:
        """Those of the records whose context was chosen here before."""
        return self._arrays(_ASSIGNED, namespace, np.int8).get(r.content_hash for r in records)

    def _as_known(self, records: Sequence[ChunkRecord]) -> list[ChunkRecord]:
        found = self.registry.store.catalog.get_many(r.content_hash for r in records)
        return [found.get(r.content_hash, r) for r in records]

    def _places(self, keys: Sequence[str], namespace: str) -> Places:
        """Where chunks stand in their documents; nothing where that is not to be used."""
        sources = self.registry.store.catalog.sources
        return sources.places(self.registry.fingerprint, namespace, keys) if self._siblings else {}

    def _chains(self, space: _Space, keys: list[str], count: int) -> list[tuple[str, ...]]:
        """Groups that fit into the model's context with their separators."""
        room, limit = NeighbourRules().max_tokens, self.registry.max_chunk_tokens
        if limit is not None:
            room = min(room, limit - count * len(self.registry.identity.separator_ids))
        return group_chunks(space.index, keys, self._num_tokens(), count + 1, room)

    def _lengths(self, chains: list[tuple[str, ...]], records: dict[str, ChunkRecord]) -> dict[str, int]:
        """Tokens of each group's forward, for every chunk in it; none for a chunk by itself."""
        identity = self.registry.identity
        lengths: dict[str, int] = {}
        for chain in (chain for chain in chains if len(chain) > 1):
            total = len(identity.anchor_ids) + (len(chain) - 1) * len(identity.separator_ids)
            lengths |= dict.fromkeys(chain, total + sum(len(records[key].token_ids) for key in chain))
        return lengths

    def _write(
        self,
        chosen: Contexts,
        records: dict[str, ChunkRecord],
        namespace: str,
        lengths: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """Contexts into the catalog, as far as they fit into the model's context; then note that they are settled."""
        catalog, changed = self.registry.store.catalog, []
        for key, record in records.items():
            group = catalog.get_many(k for context in chosen[key] for k in context)
            contexts = [[group[k] for k in context if k in group] for context in chosen[key]]
            wanted = self.registry.with_contexts(record, contexts)
            wanted = self.registry.identity.current(replace(wanted, forward_tokens=lengths.get(key, 0)))
            if wanted != record:
                changed.append(wanted)
        set_contexts(self.registry.store, changed)
        self._arrays(_ASSIGNED, namespace, np.int8).put({key: np.zeros(0, np.int8) for key in records})

    def _records(self, namespace: str) -> list[ChunkRecord]:
        catalog = self.registry.store.catalog
        keys = [key for _, key, _ in catalog.texts(self.registry.fingerprint, namespace)]
        return list(catalog.get_many(keys).values())

    def _num_tokens(self) -> dict[str, int]:
        return TokenCounts(self.registry)

    def _arrays(self, kind: str, namespace: str, dtype: Any) -> ChunkArrays:
        return self.registry.store.catalog.arrays(kind, self.registry.fingerprint, namespace, dtype)

    def _load_embedder(self) -> Embedder:
        if self._embed is not None:
            return self._embed
        if self._no_embedder is not None:
            raise NoEmbedderError(self._no_embedder)
        if self._embedder is not None:
            self._embed = load_embedder(self._embedder)
            return self._embed
        from kvboost_rag.indexing.retrieval import MiniLM

        try:
            self._embed = load_embedder(MiniLM())
        except ModelLoadError as error:
            raise NoEmbedderError(
                f"{error}; or give an embedder of your own (EncodingConfig(embedder=…)), or say neighbours=0"
            ) from error
        return self._embed
