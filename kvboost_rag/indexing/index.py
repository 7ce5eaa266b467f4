"""The life of a document: added, changed and deleted by source id, its chunks encoded once and shared."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvboost_rag.chunks.lookup import document_texts
from kvboost_rag.chunks.registry import ChunkRegistry
from kvboost_rag.config import check_namespace
from kvboost_rag.datamodels import WarmReport
from kvboost_rag.indexing.preview import preview_sources
from kvboost_rag.indexing.ready_sources import ReadySource, joined_embeddings, ready_sources
from kvboost_rag.indexing.source_texts import SourceTexts
from kvboost_rag.indexing.warm import WarmProgress, register_documents
from kvboost_rag.indexing.warmer import Warmer
from kvboost_rag.prompt.segments import canonical_text
from kvboost_rag.stores.maintenance import Removed, delete_sources


@dataclass(frozen=True)
class SourceReport:
    """What a call did to one source.

    Attributes:
        warm: about the chunks that the source has now; those it had before are among the ones already stored.
        num_added, num_kept, num_removed: distinct chunks that the source has newly, still, and no more.
        num_forgotten: of the removed chunks those that no other source has: their text and KV are gone.
    """

    warm: WarmReport
    num_added: int
    num_kept: int
    num_removed: int
    num_forgotten: int


@dataclass(frozen=True)
class SourceChange:
    """What `add` or `update` would do: texts to be encoded, and texts that would be forgotten."""

    to_encode: tuple[str, ...]
    to_forget: tuple[str, ...]


class DocumentIndex:
    """Documents by source id: a file name, a record's id. Get it as `engine.index`.

    Contract:
    - A source has exactly the chunks it was last given, in order. A chunk that several sources have is encoded once
      and kept until the last of them lets go of it; one that was warmed without a source belongs to the sources that
      come to have it.
    - A call that was interrupted leaves no chunk without a source, and calling again does the rest. Deleting is one
      transaction; what has to follow it is done by whoever opens the store next, if it was interrupted. Until the old
      chunks are forgotten a source holds old and new ones; new ones that are not encoded yet are known like all others.
    - What is forgotten leaves every tier: KV, text, embedding, exact blocks, and KV that was computed after it.
    - Methods may be called from any thread; two calls for one source at the same time leave the chunks of one of them.

    Args:
        registry, warmer, default_namespace: of the engine.
    """

    def __init__(self, registry: ChunkRegistry, warmer: Warmer, default_namespace: str = "") -> None:
        self._registry = registry
        self._warmer = warmer
        self._default_namespace = default_namespace

    def add(
        self,
        source_id: str,
        texts: Sequence[Any],
        embeddings: Any = None,
        *,
        neighbours: Any = "auto",
        namespace: str | None = None,
        progress: Callable[[WarmProgress], None] | None = None,
    ) -> SourceReport:
        """Make a source have these chunks: new ones are encoded, lost ones forgotten, the rest costs nothing.

        Args:
            source_id: any text that is not empty; one that is known is changed.
            texts: chunk texts in order (or objects with `page_content` or `text`); empty ones are left out.
            embeddings, neighbours, progress: as in `KVBoost.warm`; embeddings for all of `texts`.
            namespace: namespace; default: the config's.

        Raises:
            TypeError, ValueError: a source id or a text that cannot be used; nothing has been changed then.
            RuntimeError: the model's KV cannot be reused.
            StoreError: as `stores.maintenance.forget`.
        """
        sources = {source_id: SourceTexts(texts, embeddings)}
        return self.add_many(sources, neighbours=neighbours, namespace=namespace, progress=progress)

    def add_many(
        self,
        sources: Mapping[str, SourceTexts],
        *,
        neighbours: Any = "auto",
        namespace: str | None = None,
        progress: Callable[[WarmProgress], None] | None = None,
        encode: bool = True,
    ) -> SourceReport:
        """`add` for many sources at once: their chunks can all be each other's neighbours.

        Args:
            sources: chunks by source id; embeddings for all of them or for none.
            neighbours, namespace, progress: as in `add`.
            encode: as in `KVBoost.warm`.

        Returns:
            Counts summed over the sources.

        Raises:
            TypeError, ValueError, RuntimeError, StoreError: as `add`.
        """
        ready = ready_sources(sources)
        if self._warmer.fetcher.encoder is None:
            raise RuntimeError("this model's KV cannot be reused, so its documents are not indexed")
        namespace = self._namespace(namespace)
        new = self._register(ready, namespace)
        old = {source_id: self.chunks_of(source_id, namespace=namespace) for source_id in ready}
        catalog, fingerprint = self._registry.store.catalog, self._registry.fingerprint
        for source_id in ready:
            # Old and new until the old are forgotten, so that no chunk is ever without a source.
            both = dict.fromkeys([*old[source_id], *new[source_id]])
            catalog.sources.link(fingerprint, namespace, source_id, list(both))
        removed = {source_id: set(old[source_id]) - set(new[source_id]) for source_id in ready}
        # Before anything is encoded: the old version of a text is the likeliest neighbour of the new one.
        forgotten = self._warmer.forget(catalog.sources.only_of(removed), namespace).num_chunks
        for source_id in ready:
            catalog.sources.link(fingerprint, namespace, source_id, new[source_id])
        texts = [text for source in ready.values() for text in source.texts]
        embeddings = joined_embeddings(ready.values())
        report = self._warmer.warm(texts, namespace, neighbours, embeddings, progress, encode)
        num_new = sum(len(set(keys)) for keys in new.values())
        num_added = sum(len(set(new[source_id]) - set(old[source_id])) for source_id in ready)
        num_removed = sum(len(keys) for keys in removed.values())
        return SourceReport(report, num_added, num_new - num_added, num_removed, forgotten)

    def update(self, source_id: str, texts: Sequence[Any], embeddings: Any = None, **options: Any) -> SourceReport:
        """`add` for a source that must be known already.

        Raises:
            KeyError: no such source; and what `add` raises.
        """
        namespace = self._namespace(options.get("namespace"))
        if not self.has(source_id, namespace=namespace):
            raise KeyError(f"no source {source_id!r}; `add` makes one")
        return self.add(source_id, texts, embeddings, **options)

    def delete(self, source_id: str, *, namespace: str | None = None) -> int:
        """Forget a source, and the chunks that no other source has. Returns how many chunks were forgotten.

        Raises:
            KeyError: no such source.
            StoreError: as `stores.maintenance.forget`; call again.
        """
        if not self.has(source_id, namespace=namespace):
            raise KeyError(f"no source {source_id!r}")
        return self.delete_many([source_id], namespace=namespace)

    def delete_many(self, source_ids: Iterable[str], *, namespace: str | None = None) -> int:
        """`delete` for many sources at once; those that are not known are passed over.

        Raises:
            StoreError: as `stores.maintenance.forget`; call again.
        """
        namespace = self._namespace(namespace)

        def forget(keys: Sequence[str], sources: Sequence[tuple[str, str]]) -> Removed:
            return self._warmer.forget(keys, namespace, sources)

        return delete_sources(self._registry.store, namespace, source_ids, forget).num_chunks

    def place(self, texts: Sequence[Any], *, namespace: str | None = None) -> None:
        """Say that texts stand in this order in one document, before they are warmed without being made a source.

        What stands before a chunk in its document belongs into its encoding context (`EncodingConfig.siblings`).
        """
        namespace, registry = self._namespace(namespace), self._registry
        described = (registry.describe(t, namespace) for t in document_texts(texts) if canonical_text(t))
        registry.store.catalog.sources.place(list(dict.fromkeys(record.content_hash for record in described)))

    def preview(self, source_id: str, texts: Sequence[Any], *, namespace: str | None = None) -> SourceChange:
        """What `add` would do, without doing it or remembering anything."""
        registry, place = self._registry, (self._registry.fingerprint, self._namespace(namespace))
        found = preview_sources(registry.tokens, registry.store, place, {source_id: document_texts(texts)})
        known = registry.store.catalog.get_many(found.to_forget)
        return SourceChange(found.to_encode, tuple(record.text for record in known.values()))

    def sources(self, *, namespace: str | None = None) -> list[str]:
        """Source ids of a namespace, in order of their names."""
        return [source for _, source in self._registry.store.catalog.sources.all(self._namespace(namespace))]

    def has(self, source_id: str, *, namespace: str | None = None) -> bool:
        """Whether a source is known, with or without chunks of this model."""
        return bool(self._registry.store.catalog.sources.chunks_of(self._namespace(namespace), source_id))

    def chunks_of(self, source_id: str, *, namespace: str | None = None) -> tuple[str, ...]:
        """Content hashes of a source's chunks for this model, in order; none for an unknown source."""
        catalog = self._registry.store.catalog
        return catalog.sources.chunks_of(self._namespace(namespace), source_id, self._registry.fingerprint)

    def _register(self, sources: Mapping[str, ReadySource], namespace: str) -> dict[str, list[str]]:
        """Content hashes of each source's chunks, which are known from now on."""
        texts = [text for source in sources.values() for text in source.all_texts]
        records = iter(register_documents(self._registry, texts, None, namespace))
        return {key: [next(records).content_hash for _ in source.all_texts] for key, source in sources.items()}

    def _namespace(self, namespace: str | None) -> str:
        return self._default_namespace if namespace is None else check_namespace(namespace)
