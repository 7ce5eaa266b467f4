"""KVBoostRetriever: any retriever, with what it returns made known to the model before the prompt arrives."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.prompts import BasePromptTemplate
from langchain_core.retrievers import BaseRetriever
from pydantic import ConfigDict

from kvboost_rag.adapters.indexing_jobs import tolerated
from langchain_kvboost.warming import announce, engine_of, namespace_of, segment_text


class KVBoostRetriever(BaseRetriever):
    """Wraps a retriever. Documents come back as they are; they are registered, and their stored KV is prefetched.

    With `order="canonical"` they come back in an order that depends on their texts alone: the same documents make the
    same prompt whatever their ranks were, which `reuse="exact"` can then take whole. The order of relevance is lost.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    retriever: BaseRetriever
    llm: Any
    """The `ChatKVBoost` or `KVBoostLLM` that will answer, or its engine."""
    k: int | None = None
    """At most so many documents; handed on to retrievers that take `k`."""
    order: Literal["relevance", "canonical"] = "relevance"
    document_prompt: BasePromptTemplate[str] | None = None
    """As for `KVBoostWarmer`."""
    namespace: str | None = None
    """Whose documents; default: the model's."""

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, **kwargs: Any
    ) -> list[Document]:
        limit, given = self._limit(kwargs)
        found = self.retriever.invoke(query, {"callbacks": run_manager.get_child()}, **given)
        return self._prepared(found[:limit])

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, **kwargs: Any
    ) -> list[Document]:
        limit, given = self._limit(kwargs)
        found = await self.retriever.ainvoke(query, {"callbacks": run_manager.get_child()}, **given)
        return await asyncio.to_thread(self._prepared, found[:limit])

    def _limit(self, kwargs: dict[str, Any]) -> tuple[int | None, dict[str, Any]]:
        """How many documents are wanted, and the keywords of the wrapped retriever, which may not know `k`."""
        given = {**({} if self.k is None else {"k": self.k}), **kwargs}
        limit = given.get("k")
        if not self.retriever._expects_other_args:
            given.pop("k", None)
        return limit, given

    def _prepared(self, documents: list[Document]) -> list[Document]:
        engine = engine_of(self.llm)
        with tolerated(engine, getattr(self.llm, "strict", False)):
            texts = [segment_text(document, self.document_prompt) for document in documents]
            announce(engine, texts, namespace_of(self.llm, self.namespace))
        if self.order == "canonical":
            return sorted(documents, key=lambda document: document.page_content)
        return documents
