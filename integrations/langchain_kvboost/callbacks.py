"""Prefetch without a change to the chain: a callback handler that listens to retrievers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.prompts import BasePromptTemplate

from langchain_kvboost.warming import announce, engine_of, namespace_of, segment_text

logger = logging.getLogger(__name__)


class KVBoostPrefetchHandler(BaseCallbackHandler):
    """Registers what any retriever of a run returns, and has its stored KV prefetched.

    `chain.invoke(…, config={"callbacks": [KVBoostPrefetchHandler(llm)]})`

    Args:
        llm: the `ChatKVBoost` or `KVBoostLLM` that will answer (or its engine).
        document_prompt: as for `KVBoostWarmer`.
        namespace: whose chunks; default: the model's.
    """

    def __init__(
        self, llm: Any, *, document_prompt: BasePromptTemplate[str] | None = None, namespace: str | None = None
    ) -> None:
        self.llm = llm
        self.document_prompt = document_prompt
        self.namespace = namespace_of(llm, namespace)

    def on_retriever_end(
        self, documents: Sequence[Document], *, run_id: UUID, parent_run_id: UUID | None = None, **kwargs: Any
    ) -> None:
        """Called by LangChain with what a retriever returned; a failure here never breaks the run."""
        texts = [segment_text(document, self.document_prompt) for document in documents]
        announce(engine_of(self.llm), texts, self.namespace)
