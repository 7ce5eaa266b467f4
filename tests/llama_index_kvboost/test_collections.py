"""Which documents KVWarm takes for whose: several indexes over one engine, docstores, documents without ids."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest
from llama_index.core import Document, VectorStoreIndex
from llama_index.core.ingestion import DocstoreStrategy, IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.llms.kvboost import KVBoostLLM, KVWarm
from llama_index_kvboost.helpers import TEXTS, WordEmbedding, documents

SPLITTER = SentenceSplitter(chunk_size=512, chunk_overlap=0)


def known(llm: KVBoostLLM) -> set[str]:
    texts = llm.engine.registry.known_texts("")
    return {text for text in TEXTS if texts.key_of(text)}


def pipeline_over(llm: KVBoostLLM, docstore: SimpleDocumentStore, warm: KVWarm | None = None) -> IngestionPipeline:
    return IngestionPipeline(
        transformations=[SPLITTER, WordEmbedding(), warm or KVWarm(llm=llm, docstore=docstore)],
        docstore=docstore,
        vector_store=SimpleVectorStore(),
        docstore_strategy=DocstoreStrategy.UPSERTS_AND_DELETE,
    )


def test_two_pipelines_with_a_docstore_each_leave_each_other_alone(llm: KVBoostLLM) -> None:
    one, two = (pipeline_over(llm, SimpleDocumentStore()) for _ in range(2))
    one.run(documents=documents()[:2])
    two.run(documents=documents()[2:])
    assert known(llm) == set(TEXTS)
    one.run(documents=documents()[:1])
    assert known(llm) == {TEXTS[0], *TEXTS[2:]}


def test_two_indexes_with_the_same_ids_keep_what_is_theirs(llm: KVBoostLLM) -> None:
    for text in TEXTS[:2]:
        document = Document(text=text, id_="the-same")
        VectorStoreIndex.from_documents([document], transformations=[SPLITTER, KVWarm(llm=llm)])
    assert known(llm) == set(TEXTS[:2])


def test_a_docstore_that_the_pipeline_lacks_forgets_nothing(llm: KVBoostLLM) -> None:
    pipeline = IngestionPipeline(transformations=[SPLITTER, KVWarm(llm=llm, docstore=SimpleDocumentStore())])
    for document in documents():
        pipeline.run(documents=[document])
    assert known(llm) == set(TEXTS)


def test_a_docstores_collection_is_persisted_with_it(llm: KVBoostLLM, tmp_path: Path) -> None:
    docstore = SimpleDocumentStore()
    pipeline_over(llm, docstore).run(documents=documents())
    docstore.persist(str(tmp_path / "docstore.json"))
    again = SimpleDocumentStore.from_persist_path(str(tmp_path / "docstore.json"))
    assert KVWarm(llm=llm, docstore=again).collection == KVWarm(llm=llm, docstore=docstore).collection
    pipeline_over(llm, again).run(documents=documents()[:3])
    assert known(llm) == set(TEXTS[:3])


def test_what_holds_nothing_of_it_is_refused_and_nodes_will_do(llm: KVBoostLLM) -> None:
    """As with vector stores that keep the text: the index's docstore stays empty."""
    warm = KVWarm(llm=llm)
    nodes = SPLITTER(documents())
    warm(nodes)
    with pytest.raises(ValueError, match=r"none of the 4 documents.*warm.sync\(vector_store\)"):
        warm.sync(SimpleDocumentStore())
    assert known(llm) == set(TEXTS)
    assert warm.sync(nodes[:3]) == 1
    assert known(llm) == set(TEXTS[:3])


def test_a_document_is_deleted_from_index_and_store_in_one_call(llm: KVBoostLLM) -> None:
    warm = KVWarm(llm=llm)
    index = VectorStoreIndex.from_documents(documents(), transformations=[SPLITTER, warm])
    assert warm.delete_ref_doc(index, "doc-0") == 1
    assert "doc-0" not in index.ref_doc_info
    assert known(llm) == set(TEXTS[1:])


@pytest.mark.parametrize("metadata", [{}, {"file_path": "/notes/a.txt"}])
def test_documents_without_ids_do_not_pile_up(llm: KVBoostLLM, metadata: dict[str, Any]) -> None:
    warm = KVWarm(llm=llm)
    for _ in range(3):
        document = Document(text=TEXTS[0], metadata=metadata, excluded_llm_metadata_keys=["file_path"])
        assert uuid.UUID(document.doc_id).version == 4
        warm(SPLITTER([document]))
        assert known(llm) == {TEXTS[0]}
    assert len(llm.engine.index.sources()) == 1
    if metadata:  # found again by its file, so that its old text goes
        warm(SPLITTER([Document(text=TEXTS[1], metadata=metadata, excluded_llm_metadata_keys=["file_path"])]))
        assert known(llm) == {TEXTS[1]}
    else:
        assert warm.delete(document.doc_id) == 1


def test_a_chunk_stays_for_a_document_that_the_cache_took_for_an_equal_one(llm: KVBoostLLM) -> None:
    docstore = SimpleDocumentStore()
    pipeline = pipeline_over(llm, docstore)
    for name in ("a", "b"):
        pipeline.docstore_strategy = DocstoreStrategy.UPSERTS
        pipeline.run(documents=[Document(text=TEXTS[0], id_=name), Document(text=TEXTS[1], id_="other")])
    pipeline.docstore_strategy = DocstoreStrategy.UPSERTS_AND_DELETE
    for _ in range(2):
        pipeline.run(documents=[Document(text=TEXTS[0], id_="b"), Document(text=TEXTS[1], id_="other")])
        assert known(llm) == set(TEXTS[:2])
    docstore.delete_document("b", raise_error=False)
    pipeline.run(documents=[Document(text=TEXTS[1], id_="other")])
    assert known(llm) == {TEXTS[1]}


def test_a_closed_engine_is_tolerated_from_the_first_step_to_the_last(
    llm: KVBoostLLM, caplog: pytest.LogCaptureFixture
) -> None:
    lenient = llm.model_copy(update={"strict": None})
    pipeline = IngestionPipeline(transformations=[SPLITTER, KVWarm(llm=lenient)])
    strict = IngestionPipeline(transformations=[SPLITTER, KVWarm(llm=llm)])
    llm.engine.close()
    assert len(pipeline.run(documents=documents())) == 4
    assert "could not be brought up to date" in caplog.text
    with pytest.raises(Exception, match="closed"):
        strict.run(documents=documents())
