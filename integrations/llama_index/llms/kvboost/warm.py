"""KVWarm: the last transformation of an ingestion, which computes the KV of nodes before anybody asks."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import uuid
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import astuple
from typing import Any

from llama_index.core.bridge.pydantic import Field, PrivateAttr, field_serializer, field_validator
from llama_index.core.schema import BaseNode, MetadataMode, TransformComponent
from llama_index.llms.kvboost.base import KVBoostLLM
from llama_index.llms.kvboost.collection import collection_of, former, held_ids, ref_doc_id_of, source_name
from llama_index.llms.kvboost.generation import generation, store_identity
from llama_index.llms.kvboost.nodes import PROMPT_MODES, node_text, node_texts

from kvboost_rag.adapters.indexing_jobs import can_be_chunk, tolerated
from kvboost_rag.datamodels import WarmReport
from kvboost_rag.indexing.source_texts import SourceTexts

logger = logging.getLogger(__name__)


class KVWarm(TransformComponent):
    """Computes and stores the KV of nodes; returns the nodes unchanged.

    Stands last in `IngestionPipeline(transformations=[…])` or `VectorStoreIndex.from_documents(transformations=[…])`.
    Each node is encoded after the `llm.neighbours` most similar ones that were warmed before or come in the same call,
    by the nodes' embeddings where all of them have one (after an embedding model), else by the engine's own embedder.
    Warmed is what synthesizers write into prompts, `node.get_content(MetadataMode.LLM)`; the bare text, which the
    citation engine writes, is made known and computed when it first stands in a prompt.

    A call replaces what its source documents had before: chunks that no document has any more are forgotten, so the
    nodes of a document belong into one call. Documents are told apart by `ref_doc_id`; those with a random id of
    LlamaIndex' own by the file or address in their metadata, else by their text. The pipeline's cache skips nodes as
    long as nothing was warmed or deleted since they were seen; going through nodes that are warm takes little time.

    Args:
        llm: the model, or a KVBoost engine's LLM settings as `to_dict` gave them.
        docstore: the pipeline's; documents of this collection that it no longer holds are then forgotten with each
            run, also where nothing is to be warmed (docstore strategy `upserts_and_delete`). One that holds none of
            them (another pipeline's, or emptied) has nothing forgotten.
        collection: whose documents these are; those of other collections are never touched. Default: the docstore's
            own identity, kept in it and persisted with it; without a docstore, one of this object alone, so give a
            name where a later process is to replace or delete what this one warmed.
        progress: called with a `kvboost_rag.indexing.warm.WarmProgress` after each chunk.

    Raises:
        RuntimeError: when used in a worker process of the pipeline.
    """

    llm: KVBoostLLM
    docstore: Any = Field(default=None, exclude=True)
    collection: str = ""
    progress: Callable[[Any], None] | None = Field(default=None, exclude=True)

    _made_in: int = PrivateAttr(default_factory=os.getpid)
    _report: WarmReport | None = PrivateAttr(default=None)

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self.collection = self.collection or collection_of(self.docstore)

    @field_validator("llm", mode="before")
    @classmethod
    def _as_llm(cls, value: Any) -> Any:
        return KVBoostLLM.from_dict(value) if isinstance(value, dict) else value

    @field_serializer("llm")
    def _llm_dict(self, value: KVBoostLLM) -> dict[str, Any]:
        return value.to_dict()

    @classmethod
    def class_name(cls) -> str:
        """Name used in serialisation."""
        return "KVBoost_Warm"

    @property
    def report(self) -> WarmReport | None:
        """What the last call did."""
        return self._report

    def to_dict(self, **kwargs: Any) -> dict[str, Any]:
        """Fields, and in `warmed_into` what tells cached runs apart: model, namespace, store, changes."""
        self._refuse_worker()
        engine, into = self.llm.engine, [uuid.uuid4().hex]  # new each time: not to be skipped
        with tolerated(engine, self.llm.strict):
            if self.docstore is None or not self._gone(self.docstore):
                model = f"{engine.registry.fingerprint} {self.llm.adapter}"
                into = [model, self._namespace, store_identity(engine), generation(engine)]
        return super().to_dict(**kwargs) | {"warmed_into": into}

    @classmethod
    def from_dict(cls, data: dict[str, Any], **kwargs: Any) -> KVWarm:
        """The inverse of `to_dict`; `docstore` and `progress` are given anew."""
        return super().from_dict({name: value for name, value in data.items() if name != "warmed_into"}, **kwargs)

    def __call__(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """Warm the nodes' texts."""
        self._refuse_worker()
        engine = self.llm.engine
        with tolerated(engine, self.llm.strict):
            usable = [node for node in nodes if self._fits(node)]
            if self.docstore is not None:
                # Pipelines delete an edited document before it comes again; chunks that it still has are to stay.
                coming = {node.ref_doc_id for node in usable}
                gone = [name for name in self._gone(self.docstore) if ref_doc_id_of(name) not in coming]
                self._hand_on(gone, coming)
                self._forget(gone)
            if engine.probe.reusable:
                self._report = self._warm(usable)
            else:
                self._report = engine.warm([node_text(node) for node in usable])  # says why it does nothing
            generation(engine)
        return nodes

    async def acall(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """The same without blocking the event loop."""
        return await asyncio.to_thread(self.__call__, nodes, **kwargs)

    def delete(self, ref_doc_ids: str | Iterable[str]) -> int:
        """Forget source documents; returns how many chunks went (those of other documents stay)."""
        ids = {ref_doc_ids} if isinstance(ref_doc_ids, str) else set(ref_doc_ids)
        return self._forget(name for name in self._known() if name in ids or ref_doc_id_of(name) in ids)

    def delete_ref_doc(self, index: Any, ref_doc_id: str, delete_from_docstore: bool = True, **kwargs: Any) -> int:
        """Delete a document from an index, whatever stores it has, and forget it; returns how many chunks went."""
        index.delete_ref_doc(ref_doc_id, delete_from_docstore=delete_from_docstore, **kwargs)
        return self.delete(ref_doc_id)

    def sync(self, holder: Any) -> int:
        """Forget the source documents that a store does not hold any more; returns how many chunks went.

        Args:
            holder: the index' docstore; its vector store where that keeps the texts itself (Chroma, Qdrant, …), since
                the docstore is empty then; or all nodes that there are.

        Raises:
            ValueError: it holds none of the documents that were warmed, so that all would be forgotten.
        """
        known = self._known()
        held = held_ids(holder, map(ref_doc_id_of, known))
        if known and not held:
            raise ValueError(
                f"this holds none of the {len(known)} documents that were warmed, so all of them would be forgotten. "
                "If the vector store keeps the texts, pass that one: warm.sync(vector_store). "
                "To forget all, pass their ids to warm.delete"
            )
        return self._forget(name for name in known if ref_doc_id_of(name) not in held)

    @property
    def _namespace(self) -> str:
        own = self.llm.namespace
        return self.llm.engine.config.namespace if own is None else own

    def _fits(self, node: BaseNode) -> bool:
        text = node_text(node)
        fits = can_be_chunk(self.llm.engine.registry, text)
        if text and not fits:
            logger.warning("node %s has more tokens than the model's context: not warmed", node.node_id)
        return fits

    def _warm(self, nodes: Sequence[BaseNode]) -> WarmReport:
        """Warm nodes that have a source document as chunks of it, others as they are."""
        engine, by_source = self.llm.engine, defaultdict[str, list[BaseNode]](list)
        for node in nodes:
            by_source[node.ref_doc_id or ""].append(node)
        loose = by_source.pop("", [])
        has_embeddings = all(node.embedding is not None for node in nodes) and self.llm.neighbours != 0
        neighbours = "auto" if self.llm.neighbours is None else self.llm.neighbours
        options = {"neighbours": neighbours, "namespace": self._namespace, "progress": self.progress}
        for texts in _in_order(nodes):
            engine.index.place(texts, namespace=self._namespace)
        named = {source_name(key, group): group for key, group in by_source.items()}
        sources = {self._source_id(name): _chunks(group, has_embeddings) for name, group in named.items()}
        own = self.llm.adapter is not None
        report: WarmReport = engine.index.add_many(sources, encode=not own, **options).warm
        self._forget(former(self._known(), named))
        if loose:
            chunks = _chunks(loose, has_embeddings)
            engine.register(chunks.later, namespace=self._namespace)
            report = _sum(report, engine.warm(chunks.texts, embeddings=chunks.embeddings, encode=not own, **options))
        if own:
            chunks = _chunks(nodes, has_embeddings)
            report = engine.warm(chunks.texts, embeddings=chunks.embeddings, adapter=self.llm.adapter, **options)
        return report

    def _known(self) -> list[str]:
        """Names of the collection's documents."""
        prefix = self._source_id("")
        sources = self.llm.engine.index.sources(namespace=self._namespace)
        return [source_id.removeprefix(prefix) for source_id in sources if source_id.startswith(prefix)]

    def _gone(self, docstore: Any) -> list[str]:
        """Names of documents that a docstore has lost; none where it holds none at all."""
        known = self._known()
        held = held_ids(docstore, map(ref_doc_id_of, known))
        return [name for name in known if ref_doc_id_of(name) not in held] if held else []

    def _orphans(self, coming: Collection[str | None]) -> list[str]:
        """Ids of documents that the docstore holds and that have no chunks: a pipeline's cache gives a document the
        nodes, with the id, of an earlier one with the same text."""
        listed = set(self.docstore.get_all_document_hashes().values()) if self.docstore is not None else set()
        return sorted(listed - {ref_doc_id_of(name) for name in self._known()} - set(coming))

    def _hand_on(self, gone: Sequence[str], coming: Collection[str | None]) -> None:
        """Chunks of documents that go become those of documents that have the same text and no chunks."""
        engine = self.llm.engine
        orphans = self._orphans(coming) if gone else []
        for ref_doc_id in orphans:
            document = self.docstore.get_document(ref_doc_id, raise_error=False)
            text = document.get_content(metadata_mode=MetadataMode.NONE) if document is not None else ""
            for name in gone:
                keys = engine.index.chunks_of(self._source_id(name), namespace=self._namespace)
                known = engine.store.catalog.get_many(keys)
                if keys and any(record.text in text for record in known.values()):
                    source_id = self._source_id(ref_doc_id)
                    engine.store.catalog.sources.link(engine.registry.fingerprint, self._namespace, source_id, keys)

    def _forget(self, names: Iterable[str]) -> int:
        sources = map(self._source_id, names)
        return int(self.llm.engine.index.delete_many(sources, namespace=self._namespace))

    def _source_id(self, name: str) -> str:
        return f"{self.collection}/{name}"

    def _refuse_worker(self) -> None:
        parent = multiprocessing.parent_process()
        if self._made_in != os.getpid() and self._made_in in (os.getppid(), parent.pid if parent else None):
            raise RuntimeError(
                "KVWarm was called in a worker process, which would load the model again and lose what it computes: "
                "run the pipeline without num_workers, or leave KVWarm out of its transformations and call it on the "
                "nodes that the pipeline returns: KVWarm(llm=llm)(nodes)"
            )

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> KVWarm:
        return self.model_copy()

    def __getstate__(self) -> dict[str, Any]:
        return {"fields": {"llm": self.llm, "collection": self.collection}, "made_in": self._made_in}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state["fields"])  # type: ignore[misc]
        self._made_in = state["made_in"]


def _chunks(nodes: Sequence[BaseNode], embeddings: bool) -> SourceTexts:
    texts = [node_text(node) for node in nodes]
    bare = [text for text in node_texts(nodes, PROMPT_MODES) if text not in set(texts)]
    return SourceTexts(texts, [node.embedding for node in nodes] if embeddings else None, later=bare)


def _in_order(nodes: Sequence[BaseNode]) -> list[list[str]]:
    """Texts of nodes that follow each other by their `PREVIOUS` relationships, from the first on."""
    by_id = {node.node_id: node for node in nodes}
    previous = {node.node_id: node.prev_node.node_id for node in nodes if node.prev_node is not None}
    following = {before: key for key, before in previous.items() if before in by_id}
    runs = []
    for first in (key for key in by_id if previous.get(key) not in by_id):
        run = [first]
        while run[-1] in following:
            run.append(following[run[-1]])
        runs.append([node_text(by_id[key]) for key in run])
    return [run for run in runs if len(run) > 1]


def _sum(first: WarmReport, second: WarmReport) -> WarmReport:
    return WarmReport(*(a + b for a, b in zip(astuple(first), astuple(second), strict=True)))
