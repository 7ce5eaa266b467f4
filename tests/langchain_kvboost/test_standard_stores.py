"""langchain-tests for retrievers and vector stores on the real bundled model, over the in-memory store and Chroma."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore
from langchain_tests.integration_tests import RetrieversIntegrationTests, VectorStoreIntegrationTests

from langchain_kvboost import KVBoostLLM, KVBoostRetriever, KVBoostVectorStore

pytestmark = pytest.mark.model


def _llm(loaded: Any) -> KVBoostLLM:
    return KVBoostLLM(model=loaded.model, tokenizer=loaded.tokenizer)


class _OnRealModel:
    llm: ClassVar[KVBoostLLM]

    @pytest.fixture(autouse=True)
    def _model(self, smollm2: Any) -> None:
        type(self).llm = _llm(smollm2)


class TestInMemoryStore(_OnRealModel, VectorStoreIntegrationTests):
    @pytest.fixture
    def vectorstore(self) -> VectorStore:
        inner = InMemoryVectorStore(self.get_embeddings())
        return KVBoostVectorStore(inner, self.llm)


class TestChromaStore(_OnRealModel, VectorStoreIntegrationTests):
    @pytest.fixture
    def vectorstore(self) -> Iterator[VectorStore]:
        chroma = pytest.importorskip("langchain_chroma")
        inner = chroma.Chroma(f"test-{uuid.uuid4().hex}", self.get_embeddings())
        yield KVBoostVectorStore(inner, self.llm)
        inner.delete_collection()


class TestRetriever(_OnRealModel, RetrieversIntegrationTests):
    retriever_constructor = KVBoostRetriever
    retriever_query_example = "which store is full?"

    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        inner = InMemoryVectorStore(DeterministicFakeEmbedding(size=16))
        inner.add_texts([f"Text number {n} about stores." for n in range(6)])
        return {"retriever": inner.as_retriever(), "llm": self.llm}
