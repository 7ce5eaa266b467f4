"""KVWarm: the last transformation of an ingestion, which computes the KV of nodes before anybody asks."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from llama_index.core.bridge.pydantic import Field, PrivateAttr, field_serializer, field_validator
from llama_index.core.schema import BaseNode, TransformComponent
from llama_index.llms.kvboost.base import KVBoostLLM
from llama_index.llms.kvboost.node_neighbours import NodeNeighbours
from llama_index.llms.kvboost.nodes import PROMPT_MODES, node_text, node_texts

from kvboost_rag.datamodels import WarmReport

logger = logging.getLogger(__name__)


class KVWarm(TransformComponent):
    """Computes and stores the KV of nodes; returns the nodes unchanged.

    Stands last in `IngestionPipeline(transformations=[…])` or `VectorStoreIndex.from_documents(transformations=[…])`.
    Behind an embedding model, each node is encoded behind the most similar ones (`llm.neighbours`); elsewhere alone.
    Warmed is what synthesizers write into prompts, `node.get_content(MetadataMode.LLM)`; the bare text, which the
    citation engine writes, is made known and computed when it first stands in a prompt.

    A call replaces what its source documents (`ref_doc_id`) had before: chunks that no document has any more are
    forgotten, so the nodes of a document belong into one call. The pipeline's cache skips nodes that were warmed
    into the same store; what was evicted since is computed when it is asked for.

    Args:
        llm: the model, or a KVBoost engine's LLM settings as `to_dict` gave them.
        docstore: the pipeline's; documents that it no longer holds are then forgotten with each run, also where
            nothing is to be warmed (docstore strategy `upserts_and_delete`).
        collection: keeps the documents of several docstores over one model apart.
        progress: called with a `kvboost_rag.warm.WarmProgress` after each chunk.

    Raises:
        RuntimeError: when called in a worker process of the pipeline.
    """

    llm: KVBoostLLM
    docstore: Any = Field(default=None, exclude=True)
    collection: str = "llama_index"
    progress: Callable[[Any], None] | None = Field(default=None, exclude=True)

    _made_in: int = PrivateAttr(default_factory=os.getpid)
    _neighbours: NodeNeighbours = PrivateAttr(default_factory=NodeNeighbours)
    _report: WarmReport | None = PrivateAttr(default=None)

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
        """Fields, and in `warmed_into` what the pipeline's cache has to tell apart: model, tenant, store, deletions."""
        engine = self.llm.engine
        into = [engine.library.fingerprint, self._namespace, _store_identity(engine)]
        if self.docstore is not None and self._gone(self.docstore):
            into.append(uuid.uuid4().hex)  # something is to be forgotten: this call must not be skipped
        return super().to_dict(**kwargs) | {"warmed_into": into}

    @classmethod
    def from_dict(cls, data: dict[str, Any], **kwargs: Any) -> KVWarm:
        """The inverse of `to_dict`; `docstore` and `progress` are given anew."""
        return super().from_dict({name: value for name, value in data.items() if name != "warmed_into"}, **kwargs)

    def __call__(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """Warm the nodes' texts."""
        self._refuse_worker()
        engine, namespace = self.llm.engine, self._namespace
        if self.docstore is not None:
            self.sync(self.docstore)
        usable = [node for node in nodes if self._fits(node)]
        texts = [node_text(node) for node in usable]
        behind = self._neighbours.choose(engine.library, usable, texts, namespace, self.llm.neighbours)
        self._report = engine.warm(texts, neighbours=behind, namespace=namespace, progress=self.progress)
        engine.register(node_texts(usable, PROMPT_MODES), namespace=namespace)
        self._link(usable)
        return nodes

    async def acall(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """The same without blocking the event loop."""
        return await asyncio.to_thread(self.__call__, nodes, **kwargs)

    def delete(self, ref_doc_ids: str | Iterable[str]) -> int:
        """Forget source documents; returns how many chunks went (those of other documents stay)."""
        ids = [ref_doc_ids] if isinstance(ref_doc_ids, str) else list(ref_doc_ids)
        catalog = self.llm.engine.store.catalog
        return self._forget(key for i in ids for key in catalog.unlink(self._namespace, self._source_id(i)))

    def sync(self, docstore: Any) -> int:
        """Forget the source documents that a docstore does not hold any more; returns how many chunks went."""
        return self.delete(self._gone(docstore))

    @property
    def _namespace(self) -> str:
        own = self.llm.namespace
        return self.llm.engine.config.namespace if own is None else own

    def _fits(self, node: BaseNode) -> bool:
        library, text = self.llm.engine.library, node_text(node)
        if not text:
            return False
        num_tokens, limit = len(library.tokens.document_ids(text)), library.max_chunk_tokens
        if limit is not None and num_tokens > limit:
            logger.warning("node %s has %d tokens, more than the context: not warmed", node.node_id, num_tokens)
        return num_tokens > 0 and (limit is None or num_tokens <= limit)

    def _link(self, nodes: Sequence[BaseNode]) -> None:
        """Remember which chunks each source document has now, and forget those that none has."""
        library, chunks = self.llm.engine.library, defaultdict(list)
        for node in nodes:
            if node.ref_doc_id:
                keys = [
                    library.describe(text, self._namespace).content_hash for text in node_texts([node], PROMPT_MODES)
                ]
                chunks[node.ref_doc_id].extend(keys)
        catalog = library.store.catalog
        for ref_doc_id, keys in chunks.items():
            source_id = self._source_id(ref_doc_id)
            self._forget(catalog.link(library.fingerprint, self._namespace, source_id, list(dict.fromkeys(keys))))

    def _forget(self, keys: Iterable[str]) -> int:
        engine = self.llm.engine
        records = engine.store.catalog.get_many(list(keys))
        return engine.evict([r.text for r in records.values()], namespace=self._namespace) if records else 0

    def _gone(self, docstore: Any) -> list[str]:
        held = set(docstore.get_all_document_hashes().values()) | set(docstore.get_all_ref_doc_info() or ())
        prefix = self._source_id("")
        sources = self.llm.engine.store.catalog.sources(self._namespace)
        known = [source_id.removeprefix(prefix) for _, source_id in sources if source_id.startswith(prefix)]
        return [ref_doc_id for ref_doc_id in known if ref_doc_id not in held]

    def _source_id(self, ref_doc_id: str) -> str:
        return f"{self.collection}/{ref_doc_id}"

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


def _store_identity(engine: Any) -> str:
    """Differs between stores, also between one that was deleted and another at the same place."""
    path = Path(engine.store.catalog.database.path)
    if not path.is_file():
        return f"memory {os.getpid()} {id(engine.store)}"
    return f"{path.absolute()} {path.stat().st_ino}"
