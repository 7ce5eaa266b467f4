"""What warmer, vector store, retriever and handler do to an engine."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from langchain_core.documents import Document
from langchain_core.prompts import BasePromptTemplate, format_document

from kvboost_rag.adapters.indexing_jobs import can_be_chunk, tolerated
from kvboost_rag.adapters.registry import EngineSpec
from kvboost_rag.indexing.embeddings import ModelVectors, load_embedder
from kvboost_rag.indexing.source_texts import SourceTexts
from langchain_kvboost.parameters import KVBoostParameters

if TYPE_CHECKING:
    from kvboost_rag.engine import KVBoost

logger = logging.getLogger(__name__)


def engine_of(model: Any) -> KVBoost:
    """The engine behind a model class of ours, an `EngineSpec`, or an engine itself; loads the weights if need be.

    Raises:
        TypeError: it is none of these.
    """
    if isinstance(model, KVBoostParameters):
        return model.engine
    if isinstance(model, EngineSpec):
        return model.get()
    if hasattr(model, "warm") and hasattr(model, "registry"):
        return model  # type: ignore[no-any-return]
    raise TypeError(f"llm must be a ChatKVBoost, a KVBoostLLM or a KVBoost engine, got {type(model).__name__}")


def namespace_of(model: Any, namespace: str | None) -> str | None:
    """The namespace: as given, else the model's own; None is the engine's default."""
    if namespace is None and isinstance(model, KVBoostParameters):
        return model.namespace or None
    return namespace


def segment_text(document: Document, prompt: BasePromptTemplate[str] | None) -> str:
    """The text of a document as it will stand in prompts."""
    return document.page_content if prompt is None else format_document(document, prompt)


def pieces_of_documents(documents: Sequence[Document], texts: Sequence[str]) -> list[list[str]]:
    """Texts by the document that they were cut out of, in order; those that stand alone are left out.

    A splitter copies the metadata of what it splits: `source` (loaders), `doc_id` (ParentDocumentRetriever); the order
    is `start_index` where the splitter wrote it, else the given one.
    """
    groups: dict[str, list[tuple[int, str]]] = {}
    for place, (document, text) in enumerate(zip(documents, texts, strict=True)):
        origin = next((v for k in ("doc_id", "source") if isinstance(v := document.metadata.get(k), str) and v), None)
        start = document.metadata.get("start_index")
        if origin is not None and text:
            groups.setdefault(origin, []).append((start if isinstance(start, int) else place, text))
    return [[text for _, text in sorted(group)] for group in groups.values() if len(group) > 1]


def announce(engine: KVBoost, texts: Sequence[str], namespace: str | None) -> None:
    """Make texts known that will stand in a prompt soon, and have their stored KV read in the background."""
    engine.register(texts, namespace=namespace)
    engine.prefetch(texts, namespace=namespace)


class DocumentWarming:
    """Documents into an engine's store, for warmer and vector store alike.

    Neither a text that cannot be a chunk nor a store in trouble is a reason to fail an indexing job: it is logged, and
    the text is prefilled or encoded when it stands in a prompt. With a strict model or engine, trouble raises.

    Args:
        llm, document_prompt, namespace: as for `KVBoostWarmer`.
        embeddings: what `embeddings.load_embedder` takes, to choose neighbours by; None: the engine's own embedder.
        neighbours: how many; None: as many as the model says, and if it says nothing the engine.

    Raises:
        ValueError: a negative number of neighbours.
    """

    def __init__(
        self,
        llm: Any,
        embeddings: Any,
        neighbours: int | None,
        document_prompt: BasePromptTemplate[str] | None,
        namespace: str | None,
    ) -> None:
        if neighbours is None and isinstance(llm, KVBoostParameters):
            neighbours = llm.neighbours
        if neighbours is not None and neighbours < 0:
            raise ValueError(f"neighbours={neighbours!r}: expected 0 or more")
        self._llm = llm
        self._embeddings = embeddings
        self._neighbours = neighbours
        self._document_prompt = document_prompt
        self._namespace = namespace_of(llm, namespace)

    def warm(self, documents: Sequence[Document]) -> None:
        """Encode and store what is not stored yet."""
        with self._tolerant() as engine:
            texts = self._texts(engine, documents)
            used = [i for i, text in enumerate(texts) if text]
            vectors = self._vectors(engine, [documents[i] for i in used])
            self._place(engine, documents, texts)
            engine.warm([texts[i] for i in used], embeddings=vectors, adapter=self._adapter, **self._options)

    def add(self, documents: Sequence[Document], source_ids: Sequence[str]) -> None:
        """As `warm`, and each source has its document from now on: what no source has any more is evicted."""
        with self._tolerant() as engine:
            if not engine.probe.reusable:
                logger.warning("nothing was warmed: %s", engine.probe.reason)
                return
            texts = self._texts(engine, documents)
            vectors = self._vectors(engine, documents)
            rows = [None if vectors is None else replace(vectors, rows=vectors.rows[[i]]) for i in range(len(texts))]
            self._place(engine, documents, texts)
            # An id that comes twice has what it was given last, as in the vector store.
            given = zip(source_ids, texts, rows, strict=False)
            sources = {source_id: SourceTexts([text], row) for source_id, text, row in given}
            own = self._adapter is not None
            engine.index.add_many(sources, encode=not own, **self._options)
            if own and any(texts):
                chosen = [i for i, text in enumerate(texts) if text]
                vectors = None if vectors is None else replace(vectors, rows=vectors.rows[chosen])
                engine.warm([texts[i] for i in chosen], embeddings=vectors, adapter=self._adapter, **self._options)

    def sources(self) -> list[str]:
        """Ids of everything that was added to the namespace, by whomever."""
        return engine_of(self._llm).index.sources(namespace=self._namespace)

    def delete(self, source_ids: Iterable[str]) -> None:
        """Forget sources, and evict what no other source has.

        Raises:
            StoreError: something could not be removed; call again.
        """
        engine_of(self._llm).index.delete_many(source_ids, namespace=self._namespace)

    def _place(self, engine: KVBoost, documents: Sequence[Document], texts: Sequence[str]) -> None:
        """Say which documents were cut out of the same text, in the order in which they stand there."""
        for group in pieces_of_documents(documents, texts):
            engine.index.place(group, namespace=self._namespace)

    @property
    def _options(self) -> dict[str, Any]:
        neighbours = "auto" if self._neighbours is None else self._neighbours
        return {"neighbours": neighbours, "namespace": self._namespace}

    @property
    def _adapter(self) -> str | list[str] | None:
        """What documents are encoded with."""
        return getattr(self._llm, "adapter", None)

    @contextmanager
    def _tolerant(self) -> Iterator[KVBoost]:
        engine = engine_of(self._llm)
        with tolerated(engine, getattr(self._llm, "strict", False)):
            yield engine

    def _texts(self, engine: KVBoost, documents: Sequence[Document]) -> list[str]:
        """The documents' texts; empty for those that cannot be chunks."""
        texts = [segment_text(document, self._document_prompt) for document in documents]
        usable = [text if can_be_chunk(engine.registry, text) else "" for text in texts]
        if num_odd := usable.count(""):
            logger.warning(
                "%d of %d documents are empty or too long to be chunks (or not Unicode)", num_odd, len(texts)
            )
        return usable

    def _vectors(self, engine: KVBoost, documents: Sequence[Document]) -> ModelVectors | None:
        count = (engine.encoding.neighbours or 0) if self._neighbours is None else self._neighbours
        if self._embeddings is None or not count or not documents:
            return None
        return load_embedder(self._embeddings).embed([document.page_content for document in documents])
