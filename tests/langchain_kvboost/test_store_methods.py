"""Real vector stores behind the wrapper: every method that changes documents is covered or refused; who is who."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore

from langchain_kvboost import KVBoostVectorStore
from langchain_kvboost.changes import CHANGES

TEXTS = [f"Depot {i} keeps {i + 5} engines under one roof, and their drivers live next door." for i in range(4)]
EMBEDDING = DeterministicFakeEmbedding(size=8)

CLASSES = {
    "InMemoryVectorStore": "langchain_core.vectorstores",
    "FAISS": "langchain_community.vectorstores",
    "Chroma": "langchain_chroma",
    "QdrantVectorStore": "langchain_qdrant",
    "PGVector": "langchain_postgres",
    "PGVectorStore": "langchain_postgres",
}
COVERED = {
    "add_documents",
    "aadd_documents",
    "add_texts",
    "aadd_texts",
    "delete",
    "adelete",
    "delete_collection",
    "adelete_collection",
    "reset_collection",
    "update_document",
    "update_documents",
}
READING = (
    *("search", "asearch", "similarity", "asimilarity", "max_marginal", "amax_marginal", "hybrid_search"),
    *("get", "aget", "embed", "encode_image", "is_valid_index", "ais_valid_index", "connection_string"),
)
"""What names of methods begin with that change nothing."""
MAKING = (
    *("from_", "afrom_", "load", "load_local", "deserialize_from_bytes", "construct_instance", "fork"),
    *("dump", "save_local", "serialize_to_bytes", "as_retriever"),
)
"""What makes another store, or a copy on disk."""
INDEXES = ("apply_", "aapply_", "reindex", "areindex")


def class_named(name: str) -> Any:
    module = pytest.importorskip(CLASSES[name])
    return getattr(module, name)


@pytest.mark.parametrize("name", CLASSES)
def test_every_method_that_changes_documents_is_covered_or_refused(name: str) -> None:
    kind = class_named(name)
    methods = [m for m in dir(kind) if not m.startswith("_") and callable(getattr(kind, m))]
    wrapper = KVBoostVectorStore.__new__(KVBoostVectorStore)
    wrapper.vectorstore = kind.__new__(kind)
    for method in methods:
        if method in COVERED:
            assert method in vars(KVBoostVectorStore), f"{method} is LangChain's own, not the wrapper's"
        elif CHANGES.match(method):
            with pytest.raises(AttributeError, match=rf"\.vectorstore\.{method}\("):
                getattr(wrapper, method)
        else:
            assert method.startswith((*READING, *MAKING, *INDEXES)), f"what does {name}.{method} do to documents?"


def in_memory(folder: Path) -> VectorStore:
    return InMemoryVectorStore(EMBEDDING)


def faiss(folder: Path) -> VectorStore:
    pytest.importorskip("faiss")
    kind = class_named("FAISS")
    empty = kind.from_texts(["x"], EMBEDDING, ids=["x"])
    empty.delete(["x"])
    return empty


def chroma(folder: Path) -> VectorStore:
    return class_named("Chroma")("shelf", EMBEDDING, persist_directory=str(folder / "chroma"))


def qdrant(folder: Path) -> VectorStore:
    kind = class_named("QdrantVectorStore")
    client = pytest.importorskip("qdrant_client")
    connection = client.QdrantClient(path=str(folder / "qdrant"))
    if not connection.collection_exists("shelf"):
        size = client.models.VectorParams(size=8, distance=client.models.Distance.COSINE)
        connection.create_collection("shelf", vectors_config=size)
    return kind(connection, "shelf", EMBEDDING)


def again(store: VectorStore, folder: Path) -> VectorStore:
    """The same store after dumping or closing, and loading or opening."""
    name = type(store).__name__
    if name == "InMemoryVectorStore":
        store.dump(str(folder / "dump"))
        return InMemoryVectorStore.load(str(folder / "dump"), EMBEDDING)
    if name == "FAISS":
        store.save_local(str(folder / "faiss"))
        return type(store).load_local(str(folder / "faiss"), EMBEDDING, allow_dangerous_deserialization=True)
    if name == "QdrantVectorStore":
        store.client.close()
        return qdrant(folder)
    return chroma(folder)


KINDS = [in_memory, faiss, chroma, qdrant]
Make = Callable[[Path], VectorStore]


@pytest.fixture
def model(chat: Any) -> Any:
    return chat(neighbours=0)


def known(model: Any) -> set[str]:
    catalog = model.engine.store.catalog
    return {record.text for record in catalog.get_many(catalog.hashes()).values()}


def documents() -> list[Document]:
    return [Document(text, id=f"00000000-0000-0000-0000-00000000000{i}") for i, text in enumerate(TEXTS)]


@pytest.mark.parametrize("make", KINDS)
def test_a_store_that_is_opened_again_goes_on_with_its_documents(model: Any, make: Make, tmp_path: Path) -> None:
    inner = make(tmp_path)
    ids = KVBoostVectorStore(inner, model).add_documents(documents())
    assert known(model) == set(TEXTS)
    opened = KVBoostVectorStore(again(inner, tmp_path), model)
    del inner
    opened.delete(ids[:2])
    assert known(model) == set(TEXTS[2:])
    opened.delete(ids[2:])
    assert known(model) == set()


@pytest.mark.parametrize("make", KINDS)
def test_two_stores_of_one_kind_and_name_are_two(model: Any, make: Make, tmp_path: Path) -> None:
    """With the same ids and texts, as the indexing API makes them."""
    folders = [tmp_path / "a", tmp_path / "b"]
    stores = []
    for folder in folders:
        folder.mkdir()
        stores.append(KVBoostVectorStore(make(folder), model))
    ids = [store.add_documents(documents()) for store in stores]
    assert stores[0].name != stores[1].name
    stores[0].delete(ids[0])
    assert known(model) == set(TEXTS)
    stores[1].delete(ids[1][1:])
    assert known(model) == {TEXTS[0]}


def test_chroma_filters_updates_and_collections(model: Any, tmp_path: Path) -> None:
    store = KVBoostVectorStore(chroma(tmp_path), model)
    store.add_documents([Document(t, id=str(i), metadata={"n": i}) for i, t in enumerate(TEXTS[:3])])
    store.delete(where={"n": 0})
    assert known(model) == set(TEXTS[1:3])
    store.update_document("1", Document(TEXTS[3], metadata={"n": 9}))
    assert known(model) == set(TEXTS[2:4])
    store.reset_collection()
    assert known(model) == set()
    ids = store.add_documents(documents())
    KVBoostVectorStore(chroma(tmp_path), model).delete(ids[:1])
    assert known(model) == set(TEXTS[1:])
    store.delete_collection()
    assert known(model) == set()


def test_qdrant_filters(model: Any, tmp_path: Path) -> None:
    inner = qdrant(tmp_path)
    store = KVBoostVectorStore(inner, model)
    ids = store.add_documents(documents())
    store.add_documents([Document(TEXTS[3], id=ids[0])])
    assert known(model) == set(TEXTS[1:])
    store.delete(ids)
    assert known(model) == set()


def test_who_it_was_cannot_be_told(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Two stores with the same ids, both closed: one that is opened is neither of them for certain."""
    for _ in range(2):
        KVBoostVectorStore(InMemoryVectorStore(EMBEDDING), model).add_documents(documents())
    third = InMemoryVectorStore(EMBEDDING)
    third.add_documents(documents())
    opened = KVBoostVectorStore(third, model)
    opened.delete([documents()[0].id])
    assert "give name=" in caplog.text
    assert known(model) == set(TEXTS)
