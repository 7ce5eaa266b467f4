"""KVBoostWarmer: computes documents' KV after splitting, and hands the documents on."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from langchain_core.documents import BaseDocumentTransformer, Document
from langchain_core.prompts import BasePromptTemplate

from kvboost_rag.embeddings import load_embedder
from kvboost_rag.neighbours import NeighbourRules, choose_neighbours
from kvboost_rag.vector_index import VectorIndex
from langchain_kvboost.warming import engine_of, namespace_of, neighbours_of, segment_text, warm_all


class KVBoostWarmer(BaseDocumentTransformer):
    """Warms documents that pass through it. They come out as they went in, same objects, same order.

    Args:
        llm: the `ChatKVBoost` or `KVBoostLLM` that will answer (or its engine).
        embeddings: a LangChain `Embeddings` (or whatever `embeddings.load_embedder` takes). With it each document is
            encoded behind the most similar others of the same call, which makes answers follow full prefill much
            closer; without it documents are encoded alone.
        neighbours: how many; default: the model's.
        document_prompt: if the chain writes documents through a prompt of its own (a header with the source), that
            prompt, to warm header and text as one chunk. Default: the text alone; a header is then computed afresh.
        namespace: tenant; default: the model's.
    """

    def __init__(
        self,
        llm: Any,
        *,
        embeddings: Any = None,
        neighbours: int | None = None,
        document_prompt: BasePromptTemplate[str] | None = None,
        namespace: str | None = None,
    ) -> None:
        self.llm = llm
        self.embeddings = embeddings
        self.neighbours = neighbours_of(llm, neighbours)
        self.document_prompt = document_prompt
        self.namespace = namespace_of(llm, namespace)

    def transform_documents(self, documents: Sequence[Document], **kwargs: Any) -> Sequence[Document]:
        """Encode and store what is not stored yet; returns `documents`."""
        texts = [segment_text(document, self.document_prompt) for document in documents]
        if texts:
            warm_all(engine_of(self.llm), texts, self._neighbour_texts(texts), self.namespace)
        return documents

    async def atransform_documents(self, documents: Sequence[Document], **kwargs: Any) -> Sequence[Document]:
        """As `transform_documents`, in a thread."""
        return await asyncio.to_thread(self.transform_documents, documents, **kwargs)

    def _neighbour_texts(self, texts: Sequence[str]) -> list[list[str]] | None:
        if self.embeddings is None or self.neighbours == 0 or len(texts) < 2:
            return None
        distinct = list(dict.fromkeys(texts))
        index = VectorIndex()
        index.add(distinct, load_embedder(self.embeddings)(distinct))
        tokens = engine_of(self.llm).tokens
        lengths = {text: tokens.count(text) for text in distinct}
        chosen = choose_neighbours(index, distinct, lengths, NeighbourRules(self.neighbours))
        return [list(chosen[text]) for text in texts]
