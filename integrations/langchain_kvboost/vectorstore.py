"""KVBoostVectorStore: any vector store, with the KV of its documents warmed on add and evicted on delete."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.prompts import BasePromptTemplate
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore

from langchain_kvboost.changes import gone, refuse_unknown_change
from langchain_kvboost.collection import found_again, named, source_prefix
from langchain_kvboost.warming import DocumentWarming

logger = logging.getLogger(__name__)


def _delegated(name: str) -> Callable[..., Any]:
    """A method that is the wrapped store's."""

    def method(self: KVBoostVectorStore, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.vectorstore, name)(*args, **kwargs)

    method.__name__ = name
    method.__doc__ = f"`{name}` of the wrapped store."
    return method


class KVBoostVectorStore(VectorStore):
    """Wraps a vector store. Searching is the wrapped store's; adding also warms, deleting also evicts.

    Each document is encoded after the most similar ones that were added before or come in the same call, so the first
    documents of an empty store are best added in one call. How similar they are is told by the store's embeddings. The
    same text under several ids is one chunk, evicted with the last of them. Nothing is written into documents or their
    metadata. Works under `langchain_core.indexing.index`.

    Args:
        vectorstore: the store to wrap; it may hold documents already (they are encoded when first asked about).
        llm: the `ChatKVBoost` or `KVBoostLLM` that will answer (or its engine).
        neighbours: how many similar documents each is encoded after; default: the model's. 0 embeds nothing.
        document_prompt: as for `KVBoostWarmer`.
        namespace: whose chunks; default: the model's.
        name: tells stores apart that share one KV store; default: the collection's name and place. Stores without one
            (in memory, FAISS) are known again by the documents they hold, also after dumping and loading.
    """

    def __init__(
        self,
        vectorstore: VectorStore,
        llm: Any,
        *,
        neighbours: int | None = None,
        document_prompt: BasePromptTemplate[str] | None = None,
        namespace: str | None = None,
        name: str | None = None,
    ) -> None:
        self.vectorstore = vectorstore
        self._given_name = name
        self._warming = DocumentWarming(llm, vectorstore.embeddings, neighbours, document_prompt, namespace)

    @cached_property
    def name(self) -> str:
        """Of the collection; looked up when it is first needed."""
        known = self._given_name or named(self.vectorstore)
        if known:
            return known
        try:
            sources = self._warming.sources()
        except Exception as error:  # trouble with the KV store must not end an indexing job
            logger.warning("what was added before cannot be looked up: %s", error)
            sources = []
        return found_again(self.vectorstore, sources)

    similarity_search = _delegated("similarity_search")
    asimilarity_search = _delegated("asimilarity_search")
    similarity_search_with_score = _delegated("similarity_search_with_score")
    asimilarity_search_with_score = _delegated("asimilarity_search_with_score")
    similarity_search_by_vector = _delegated("similarity_search_by_vector")
    asimilarity_search_by_vector = _delegated("asimilarity_search_by_vector")
    max_marginal_relevance_search = _delegated("max_marginal_relevance_search")
    amax_marginal_relevance_search = _delegated("amax_marginal_relevance_search")
    max_marginal_relevance_search_by_vector = _delegated("max_marginal_relevance_search_by_vector")
    amax_marginal_relevance_search_by_vector = _delegated("amax_marginal_relevance_search_by_vector")
    _similarity_search_with_relevance_scores = _delegated("_similarity_search_with_relevance_scores")
    _asimilarity_search_with_relevance_scores = _delegated("_asimilarity_search_with_relevance_scores")
    _select_relevance_score_fn = _delegated("_select_relevance_score_fn")
    get_by_ids = _delegated("get_by_ids")
    aget_by_ids = _delegated("aget_by_ids")

    @property
    def embeddings(self) -> Embeddings | None:
        """The wrapped store's."""
        return self.vectorstore.embeddings

    def add_documents(self, documents: list[Document], **kwargs: Any) -> list[str]:
        """Add to the wrapped store, then warm. Keywords (`ids`, `batch_size`, …) are the wrapped store's."""
        self._look_up()
        ids = self.vectorstore.add_documents(documents, **kwargs)
        self._warm(documents, ids)
        return ids

    async def aadd_documents(self, documents: list[Document], **kwargs: Any) -> list[str]:
        """As `add_documents`; warming runs in a thread."""
        await asyncio.to_thread(self._look_up)
        ids = await self.vectorstore.aadd_documents(documents, **kwargs)
        await asyncio.to_thread(self._warm, documents, ids)
        return ids

    def add_texts(
        self,
        texts: Iterable[str],
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **kwargs: Any,
    ) -> list[str]:
        """As `add_documents`, from texts."""
        return self.add_documents(_documents(texts, metadatas, ids), **_with_ids(ids, kwargs))

    async def aadd_texts(
        self,
        texts: Iterable[str],
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **kwargs: Any,
    ) -> list[str]:
        """As `aadd_documents`, from texts."""
        return await self.aadd_documents(_documents(texts, metadatas, ids), **_with_ids(ids, kwargs))

    def delete(self, ids: list[str] | None = None, **kwargs: Any) -> bool | None:
        """Delete from the wrapped store, then evict chunks that no id has any more.

        Without ids (everything, or what a filter says) the wrapped store is asked which of the documents are left.
        """
        self._look_up()
        deleted = self.vectorstore.delete(ids, **kwargs)
        self._after_delete(ids, kwargs)
        return deleted

    async def adelete(self, ids: list[str] | None = None, **kwargs: Any) -> bool | None:
        """As `delete`; evicting runs in a thread."""
        await asyncio.to_thread(self._look_up)
        deleted = await self.vectorstore.adelete(ids, **kwargs)
        await asyncio.to_thread(self._after_delete, ids, kwargs)
        return deleted

    def update_document(self, document_id: str, document: Document) -> None:
        """As the wrapped store's (Chroma): the new text is warmed, the old one evicted."""
        self._look_up()
        self.vectorstore.update_document(document_id, document)  # type: ignore[attr-defined]
        self._warm([document], [document_id])

    def update_documents(self, ids: list[str], documents: list[Document]) -> None:
        """As `update_document`, for several."""
        self._look_up()
        self.vectorstore.update_documents(ids, documents)  # type: ignore[attr-defined]
        self._warm(documents, ids)

    def delete_collection(self) -> None:
        """As the wrapped store's, and everything that was added through this object or its name is evicted."""
        own = self._own_ids()
        self.vectorstore.delete_collection()  # type: ignore[attr-defined]
        self._evict(own)

    async def adelete_collection(self) -> None:
        """As `delete_collection` (PGVector)."""
        own = await asyncio.to_thread(self._own_ids)
        await self.vectorstore.adelete_collection()  # type: ignore[attr-defined]
        await asyncio.to_thread(self._evict, own)

    def reset_collection(self) -> None:
        """As `delete_collection`; the store is empty afterwards."""
        own = self._own_ids()
        self.vectorstore.reset_collection()  # type: ignore[attr-defined]
        self._evict(own)
        del self.name  # it may be another collection now

    def sync_deleted(self) -> int:
        """Evict documents that the wrapped store does not hold any more, however they went; returns how many.

        Raises:
            NotImplementedError: the wrapped store cannot be asked for documents by id.
        """
        missing = gone(self.vectorstore, self._own_ids())
        self._evict(missing)
        return len(missing)

    @classmethod
    def from_texts(
        cls,
        texts: list[str],
        embedding: Embeddings,
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **kwargs: Any,
    ) -> KVBoostVectorStore:
        """A store over `vectorstore_cls` (a class, default in memory) with these texts; `llm` is required.

        Args:
            kwargs: `llm`, `vectorstore_cls`, arguments of this class, and `vectorstore_kwargs` for the wrapped class.
        """
        inner = kwargs.pop("vectorstore_cls", InMemoryVectorStore)
        wrapped = inner.from_texts([], embedding, **kwargs.pop("vectorstore_kwargs", {}))
        store = cls(wrapped, **kwargs)
        store.add_texts(texts, metadatas, ids=ids)
        return store

    def __getattr__(self, name: str) -> Any:
        """Whatever else the wrapped store can do."""
        if name == "vectorstore":  # asked for before __init__ ran, by copy and pickle
            raise AttributeError(name)
        refuse_unknown_change(self.vectorstore, name)
        return getattr(self.vectorstore, name)

    def _look_up(self) -> str:
        """The name, while the store still holds what it is known by."""
        return self.name

    def _after_delete(self, ids: Sequence[str] | None, others: dict[str, Any]) -> None:
        if ids is not None and not others:
            self._evict(ids)
        else:
            self.sync_deleted()

    def _own_ids(self) -> list[str]:
        """Ids of the documents that were added under this store's name."""
        before = source_prefix(self.name)
        return [source.removeprefix(before) for source in self._warming.sources() if source.startswith(before)]

    def _warm(self, documents: Sequence[Document], ids: Sequence[str]) -> None:
        if documents:
            self._warming.add(documents, [self._source(document_id) for document_id in ids])

    def _evict(self, ids: Sequence[str]) -> None:
        if ids:
            self._warming.delete([self._source(document_id) for document_id in ids])

    def _source(self, document_id: str) -> str:
        # The store takes half a character in an id, catalogs do not.
        return f"{source_prefix(self.name)}{document_id}".encode("utf-8", "backslashreplace").decode()


def _documents(
    texts: Iterable[str], metadatas: Sequence[dict[str, Any]] | None, ids: Sequence[str] | None
) -> list[Document]:
    listed = list(texts)
    if metadatas is not None and len(metadatas) != len(listed):
        raise ValueError(f"{len(listed)} texts came with {len(metadatas)} metadatas")
    if ids is not None and len(ids) != len(listed):
        raise ValueError(f"{len(listed)} texts came with {len(ids)} ids")
    return [
        Document(text, metadata=metadatas[i] if metadatas else {}, id=ids[i] if ids else None)
        for i, text in enumerate(listed)
    ]


def _with_ids(ids: list[str] | None, kwargs: dict[str, Any]) -> dict[str, Any]:
    return kwargs if ids is None else {**kwargs, "ids": ids}
