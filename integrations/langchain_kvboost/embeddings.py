"""KVBoostEmbeddings: the engine's own embedding model as LangChain's."""

from __future__ import annotations

from typing import Any

from langchain_core.embeddings import Embeddings

from kvboost_rag.adapters.indexing_jobs import whole_unicode
from langchain_kvboost.warming import engine_of


class KVBoostEmbeddings(Embeddings):
    """One model finds documents and chooses what their chunks are encoded after (`EncodingConfig.embedder`).

    Without one of your own that is all-MiniLM-L6-v2, offline where the package that ships it is installed.

    Args:
        llm: the `ChatKVBoost` or `KVBoostLLM` that will answer (or its engine).
    """

    def __init__(self, llm: Any) -> None:
        self.llm = llm

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Unit vectors, one a text. Raises `indexing.similar_chunks.NoEmbedderError`: no model can be loaded."""
        return [[float(x) for x in row] for row in engine_of(self.llm).similar.embed(whole_unicode(texts))]

    def embed_query(self, text: str) -> list[float]:
        """As `embed_documents`, of one text."""
        return self.embed_documents([text])[0]
