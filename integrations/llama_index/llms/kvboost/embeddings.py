"""KVBoostEmbeddings: the engine's own embedding model as LlamaIndex'."""

from __future__ import annotations

import asyncio

from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.llms.kvboost.base import KVBoostLLM

from kvboost_rag.adapters.indexing_jobs import whole_unicode


class KVBoostEmbeddings(BaseEmbedding):
    """One model finds documents and chooses what their chunks are encoded after (`EncodingConfig.embedder`).

    Without one of your own that is all-MiniLM-L6-v2, offline where the package that ships it is installed.

    Args:
        llm: the model that will answer.
    """

    llm: KVBoostLLM

    @classmethod
    def class_name(cls) -> str:
        """Name used in serialisation."""
        return "KVBoost_Embeddings"

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return [[float(x) for x in row] for row in self.llm.engine.similar.embed(whole_unicode(texts))]

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._get_text_embeddings([text])[0]

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return await asyncio.to_thread(self._get_query_embedding, query)
