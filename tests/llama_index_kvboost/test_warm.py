"""KVWarm in pipelines: what it warms, the pipeline's cache, upserts and deletes, neighbours, worker processes."""

from __future__ import annotations

import copy
import shutil
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from llama_index.core import Document, VectorStoreIndex
from llama_index.core.ingestion import DocstoreStrategy, IngestionPipeline
from llama_index.core.node_parser import NodeParser, SentenceSplitter
from llama_index.core.node_parser.node_utils import build_nodes_from_splits
from llama_index.core.schema import BaseNode, MetadataMode, NodeRelationship, RelatedNodeInfo, TextNode
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.llms.kvboost import KVBoostLLM, KVWarm
from llama_index_kvboost.helpers import TEXTS, MakeLLM, WordEmbedding, documents

from kvboost_rag import KVBoost
from kvboost_rag.config import EncodingConfig

SPLITTER = SentenceSplitter(chunk_size=512, chunk_overlap=0)


class Paragraphs(NodeParser):
    """One node per paragraph."""

    def _parse_nodes(self, nodes: Sequence[BaseNode], show_progress: bool = False, **kwargs: Any) -> list[BaseNode]:
        return [new for node in nodes for new in build_nodes_from_splits(node.get_content().split("\n\n"), node)]


def known(llm: KVBoostLLM) -> set[str]:
    """Texts that the model would recognise in a prompt."""
    texts = llm.engine.registry.known_texts("")
    return {text for text in [*TEXTS, "Changed text of a document that was edited."] if texts.key_of(text)}


def test_warms_what_synthesizers_write_and_returns_the_nodes(llm: KVBoostLLM) -> None:
    warm = KVWarm(llm=llm)
    nodes = SPLITTER(documents(metadata=True))
    before = copy.deepcopy(nodes)
    assert warm(nodes) == before
    assert warm.report.num_encoded == len(TEXTS)
    for node in nodes:
        text = node.get_content(metadata_mode=MetadataMode.LLM)
        assert text.startswith("file_name: ")
        assert llm.engine.registry.known_texts("").key_of(text)
    assert known(llm) == set(TEXTS)
    warm(nodes)
    assert (warm.report.num_encoded, warm.report.num_already_stored) == (0, len(TEXTS))


async def test_works_in_async_pipelines_and_indexes(llm: KVBoostLLM) -> None:
    await IngestionPipeline(transformations=[SPLITTER, KVWarm(llm=llm)]).arun(documents=documents())
    assert len(llm.engine.store) == len(TEXTS)
    index = VectorStoreIndex.from_documents(documents()[:1], transformations=[SPLITTER, KVWarm(llm=llm)])
    index.insert(Document(text="Changed text of a document that was edited."))
    assert len(llm.engine.store) == len(TEXTS) + 1


def test_the_pipelines_cache_skips_what_is_warm_and_nothing_else(llm: KVBoostLLM, make_llm: MakeLLM) -> None:
    warm = KVWarm(llm=llm)
    pipeline = IngestionPipeline(transformations=[SPLITTER, warm])
    pipeline.run(documents=documents())
    pipeline.run(documents=documents())
    second = warm.report
    assert (second.num_encoded, second.num_already_stored) == (0, len(TEXTS))
    pipeline.run(documents=documents())
    assert warm.report is second
    other = KVWarm(llm=make_llm())
    pipeline.transformations = [SPLITTER, other]
    pipeline.run(documents=documents())
    assert other.report is not None
    assert other.report.num_encoded == len(TEXTS)


def test_the_pipelines_cache_does_not_hide_what_was_forgotten(llm: KVBoostLLM) -> None:
    """The cache has seen these nodes, but what became of them since is not for it to know."""
    warm = KVWarm(llm=llm)
    pipeline = IngestionPipeline(transformations=[Paragraphs(), warm])

    def run(*texts: str) -> set[str]:
        pipeline.run(documents=[Document(text="\n\n".join(texts), id_="a")])
        return known(llm)

    for texts in (TEXTS, TEXTS[:1], TEXTS, TEXTS[:1]):  # edits that are taken back
        assert run(*texts) == set(texts)
    assert warm.delete("a") == 1
    assert run(TEXTS[0]) == {TEXTS[0]}
    llm.engine.evict([TEXTS[0]])
    assert run(TEXTS[0]) == {TEXTS[0]}


def test_a_store_that_was_deleted_is_warmed_again(tiny_loaded: Any, make_llm: MakeLLM, tmp_path: Any) -> None:
    pipeline = IngestionPipeline(transformations=[SPLITTER])
    for _ in range(2):
        with KVBoost(tiny_loaded, store=tmp_path / "store") as engine:
            warm = KVWarm(llm=make_llm(engine=engine))
            pipeline.transformations = [SPLITTER, warm]
            pipeline.run(documents=documents())
            assert warm.report is not None
            assert warm.report.num_encoded == len(TEXTS)
        shutil.rmtree(tmp_path / "store")
        (tmp_path / "placeholder").touch()  # takes the freed inode


def test_upserts_and_deletes_forget_old_chunks(llm: KVBoostLLM) -> None:
    docstore = SimpleDocumentStore()
    pipeline = IngestionPipeline(
        transformations=[SPLITTER, WordEmbedding(), KVWarm(llm=llm, docstore=docstore)],
        docstore=docstore,
        vector_store=SimpleVectorStore(),
        docstore_strategy=DocstoreStrategy.UPSERTS_AND_DELETE,
    )
    pipeline.run(documents=documents())
    assert known(llm) == set(TEXTS)
    edited = documents()
    edited[0] = Document(text="Changed text of a document that was edited.", id_="doc-0")
    pipeline.run(documents=edited)
    assert known(llm) == {"Changed text of a document that was edited.", *TEXTS[1:]}
    for left in ([1, 2], [1], [1, 2], [1]):  # with and without anything new to warm, more than once
        pipeline.run(documents=[edited[i] for i in left])
        assert known(llm) == {TEXTS[i] for i in left}


def test_an_edited_document_keeps_the_kv_of_chunks_that_did_not_change(llm: KVBoostLLM) -> None:
    docstore = SimpleDocumentStore()
    warm = KVWarm(llm=llm, docstore=docstore)
    pipeline = IngestionPipeline(
        transformations=[Paragraphs(), WordEmbedding(), warm],
        docstore=docstore,
        vector_store=SimpleVectorStore(),
        docstore_strategy=DocstoreStrategy.UPSERTS,
    )
    for texts, num_encoded in ((TEXTS[:3], 3), (TEXTS[1:4], 1)):
        pipeline.run(documents=[Document(text="\n\n".join(texts), id_="a")])
        assert warm.report is not None
        assert warm.report.num_encoded == num_encoded
        assert known(llm) == set(texts)


def test_documents_can_be_deleted_by_id_or_by_what_a_docstore_holds(llm: KVBoostLLM) -> None:
    warm = KVWarm(llm=llm)
    index = VectorStoreIndex.from_documents(documents(), transformations=[SPLITTER, warm])
    assert warm.delete("doc-3") == 1
    assert known(llm) == set(TEXTS[:3])
    index.delete_ref_doc("doc-0", delete_from_docstore=True)
    assert warm.sync(index.docstore) == 1
    assert known(llm) == set(TEXTS[1:3])
    assert warm.delete(["doc-0", "never-seen"]) == 0


def test_text_shared_by_documents_stays_until_the_last_is_gone(llm: KVBoostLLM) -> None:
    warm = KVWarm(llm=llm)
    warm(SPLITTER([Document(text=TEXTS[0], id_="a"), Document(text=TEXTS[0], id_="b")]))
    assert warm.delete("a") == 0
    assert known(llm) == {TEXTS[0]}
    assert warm.delete("b") == 1
    assert known(llm) == set()


def test_collections_and_other_sources_are_left_alone(llm: KVBoostLLM) -> None:
    engine = llm.engine
    report = engine.warm([TEXTS[2]])
    engine.store.catalog.sources.link(engine.registry.fingerprint, "", "notes.txt", report.content_hashes)
    one, two = KVWarm(llm=llm, collection="one"), KVWarm(llm=llm, collection="two")
    one(SPLITTER(documents()[:1]))
    two(SPLITTER(documents()[1:2]))
    assert one.delete(["doc-0", "doc-1"]) == 1
    assert known(llm) == set(TEXTS[1:3])


def test_neighbours_come_from_embeddings(llm: KVBoostLLM) -> None:
    texts = [f"apples pears plums fruit basket number {n}" for n in range(3)] + ["screws nails bolts box"]
    warm = KVWarm(llm=llm.model_copy(update={"neighbours": 2}))
    warm(WordEmbedding()([TextNode(text=text) for text in texts]))
    catalog = llm.engine.store.catalog
    record = llm.engine.registry.register(texts[0], "")
    assert {r.text for r in catalog.get_many(record.neighbours).values()} == set(texts[1:3])
    # A later node finds earlier ones, and those keep what they are encoded after.
    warm(WordEmbedding()([TextNode(text=text) for text in [texts[0], "apples pears plums fruit basket"]]))
    assert warm.report.num_already_stored == 1
    assert llm.engine.registry.register(texts[0], "") == record
    later = llm.engine.registry.register("apples pears plums fruit basket", "")
    assert len(later.neighbours) == 2


def test_previous_nodes_belong_into_the_context(llm: KVBoostLLM) -> None:
    texts = [f"{word} of the tale of apples" for word in ("beginning", "middle", "turn", "end")]
    nodes = [TextNode(text=text) for text in texts]
    for before, node in pairwise(nodes):
        node.relationships[NodeRelationship.PREVIOUS] = RelatedNodeInfo(node_id=before.node_id)
    KVWarm(llm=llm.model_copy(update={"neighbours": 2}))(WordEmbedding()(nodes[::-1]))
    registry = llm.engine.registry
    record = registry.register(texts[3], "")
    known = registry.store.catalog.get_many(record.neighbours)
    assert [known[key].text for key in record.contexts[0]] == [texts[0], texts[2]]


def test_without_embeddings_the_engine_chooses(tiny_loaded: Any, make_llm: MakeLLM) -> None:
    encoding = EncodingConfig(neighbours=2, embedder=WordEmbedding())
    with KVBoost(tiny_loaded, encoding=encoding) as engine:
        llm = make_llm(engine=engine)
        KVWarm(llm=llm)([TextNode(text=text) for text in TEXTS[:3]])
        KVWarm(llm=llm.model_copy(update={"neighbours": 1}))(SPLITTER(documents()[3:]))
        KVWarm(llm=llm.model_copy(update={"neighbours": 0}))([TextNode(text="Alone.", embedding=[1.0, 0.0])])
        catalog = engine.store.catalog
        assert [len(catalog.get(key).neighbours) for key in catalog.hashes()] == [2, 2, 2, 1, 0]


def test_nodes_with_and_without_a_source_are_all_warmed(llm: KVBoostLLM) -> None:
    warm = KVWarm(llm=llm)
    warm([*SPLITTER(documents()[:2]), *[TextNode(text=text) for text in TEXTS[2:]]])
    assert (warm.report.num_chunks, warm.report.num_encoded, len(warm.report.content_hashes)) == (4, 4, 4)
    assert warm.delete(["doc-0", "doc-1"]) == 2
    assert known(llm) == set(TEXTS[2:])


def test_trouble_does_not_stop_an_ingestion(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise OSError("no space left")

    llm = make_llm(strict=None)
    monkeypatch.setattr(llm.engine.fetcher, "encode_many", fail)
    pipeline = IngestionPipeline(transformations=[SPLITTER, KVWarm(llm=llm)], disable_cache=True)
    assert len(pipeline.run(documents=documents())) == 4
    assert "no space left" in caplog.text
    pipeline.transformations = [SPLITTER, KVWarm(llm=llm.model_copy(update={"strict": True}))]
    with pytest.raises(OSError, match="no space left"):
        pipeline.run(documents=documents())
    monkeypatch.undo()
    pipeline.run(documents=documents())
    assert len(llm.engine.store) == 4


def test_a_refused_model_is_indexed_without_kv(tiny_model: Any, caplog: pytest.LogCaptureFixture) -> None:
    with KVBoost(tiny_model("gpt2", head_dim=None)) as engine:
        warm = KVWarm(llm=KVBoostLLM(engine=engine))
        assert len(warm(SPLITTER(documents()))) == 4
        assert "nothing was warmed" in caplog.text
        assert warm.delete("doc-0") == 0


def test_nodes_that_cannot_be_chunks_are_passed_over(llm: KVBoostLLM, caplog: pytest.LogCaptureFixture) -> None:
    warm = KVWarm(llm=llm)
    warm([TextNode(text=" "), TextNode(text=" ".join(TEXTS) * 40, id_="too-long"), TextNode(text=TEXTS[0])])
    assert warm.report.num_chunks == 1
    assert "too-long" in caplog.text
    assert warm([]) == []


PIPELINE = """
import asyncio, sys
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.schema import NodeRelationship, RelatedNodeInfo, TextNode
from llama_index.llms.kvboost import KVBoostLLM, KVWarm

if __name__ == "__main__":
    warm = KVWarm(llm=KVBoostLLM(model_name="/no/such/model"))
    pipeline = IngestionPipeline(transformations=[warm], disable_cache="no-cache" in sys.argv)
    nodes = [TextNode(text=f"Text {n}.") for n in range(4)]
    try:
        if "async" in sys.argv:
            asyncio.run(pipeline.arun(nodes=nodes, num_workers=2))
        else:
            pipeline.run(nodes=nodes, num_workers=2)
    except RuntimeError as error:
        print(error)
"""


@pytest.mark.parametrize("options", ["cache", "no-cache", "async"])
def test_worker_processes_are_refused_before_they_load_anything(tmp_path: Path, options: str) -> None:
    """A pipeline of its own process, as worker processes import their parent's script. Loading would fail otherwise."""
    script = tmp_path / "pipeline.py"
    script.write_text(f"import sys; sys.path[:0] = {sys.path!r}\n{PIPELINE}")
    found = subprocess.run([sys.executable, str(script), options], capture_output=True, text=True, timeout=180)
    assert "run the pipeline without num_workers" in found.stdout, found.stderr
