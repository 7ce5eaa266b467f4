"""The life of a document: added, changed and deleted by source id, its chunks encoded once and shared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvboost_rag.datamodels import WarmReport
from kvboost_rag.library import ChunkLibrary
from kvboost_rag.lookup import document_texts
from kvboost_rag.segments import canonical_text
from kvboost_rag.warm import WarmProgress, register_documents


class Warm(Protocol):
    """`KVBoost.warm`."""

    def __call__(
        self,
        documents: Sequence[Any],
        *,
        neighbours: Any = "auto",
        embeddings: Any = None,
        namespace: str | None = None,
        progress: Callable[[WarmProgress], None] | None = None,
    ) -> WarmReport: ...


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
    - While a source is being changed it holds its old and its new chunks. A call that was interrupted leaves that
      state: nothing is lost, nothing is left without a source, and calling again does the rest.
    - What is forgotten leaves every tier: KV, text, embedding, exact blocks, and KV that was computed behind it.
    - Methods may be called from any thread; two calls for one source at the same time leave the chunks of one of them.

    Args:
        library, warm, forget, default_namespace: of the engine; `forget(content_hashes, namespace)` gives the number
            of chunks that were known.
    """

    def __init__(
        self,
        library: ChunkLibrary,
        warm: Warm,
        forget: Callable[[Sequence[str], str], int],
        default_namespace: str = "",
    ) -> None:
        self._library = library
        self._warm = warm
        self._forget = forget
        self._namespace = default_namespace

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
            namespace: tenant; default: the config's.

        Raises:
            TypeError, ValueError: a source id or a text that cannot be used; nothing has been changed then.
            RuntimeError: the model's KV cannot be reused.
            StoreError: as `stores.maintenance.forget`.
        """
        if not isinstance(source_id, str) or not source_id:
            raise ValueError(f"source_id={source_id!r}: expected a text that is not empty")
        if self._library.encoder is None:
            raise RuntimeError("this model's KV cannot be reused, so its documents are not indexed")
        tenant = self._tenant(namespace)
        chunks = document_texts(texts)
        used = [i for i, text in enumerate(chunks) if canonical_text(text)]
        chosen = [chunks[i] for i in used]
        if embeddings is not None:
            if len(embeddings) != len(chunks):
                raise ValueError(f"{len(embeddings)} embeddings are given for {len(chunks)} texts")
            embeddings = [embeddings[i] for i in used] if used else None
        new = [r.content_hash for r in register_documents(self._library, chosen, None, tenant)]
        old = self.chunks_of(source_id, namespace=tenant)
        catalog, fingerprint = self._library.store.catalog, self._library.fingerprint
        # Old and new until all is done, so that no chunk is ever without a source.
        catalog.link(fingerprint, tenant, source_id, list(dict.fromkeys([*old, *new])))
        report = self._warm(chosen, neighbours=neighbours, embeddings=embeddings, namespace=tenant, progress=progress)
        removed = list(dict.fromkeys(key for key in old if key not in set(new)))
        forgotten = self._forget(self._only_of(source_id, removed), tenant)
        catalog.link(fingerprint, tenant, source_id, new)
        added = set(new) - set(old)
        return SourceReport(report, len(added), len(set(new)) - len(added), len(removed), forgotten)

    def update(self, source_id: str, texts: Sequence[Any], embeddings: Any = None, **options: Any) -> SourceReport:
        """`add` for a source that must be known already.

        Raises:
            KeyError: no such source; and what `add` raises.
        """
        tenant = self._tenant(options.get("namespace"))
        if not self.has(source_id, namespace=tenant):
            raise KeyError(f"no source {source_id!r}; `add` makes one")
        return self.add(source_id, texts, embeddings, **options)

    def delete(self, source_id: str, *, namespace: str | None = None) -> int:
        """Forget a source, and the chunks that no other source has. Returns how many chunks were forgotten.

        Raises:
            KeyError: no such source.
            StoreError: as `stores.maintenance.forget`; call again.
        """
        tenant = self._tenant(namespace)
        catalog = self._library.store.catalog
        if not self.has(source_id, namespace=tenant):
            raise KeyError(f"no source {source_id!r}")
        # The chunks first: if this stops in the middle, the source is still there and can be deleted again.
        chunks = dict.fromkeys(catalog.chunks_of(tenant, source_id))
        forgotten = self._forget(self._only_of(source_id, chunks), tenant)
        catalog.unlink(tenant, source_id)
        catalog.database.wipe_log()
        return forgotten

    def preview(self, source_id: str, texts: Sequence[Any], *, namespace: str | None = None) -> SourceChange:
        """What `add` would do, without doing it or remembering anything."""
        tenant = self._tenant(namespace)
        store = self._library.store
        described = [self._library.describe(t, tenant) for t in document_texts(texts) if canonical_text(t)]
        wanted = {r.content_hash: r.text for r in described}
        lost = [key for key in self.chunks_of(source_id, namespace=tenant) if key not in wanted]
        known = store.catalog.get_many(self._only_of(source_id, lost))
        to_encode = tuple(text for key, text in wanted.items() if key not in store)
        return SourceChange(to_encode, tuple(record.text for record in known.values()))

    def sources(self, *, namespace: str | None = None) -> list[str]:
        """Source ids of a tenant, in order of their names."""
        return [source for _, source in self._library.store.catalog.sources(self._tenant(namespace))]

    def has(self, source_id: str, *, namespace: str | None = None) -> bool:
        """Whether a source is known, with or without chunks of this model."""
        return bool(self._library.store.catalog.chunks_of(self._tenant(namespace), source_id))

    def chunks_of(self, source_id: str, *, namespace: str | None = None) -> tuple[str, ...]:
        """Content hashes of a source's chunks for this model, in order; none for an unknown source."""
        catalog = self._library.store.catalog
        return catalog.chunks_of(self._tenant(namespace), source_id, self._library.fingerprint)

    def _only_of(self, source_id: str, chunks: Sequence[str] | dict[str, None]) -> list[str]:
        sources_of = self._library.store.catalog.sources_of
        return [key for key in chunks if sources_of(key) == (source_id,)]

    def _tenant(self, namespace: str | None) -> str:
        return self._namespace if namespace is None else namespace
