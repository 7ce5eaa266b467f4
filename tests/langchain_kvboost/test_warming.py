"""Warmer, vector store, retriever and handler: what they warm, what they evict, and that documents stay as they are."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from typing import Any

import pytest
from corpus_texts import document, prompt
from langchain_classic.indexes import SQLRecordManager
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding, Embeddings
from langchain_core.indexing import InMemoryRecordManager, index
from langchain_core.prompts import PromptTemplate
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_text_splitters import RecursiveCharacterTextSplitter

from langchain_kvboost import KVBoostPrefetchHandler, KVBoostRetriever, KVBoostVectorStore, KVBoostWarmer

TEXTS = [document(n, 2) for n in range(6)]
DOCUMENTS = [Document(text, metadata={"source": f"s{n}"}, id=str(n)) for n, text in enumerate(TEXTS)]


class Letters(Embeddings):
    """Vectors of letter counts: similar texts are near each other, and the same text is always the same vector."""

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [[text.count(chr(c)) + 0.01 for c in range(48, 123)] for text in texts]

    def embed_query(self, text: str) -> list[float]:
        return self.embed_documents([text])[0]


@pytest.fixture
def model(llm: Callable[..., Any]) -> Any:
    return llm(store="memory", neighbours=2)


def _hits(model: Any, texts: list[str]) -> dict[str, int]:
    info = model.generate([prompt(texts)]).generations[0][0].generation_info
    return info["kvboost"]["hits"]


def _known(model: Any) -> set[str]:
    catalog = model.engine.store.catalog
    return {record.text for record in catalog.get_many(catalog.hashes()).values()}


def _held(model: Any) -> set[str]:
    store = model.engine.store
    found = store.catalog.get_many(list(store.keys()))
    return {record.text for record in found.values()}


def _num_neighbours(model: Any) -> list[int]:
    """Of each known chunk, in the order in which they became known."""
    catalog = model.engine.store.catalog
    return [len(catalog.get(key).neighbours) for key in catalog.hashes()]


# The warmer.


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("embeddings", [None, Letters()])
def test_the_warmer_warms_and_hands_on(model: Any, embeddings: Any, asynchronous: bool) -> None:
    before = copy.deepcopy(DOCUMENTS)
    warmer = KVBoostWarmer(model, embeddings=embeddings)
    if asynchronous:
        after = asyncio.run(warmer.atransform_documents(DOCUMENTS))
    else:
        after = warmer.transform_documents(DOCUMENTS)
    assert after is DOCUMENTS
    assert before == DOCUMENTS
    assert _held(model) == set(TEXTS)
    assert _hits(model, TEXTS[::-1]) == {"approximate": 6}


def test_the_warmer_chooses_similar_neighbours(model: Any) -> None:
    texts = ["aaaa bbbb", "aaaa bbbb aaaa", "cccc dddd eeee", "cccc dddd eeee cccc", "aaaa bbbb bbbb"]
    KVBoostWarmer(model, embeddings=Letters(), neighbours=1).transform_documents([Document(t) for t in texts])
    registry = model.engine.registry
    records = {t: registry.register(t, "") for t in texts}
    behind = {t: registry.store.catalog.get_many(r.neighbours) for t, r in records.items()}
    assert [r.text for r in behind["cccc dddd eeee"].values()] == ["cccc dddd eeee cccc"]
    assert [r.text[:4] for r in behind["aaaa bbbb"].values()] == ["aaaa"]


@pytest.mark.parametrize("written", [True, False])
def test_what_stands_before_a_piece_in_its_document_belongs_into_its_context(model: Any, written: bool) -> None:
    pieces = [
        f"{word} {number} tells of letters and more letters" for number, word in enumerate(("aa", "bb", "cc", "dd"))
    ]
    others = [Document("zz unrelated", metadata={"source": "b.txt"})]
    documents = [
        Document(text, metadata={"source": "a.txt"} | ({"start_index": 100 * n} if written else {}))
        for n, text in enumerate(pieces)
    ]
    given = documents[::-1] if written else documents  # with start_index the order of the call does not matter
    KVBoostWarmer(model, embeddings=Letters(), neighbours=2).transform_documents([*others, *given])
    registry = model.engine.registry
    record = registry.register(pieces[3], "")
    known = registry.store.catalog.get_many(record.neighbours)
    assert [known[key].text for key in record.contexts[0]] == [pieces[0], pieces[2]]  # the head, the one before
    assert registry.register(pieces[1], "").contexts[0][-1] == registry.register(pieces[0], "").content_hash


def test_warming_behind_a_splitter(model: Any) -> None:
    long = Document(" ".join(TEXTS))
    chunks = RecursiveCharacterTextSplitter(chunk_size=150, chunk_overlap=0).split_documents([long])
    KVBoostWarmer(model).transform_documents(chunks)
    texts = [chunk.page_content for chunk in chunks]
    assert len(texts) > 3
    whole = [text for text in texts if len(model.engine.tokens.document_ids(text)) >= 16]  # the last may be a rest
    assert _hits(model, texts) == {"approximate": len(whole)}


def test_documents_that_cannot_be_chunks_are_passed_over(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    odd = [Document(""), DOCUMENTS[0], Document("  \n"), Document("long " * 4000)]
    assert list(KVBoostWarmer(model, embeddings=Letters()).transform_documents(odd)) == odd
    assert _held(model) == {TEXTS[0]}
    assert "3 of 4 documents are empty or too long" in caplog.text
    assert KVBoostWarmer(model).transform_documents([]) == []


def test_a_document_prompt_is_part_of_the_chunk(model: Any) -> None:
    header = PromptTemplate.from_template("Source: {source}\n{page_content}")
    KVBoostWarmer(model, document_prompt=header).transform_documents(DOCUMENTS[:2])
    assert _held(model) == {f"Source: s{n}\n{TEXTS[n]}" for n in (0, 1)}


# The vector store.


@pytest.fixture
def store(model: Any) -> KVBoostVectorStore:
    return KVBoostVectorStore(InMemoryVectorStore(Letters()), model)


def test_adding_warms_behind_neighbours_and_deleting_evicts(model: Any, store: KVBoostVectorStore) -> None:
    ids = store.add_documents(DOCUMENTS)
    assert _held(model) == set(TEXTS)
    assert _hits(model, TEXTS) == {"approximate": 6}
    assert _num_neighbours(model) == [2] * 6
    store.delete(ids[:2])
    assert _known(model) == set(TEXTS[2:])
    assert [d.id for d in store.get_by_ids(ids)] == ids[2:]


def test_async_adding_and_deleting(model: Any, store: KVBoostVectorStore) -> None:
    async def main() -> None:
        ids = await store.aadd_documents(DOCUMENTS)
        assert _held(model) == set(TEXTS)
        await store.adelete(ids)

    asyncio.run(main())
    assert _known(model) == set()


def test_a_text_with_two_ids_is_evicted_with_the_last(model: Any, store: KVBoostVectorStore) -> None:
    store.add_texts([TEXTS[0], TEXTS[0], TEXTS[1]], ids=["a", "b", "c"])
    store.delete(["a"])
    assert _known(model) == {TEXTS[0], TEXTS[1]}
    store.delete(["b"])
    assert _known(model) == {TEXTS[1]}


def test_a_changed_document_takes_the_place_of_the_old(model: Any, store: KVBoostVectorStore) -> None:
    store.add_texts(TEXTS[:2], ids=["a", "b"])
    store.add_texts([TEXTS[2]], ids=["a"])
    assert _known(model) == {TEXTS[1], TEXTS[2]}
    store.add_texts([TEXTS[1]], ids=["b"])  # the same again
    assert _hits(model, [TEXTS[1], TEXTS[2]]) == {"approximate": 2}


def test_a_text_that_moves_to_another_id_in_one_call_stays(model: Any, store: KVBoostVectorStore) -> None:
    store.add_texts([TEXTS[0]], ids=["a"])
    store.add_texts([TEXTS[1], TEXTS[0]], ids=["a", "b"])
    assert _held(model) == _known(model) == {TEXTS[0], TEXTS[1]}


def test_two_stores_do_not_evict_each_others_documents(model: Any) -> None:
    one, two = (KVBoostVectorStore(InMemoryVectorStore(Letters()), model) for _ in range(2))
    one.add_texts(TEXTS[:1], ids=["a"])
    two.add_texts(TEXTS[:1], ids=["a"])
    one.delete(["a"])
    assert _known(model) == {TEXTS[0]}


class Collection(InMemoryVectorStore):
    """Changes documents in the ways that Chroma and its kin have."""

    def delete(self, ids: Any = None, where: Any = None, **kwargs: Any) -> None:
        if where is not None:
            ids = [key for key, value in self.store.items() if where.items() <= value["metadata"].items()]
        super().delete(list(self.store) if ids is None else ids)

    async def adelete(self, ids: Any = None, **kwargs: Any) -> None:
        self.delete(ids, **kwargs)

    def update_documents(self, ids: list[str], documents: list[Document]) -> None:
        self.add_documents([Document(d.page_content, id=i) for i, d in zip(ids, documents, strict=True)])

    def update_document(self, document_id: str, document: Document) -> None:
        self.update_documents([document_id], [document])

    def delete_collection(self) -> None:
        self.store.clear()

    reset_collection = delete_collection

    def merge_from(self, other: Any) -> None:
        self.store |= other.store


@pytest.fixture
def collection(model: Any) -> KVBoostVectorStore:
    store = KVBoostVectorStore(Collection(Letters()), model)
    store.add_documents([Document(t, metadata={"n": i % 2}, id=str(i)) for i, t in enumerate(TEXTS[:4])])
    return store


@pytest.mark.parametrize(
    ("change", "left"),
    [
        (lambda store: store.delete(), []),
        (lambda store: store.delete(where={"n": 0}), [1, 3]),
        (lambda store: asyncio.run(store.adelete(where={"n": 1})), [0, 2]),
        (lambda store: store.delete(["0"]), [1, 2, 3]),
        (lambda store: store.delete_collection(), []),
        (lambda store: store.reset_collection(), []),
        (lambda store: store.update_document("0", Document(TEXTS[5])), [5, 1, 2, 3]),
        (lambda store: store.update_documents(["0", "1"], [Document(TEXTS[5]), Document(TEXTS[4])]), [5, 4, 2, 3]),
        (lambda store: (store.vectorstore.store.pop("2"), store.sync_deleted()), [0, 1, 3]),
    ],
)
def test_however_a_document_goes_its_kv_goes_with_it(
    model: Any, collection: KVBoostVectorStore, change: Any, left: list[int]
) -> None:
    change(collection)
    assert _known(model) == {TEXTS[i] for i in left}
    assert _held(model) <= _known(model), "what was encoded after a document that is gone is encoded again"


def test_changes_that_would_pass_unseen_are_refused_by_name(collection: KVBoostVectorStore) -> None:
    with pytest.raises(AttributeError, match=r"Collection\.merge_from .* \.vectorstore\.merge_from"):
        collection.merge_from(InMemoryVectorStore(Letters()))
    assert collection.store.keys() == {"0", "1", "2", "3"}, "whatever changes nothing is the wrapped store's"


def test_a_name_goes_on_where_a_store_is_wrapped_again(model: Any) -> None:
    inner = InMemoryVectorStore(Letters())
    KVBoostVectorStore(inner, model, name="letters").add_texts(TEXTS[:2], ids=["a", "b"])
    KVBoostVectorStore(inner, model, name="letters").delete(["a"])
    assert _known(model) == {TEXTS[1]}


@pytest.mark.parametrize("manager", ["memory", "sql"])
def test_under_index_with_a_record_manager(model: Any, store: KVBoostVectorStore, manager: str) -> None:
    if manager == "sql":
        records: Any = SQLRecordManager("test", db_url="sqlite:///:memory:")
    else:
        records = InMemoryRecordManager("test")
    records.create_schema()
    encoded: list[int] = []
    add_many = model.engine.index.add_many

    def counting(*args: Any, **kwargs: Any) -> Any:
        report = add_many(*args, **kwargs)
        encoded.append(report.warm.num_encoded)
        return report

    model.engine.index.add_many = counting

    def run(documents: list[Document]) -> dict[str, int]:
        return dict(index(documents, records, store, cleanup="full", source_id_key="source", key_encoder="blake2b"))

    plain = [Document(d.page_content, metadata=d.metadata) for d in DOCUMENTS]
    try:
        assert run(plain[:2])["num_added"] == 2
        assert run(plain[:2]) == {"num_added": 0, "num_updated": 0, "num_skipped": 2, "num_deleted": 0}
        assert run(plain[1:3]) == {"num_added": 1, "num_updated": 0, "num_skipped": 1, "num_deleted": 1}
    finally:
        model.engine.index.add_many = add_many
    assert encoded == [2, 1]
    assert _known(model) == set(TEXTS[1:3])


def _fail(*args: Any, **kwargs: Any) -> Any:
    raise OSError("no space left")


def test_a_store_in_trouble_does_not_stop_indexing(
    model: Any, store: KVBoostVectorStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(model.engine.fetcher, "encode_many", _fail)
    ids = store.add_documents(DOCUMENTS)
    assert len(store.get_by_ids(ids)) == 6
    assert "no space left" in caplog.text
    KVBoostWarmer(model).transform_documents(DOCUMENTS)
    model.strict = True
    with pytest.raises(OSError, match="no space left"):
        store.add_documents(DOCUMENTS)
    model.strict = False
    monkeypatch.undo()
    store.add_documents(DOCUMENTS)  # calling again does the rest
    assert _held(model) == set(TEXTS)


def test_what_could_not_be_evicted_is_said(
    model: Any, store: KVBoostVectorStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = store.add_documents(DOCUMENTS[:1])
    monkeypatch.setattr(model.engine.registry, "forget", _fail)
    with pytest.raises(OSError, match="no space left"):
        store.delete(ids)
    monkeypatch.undo()
    store.delete(ids)
    assert _known(model) == set()


def test_the_engine_chooses_neighbours_where_no_embeddings_are_given(fresh: Any) -> None:
    from kvboost_rag.config import EncodingConfig
    from langchain_kvboost import KVBoostLLM

    llm = KVBoostLLM(
        model=fresh.model, tokenizer=fresh.tokenizer, encoding=EncodingConfig(neighbours=2, embedder=Letters())
    )
    KVBoostWarmer(llm).transform_documents(DOCUMENTS[:3])
    assert _num_neighbours(llm) == [2, 2, 2]
    KVBoostWarmer(llm).transform_documents(DOCUMENTS[3:4])  # finds those of the earlier call
    assert _num_neighbours(llm) == [2, 2, 2, 2]
    KVBoostWarmer(llm, neighbours=0).transform_documents(DOCUMENTS[4:])
    assert _num_neighbours(llm) == [2, 2, 2, 2, 0, 0]
    with pytest.raises(ValueError, match="neighbours=-1"):
        KVBoostWarmer(llm, neighbours=-1)


def test_neighbours_follow_the_stores_embeddings_and_not_the_engines(model: Any, store: KVBoostVectorStore) -> None:
    asked: list[str] = []

    class Refusing(Letters):
        def embed_documents(self, texts: list[str]) -> list[list[float]]:
            asked.extend(texts)
            return super().embed_documents(texts)

    model.engine.similar._embedder = Refusing()
    store.add_documents(DOCUMENTS[:3])
    store.add_documents(DOCUMENTS[3:])
    assert _num_neighbours(model) == [2] * 6
    assert asked == []


def test_nothing_is_embedded_without_neighbours(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store = KVBoostVectorStore(InMemoryVectorStore(Letters()), model, neighbours=0)
    calls: list[int] = []
    embed = Letters.embed_documents
    monkeypatch.setattr(Letters, "embed_documents", lambda self, texts: calls.append(len(texts)) or embed(self, texts))
    store.add_documents(DOCUMENTS)
    assert calls == [6]  # the wrapped store's own
    assert _num_neighbours(model) == [0] * 6


def test_a_model_that_is_refused_is_indexed_without_kv(tiny_model: Any, caplog: pytest.LogCaptureFixture) -> None:
    from langchain_kvboost import KVBoostLLM

    loaded = tiny_model("gpt2", head_dim=None)
    llm = KVBoostLLM(model=loaded.model, tokenizer=loaded.tokenizer)
    store = KVBoostVectorStore(InMemoryVectorStore(Letters()), llm)
    ids = store.add_documents(DOCUMENTS)
    KVBoostWarmer(llm).transform_documents(DOCUMENTS)
    assert caplog.text.count("nothing was warmed") == 2
    store.delete(ids)


def test_searching_is_the_wrapped_stores(store: KVBoostVectorStore) -> None:
    store.add_documents(DOCUMENTS)
    inner = store.vectorstore
    assert store.similarity_search(TEXTS[3], k=2) == inner.similarity_search(TEXTS[3], k=2)
    assert store.similarity_search_with_score(TEXTS[3], k=2) == inner.similarity_search_with_score(TEXTS[3], k=2)
    assert store.max_marginal_relevance_search(TEXTS[3], k=2)
    retriever = store.as_retriever(search_type="mmr", search_kwargs={"k": 2})
    assert len(retriever.invoke(TEXTS[3])) == 2
    assert store.embeddings is inner.embeddings
    assert store.store is inner.store  # whatever else it has


def test_from_texts_and_namespaces(model: Any, fresh: Any) -> None:
    store = KVBoostVectorStore.from_texts(TEXTS[:2], Letters(), ids=["a", "b"], llm=model, namespace="namespace-a")
    assert model.engine.store.catalog.namespaces() == ("namespace-a",)
    assert _hits(model, TEXTS[:2]) == {}
    mine = model.generate([prompt(TEXTS[:2])], namespace="namespace-a").generations[0][0].generation_info
    assert mine["kvboost"]["hits"] == {"approximate": 2}
    store.delete(["a", "b"])
    assert _known(model) == set()


# The retriever and the handler.


@pytest.fixture
def retriever() -> Any:
    inner = InMemoryVectorStore(DeterministicFakeEmbedding(size=8))
    inner.add_documents(DOCUMENTS)
    return inner.as_retriever(search_kwargs={"k": 3})


def _is_announced(model: Any, texts: list[str]) -> bool:
    """Known, so that a prompt without hints finds them, and not encoded before anybody asks."""
    return _known(model) == set(texts) and not _held(model) and _hits(model, texts) == {"encoded": len(texts)}


def test_the_retriever_announces_what_it_returns(model: Any, retriever: Any) -> None:
    ours = KVBoostRetriever(retriever=retriever, llm=model)
    found = ours.invoke("which?")
    assert found == retriever.invoke("which?")
    assert asyncio.run(ours.ainvoke("which?")) == found
    assert _is_announced(model, [d.page_content for d in found])


def test_a_store_in_trouble_does_not_stop_retrieval(
    model: Any, retriever: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(model.engine.store.catalog, "add", _fail)
    ours = KVBoostRetriever(retriever=retriever, llm=model)
    assert asyncio.run(ours.ainvoke("which?")) == ours.invoke("which?") == retriever.invoke("which?")
    assert "no space left" in caplog.text
    model.strict = True
    with pytest.raises(OSError, match="no space left"):
        ours.invoke("which?")


def test_canonical_order(model: Any, retriever: Any) -> None:
    ours = KVBoostRetriever(retriever=retriever, llm=model, order="canonical", k=6)
    orders = [ours.invoke(query) for query in ("a", "b", "c")]
    assert orders[0] == orders[1] == orders[2]
    assert sorted(d.id for d in orders[0]) == sorted(d.id for d in DOCUMENTS)
    assert [r.id for r in retriever.invoke("a", k=6)] != [r.id for r in retriever.invoke("b", k=6)]


def test_k_of_a_retriever_that_knows_none(model: Any) -> None:
    from langchain_core.retrievers import BaseRetriever

    class All(BaseRetriever):
        def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
            return DOCUMENTS

    assert len(KVBoostRetriever(retriever=All(), llm=model, k=4).invoke("q")) == 4
    assert len(KVBoostRetriever(retriever=All(), llm=model).invoke("q", None, k=2)) == 2


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_handler_announces_without_a_change_to_the_chain(model: Any, retriever: Any, asynchronous: bool) -> None:
    config = {"callbacks": [KVBoostPrefetchHandler(model)]}
    found = asyncio.run(retriever.ainvoke("which?", config)) if asynchronous else retriever.invoke("which?", config)
    assert _is_announced(model, [d.page_content for d in found])


def test_something_else_in_the_place_of_the_model() -> None:
    with pytest.raises(TypeError, match="llm must be a ChatKVBoost"):
        KVBoostWarmer("gpt2").transform_documents(DOCUMENTS)
