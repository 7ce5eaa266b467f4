"""An embedding without a model, documents, and an index whose nodes were warmed."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import llama_index.core
import numpy as np
from corpus_texts import document
from llama_index.core import Document, Settings, VectorStoreIndex
from llama_index.core.embeddings import BaseEmbedding
from llama_index.core.llms import ChatMessage
from llama_index.core.node_parser import SentenceSplitter
from llama_index.llms.kvboost import KVBoostLLM, KVWarm

MakeLLM = Callable[..., KVBoostLLM]

USER = [ChatMessage(role="user", content="Which store is full?")]
TEXTS = [document(n, 2 + n % 2) for n in range(4)]


class WordEmbedding(BaseEmbedding):
    """Hashed words: no model, the same vector for the same text, near for texts that share words."""

    def _embed(self, text: str) -> list[float]:
        vector = np.zeros(256)
        for word in text.lower().split():
            vector[zlib.crc32(word.encode()) % 256] += 1
        return (vector / max(1e-9, float(np.linalg.norm(vector)))).tolist()

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._embed(query)

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._embed(text)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._embed(query)


def documents(metadata: bool = False) -> list[Document]:
    """One short document per text, with stable ids."""
    return [
        Document(text=text, id_=f"doc-{i}", metadata={"file_name": f"file {i}.txt"} if metadata else {})
        for i, text in enumerate(TEXTS)
    ]


def build_index(llm: KVBoostLLM, metadata: bool = False) -> VectorStoreIndex:
    """An index whose nodes were warmed."""
    splitter = SentenceSplitter(chunk_size=512, chunk_overlap=0)
    return VectorStoreIndex.from_documents(documents(metadata), transformations=[splitter, KVWarm(llm=llm)])


@contextmanager
def own_settings() -> Iterator[Any]:
    """LlamaIndex' global settings, empty inside and as before afterwards."""
    names = [name for name in vars(Settings) if name.startswith("_")]
    before = {name: getattr(Settings, name) for name in names}
    tokenizer_before = llama_index.core.global_tokenizer
    for name in names:
        setattr(Settings, name, None)
    try:
        yield Settings
    finally:
        for name, value in before.items():
            setattr(Settings, name, value)
        llama_index.core.global_tokenizer = tokenizer_before
