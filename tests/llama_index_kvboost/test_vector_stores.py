"""Vector stores that keep the texts (an index' docstore has none then): deleting reaches the KV there too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from llama_index.core import StorageContext, VectorStoreIndex
from llama_index.core.ingestion import DocstoreStrategy, IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.llms.kvboost import KVBoostLLM, KVWarm
from llama_index_kvboost.helpers import TEXTS, WordEmbedding, documents

SPLITTER = SentenceSplitter(chunk_size=512, chunk_overlap=0)


def chroma(folder: Path) -> Any:
    chromadb = pytest.importorskip("chromadb")
    stores = pytest.importorskip("llama_index.vector_stores.chroma")
    client = chromadb.PersistentClient(str(folder))  # those in memory are one database, of one setting, a process
    return stores.ChromaVectorStore(chroma_collection=client.create_collection("documents"))


def qdrant(folder: Path) -> Any:
    client = pytest.importorskip("qdrant_client")
    stores = pytest.importorskip("llama_index.vector_stores.qdrant")
    return stores.QdrantVectorStore("kv", client=client.QdrantClient(":memory:"))


STORES = pytest.mark.parametrize("make_store", [chroma, qdrant])


def known(llm: KVBoostLLM) -> set[str]:
    texts = llm.engine.registry.known_texts("")
    return {text for text in TEXTS if texts.key_of(text)}


def index_over(store: Any, warm: KVWarm) -> VectorStoreIndex:
    context = StorageContext.from_defaults(vector_store=store)
    steps = [SPLITTER, WordEmbedding(), warm]
    return VectorStoreIndex.from_documents(documents(), storage_context=context, transformations=steps)


@STORES
def test_deleting_a_document_forgets_its_kv(make_store: Callable[[Path], Any], llm: KVBoostLLM, tmp_path: Path) -> None:
    warm = KVWarm(llm=llm)
    index = index_over(make_store(tmp_path), warm)
    assert not index.docstore.docs, "the texts lie in the vector store"
    assert warm.delete_ref_doc(index, "doc-0") == 1
    assert known(llm) == set(TEXTS[1:])
    assert {node.node.ref_doc_id for node in index.as_retriever(similarity_top_k=9).retrieve("store")} == {
        "doc-1", "doc-2", "doc-3",
    }  # fmt: skip


@STORES
def test_sync_asks_the_vector_store(make_store: Callable[[Path], Any], llm: KVBoostLLM, tmp_path: Path) -> None:
    warm, store = KVWarm(llm=llm), make_store(tmp_path)
    index = index_over(store, warm)
    assert warm.sync(store) == 0
    index.delete_ref_doc("doc-1")
    assert warm.sync(store) == 1
    assert known(llm) == {TEXTS[0], *TEXTS[2:]}
    assert warm.sync(index.docstore) == 0, "it only has the hashes of all documents that ever came"
    with pytest.raises(ValueError, match=r"none of the 3 documents|not found"):
        warm.sync(make_store(tmp_path / "other"))  # another, which is empty
    assert known(llm) == {TEXTS[0], *TEXTS[2:]}


@STORES
def test_a_pipeline_with_a_docstore_forgets_what_it_deletes(
    make_store: Callable[[Path], Any], llm: KVBoostLLM, tmp_path: Path
) -> None:
    docstore = SimpleDocumentStore()
    pipeline = IngestionPipeline(
        transformations=[SPLITTER, WordEmbedding(), KVWarm(llm=llm, docstore=docstore)],
        docstore=docstore, vector_store=make_store(tmp_path), docstore_strategy=DocstoreStrategy.UPSERTS_AND_DELETE,
    )  # fmt: skip
    pipeline.run(documents=documents())
    assert known(llm) == set(TEXTS)
    pipeline.run(documents=documents()[:2])
    assert known(llm) == set(TEXTS[:2])


def test_a_listing_that_is_cut_loses_nothing(llm: KVBoostLLM) -> None:
    """As Qdrant's, which gives at most so many nodes."""
    nodes = SPLITTER(documents())
    asked = []

    class Cut:
        stores_text = True

        def get_nodes(self, node_ids: Any, filters: Any) -> list[Any]:
            asked.append(list(filters.filters[0].value))
            return [node for node in nodes[:3] if node.ref_doc_id in asked[-1]][:1]

    warm = KVWarm(llm=llm)
    warm(nodes)
    assert warm.sync(Cut()) == 1
    assert known(llm) == set(TEXTS[:3])
    assert [len(ids) for ids in asked] == [4, 3, 2, 1]


def test_a_store_without_texts_is_refused(llm: KVBoostLLM) -> None:
    warm = KVWarm(llm=llm)
    warm(SPLITTER(documents()))
    with pytest.raises(ValueError, match="keeps no texts"):
        warm.sync(SimpleVectorStore())
    assert known(llm) == set(TEXTS)
