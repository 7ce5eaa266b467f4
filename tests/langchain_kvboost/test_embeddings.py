"""The engine's embedder as LangChain's: the same vectors for retrieval as for the choice of chunks."""

from __future__ import annotations

from typing import Any

import numpy as np
from langchain_core.vectorstores import InMemoryVectorStore

from kvboost_rag import KVBoost
from kvboost_rag.config import EncodingConfig
from langchain_kvboost import KVBoostEmbeddings, KVBoostLLM, KVBoostVectorStore


def letters(texts: list[str]) -> Any:
    return np.array([[text.count(letter) for letter in "abcdefghijklmnopqrstuvwxyz"] for text in texts], np.float32)


def test_one_model_embeds_for_both(tiny_model: Any) -> None:
    texts = ["aaa bbb aaa", "xxx yyy xxx"]
    with KVBoost(tiny_model("llama"), encoding=EncodingConfig(neighbours=1, embedder=letters)) as engine:
        llm = KVBoostLLM(model=engine)
        embeddings = KVBoostEmbeddings(llm)
        assert np.allclose(np.linalg.norm(embeddings.embed_documents(texts), axis=1), 1)
        assert embeddings.embed_query(texts[0]) == embeddings.embed_documents(texts)[0]
        store = KVBoostVectorStore(InMemoryVectorStore(embeddings), llm)
        store.add_texts(texts)
        assert store.similarity_search("xy", k=1)[0].page_content == texts[1]
        assert len(engine.store) == 2
