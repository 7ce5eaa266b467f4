"""The engine's embedder as LlamaIndex': the same vectors for retrieval as for the choice of chunks."""

from __future__ import annotations

from typing import Any

import pytest
from llama_index.core import Document, VectorStoreIndex
from llama_index.core.node_parser import SentenceSplitter
from llama_index.llms.kvboost import KVBoostEmbeddings, KVWarm
from llama_index_kvboost.helpers import MakeLLM, WordEmbedding

from kvboost_rag import KVBoost
from kvboost_rag.config import EncodingConfig


async def test_one_model_embeds_for_both(tiny_loaded: Any, make_llm: MakeLLM) -> None:
    words = WordEmbedding()
    with KVBoost(tiny_loaded, encoding=EncodingConfig(neighbours=1, embedder=words)) as engine:
        llm = make_llm(engine=engine)
        embedding = KVBoostEmbeddings(llm=llm)
        assert embedding.get_query_embedding("a b") == pytest.approx(words.get_query_embedding("a b"), abs=1e-6)
        assert await embedding.aget_query_embedding("a b") == embedding.get_query_embedding("a b")
        texts = ["apples pears plums", "screws nails bolts"]
        documents = [Document(text=text, id_=text) for text in texts]
        split = SentenceSplitter(chunk_size=64, chunk_overlap=0, tokenizer=llm.tokenize)
        index = VectorStoreIndex.from_documents(
            documents, transformations=[split, embedding, KVWarm(llm=llm)], embed_model=embedding
        )
        assert index.as_retriever(similarity_top_k=1).retrieve("nails and bolts")[0].text == texts[1]
        assert len(engine.store) == 2
