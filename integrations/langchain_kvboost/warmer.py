"""KVBoostWarmer: computes documents' KV after splitting, and hands the documents on."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from langchain_core.documents import BaseDocumentTransformer, Document
from langchain_core.prompts import BasePromptTemplate

from langchain_kvboost.warming import DocumentWarming


class KVBoostWarmer(BaseDocumentTransformer):
    """Warms documents that pass through it. They come out as they went in, same objects, same order.

    Each document is encoded after the most similar others that were warmed before or come in the same call, which
    makes answers follow full prefill much closer.

    Args:
        llm: the `ChatKVBoost` or `KVBoostLLM` that will answer (or its engine).
        embeddings: a LangChain `Embeddings` (or whatever `embeddings.load_embedder` takes) to find similar documents
            by; default: the engine's own (`EncodingConfig.embedder`).
        neighbours: how many others; default: the model's. 0: documents are encoded alone and nothing is embedded.
        document_prompt: if the chain writes documents through a prompt of its own (a header with the source), that
            prompt, to warm header and text as one chunk. Default: the text alone; a header is then computed afresh.
        namespace: whose chunks; default: the model's.
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
        self._warming = DocumentWarming(llm, embeddings, neighbours, document_prompt, namespace)

    def transform_documents(self, documents: Sequence[Document], **kwargs: Any) -> Sequence[Document]:
        """Encode and store what is not stored yet; returns `documents`."""
        if documents:
            self._warming.warm(documents)
        return documents

    async def atransform_documents(self, documents: Sequence[Document], **kwargs: Any) -> Sequence[Document]:
        """As `transform_documents`, in a thread."""
        return await asyncio.to_thread(self.transform_documents, documents, **kwargs)
