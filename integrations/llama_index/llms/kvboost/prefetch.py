"""Retrieved nodes announced to the model before the prompt is built: three hooks over one function."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Any

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.bridge.pydantic import Field
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.instrumentation.events.retrieval import RetrievalEndEvent
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import NodeWithScore, QueryBundle, QueryType
from llama_index.llms.kvboost.base import KVBoostLLM
from llama_index.llms.kvboost.nodes import PROMPT_MODES, node_texts

logger = logging.getLogger(__name__)


def prefetch(llm: KVBoostLLM, nodes: Iterable[Any], register: bool = True) -> int:
    """Start reading the stored KV of nodes into memory, in the background; returns how many texts are known.

    Args:
        nodes: nodes, retrieved ones or not, or texts.
        register: make nodes known that are not: their KV is then computed and kept when they first stand in a prompt.
    """
    engine, texts = llm.engine, node_texts(nodes, PROMPT_MODES)
    if register:
        engine.register(texts, namespace=llm.namespace)
    return int(engine.prefetch(texts, namespace=llm.namespace))


class KVPrefetchPostprocessor(BaseNodePostprocessor):
    """Starts reading the KV of the final nodes while the prompt is built; stands last among the postprocessors.

    Nodes come back as they were. A fault is logged: answering works without it.

    Args:
        llm: the model that will answer.
        register: also make nodes known that were never warmed.
    """

    llm: KVBoostLLM
    register_new: bool = Field(default=True, description="Make nodes known that were never warmed.")

    @classmethod
    def class_name(cls) -> str:
        """Name used in serialisation."""
        return "KVBoost_PrefetchPostprocessor"

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        _announce(self.llm, nodes, self.register_new)
        return nodes

    async def _apostprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        return await asyncio.to_thread(self._postprocess_nodes, nodes, query_bundle)


class KVPrefetchRetriever(BaseRetriever):
    """Any retriever, with what it finds announced to the model.

    Args:
        retriever: finds the nodes.
        llm: the model that will answer.
        register_new: also make nodes known that were never warmed.
    """

    def __init__(self, retriever: BaseRetriever, llm: KVBoostLLM, register_new: bool = True, **kwargs: Any) -> None:
        self._retriever = retriever
        self._llm = llm
        self._register_new = register_new
        super().__init__(callback_manager=kwargs.pop("callback_manager", retriever.callback_manager), **kwargs)

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        nodes = self._retriever.retrieve(query_bundle)
        _announce(self._llm, nodes, self._register_new)
        return nodes

    async def _aretrieve(self, query_bundle: QueryType) -> list[NodeWithScore]:
        nodes = await self._retriever.aretrieve(query_bundle)
        await asyncio.to_thread(_announce, self._llm, nodes, self._register_new)
        return nodes


class KVPrefetchEventHandler(BaseEventHandler):
    """Announces what any retriever of the process finds, without a change to the application:

    `get_dispatcher().add_event_handler(KVPrefetchEventHandler(llm=llm))`
    """

    llm: KVBoostLLM
    register_new: bool = Field(default=True, description="Make nodes known that were never warmed.")

    @classmethod
    def class_name(cls) -> str:
        """Name used in serialisation."""
        return "KVBoost_PrefetchEventHandler"

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        """Look at retrieval events, pass over all others."""
        if isinstance(event, RetrievalEndEvent):
            _announce(self.llm, event.nodes, self.register_new)


def _announce(llm: KVBoostLLM, nodes: Iterable[Any], register: bool) -> None:
    try:
        prefetch(llm, nodes, register)
    except Exception:  # retrieving must not fail because of a hint
        logger.warning("retrieved nodes were not announced to the model", exc_info=True)
