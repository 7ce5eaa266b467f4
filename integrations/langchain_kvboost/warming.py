"""What warmer, vector store, retriever and handler do to an engine."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from langchain_core.documents import Document
from langchain_core.prompts import BasePromptTemplate, format_document

from kvboost_rag.registry import EngineSpec
from langchain_kvboost.parameters import KVBoostParameters

if TYPE_CHECKING:
    from kvboost_rag.engine import KVBoost

logger = logging.getLogger(__name__)


def engine_of(model: Any) -> KVBoost:
    """The engine behind a model class of ours, an `EngineSpec`, or an engine itself; loads the weights if need be.

    Raises:
        TypeError: it is none of these.
    """
    if isinstance(model, KVBoostParameters):
        return model.engine
    if isinstance(model, EngineSpec):
        return model.get()
    if hasattr(model, "warm") and hasattr(model, "library"):
        return model  # type: ignore[no-any-return]
    raise TypeError(f"llm must be a ChatKVBoost, a KVBoostLLM or a KVBoost engine, got {type(model).__name__}")


def namespace_of(model: Any, namespace: str | None) -> str | None:
    """The tenant: as given, else the model's own; None is the engine's default."""
    if namespace is None and isinstance(model, KVBoostParameters):
        return model.namespace or None
    return namespace


def neighbours_of(model: Any, neighbours: int | None) -> int:
    """How many neighbours a chunk gets: as given, else what the model says."""
    if neighbours is not None:
        return neighbours
    return model.neighbours if isinstance(model, KVBoostParameters) else 4


def segment_text(document: Document, prompt: BasePromptTemplate[str] | None) -> str:
    """The text of a document as it will stand in prompts."""
    return document.page_content if prompt is None else format_document(document, prompt)


def warm_all(
    engine: KVBoost, texts: Sequence[str], neighbours: Sequence[Sequence[str]] | None, namespace: str | None
) -> list[str | None]:
    """Encode and store the KV of texts; returns their content hashes, None for those that cannot be chunks.

    Neither an unusable text nor a store in trouble is a reason to fail an indexing job: it is logged, and the text
    is prefilled or encoded when it stands in a prompt.
    """
    usable = [i for i, text in enumerate(texts) if _can_be_chunk(engine, text)]
    if len(usable) < len(texts):
        logger.warning("%d of %d documents are empty or too long to be chunks", len(texts) - len(usable), len(texts))
    hashes: list[str | None] = [None] * len(texts)
    chosen = None if neighbours is None else [list(neighbours[i]) for i in usable]
    try:
        report = engine.warm([texts[i] for i in usable], neighbours=chosen, namespace=namespace)
    except Exception as error:
        if engine.config.strict:
            raise
        logger.warning(
            "documents could not be warmed, they will be encoded when asked about: %s", error, exc_info=error
        )
        return hashes
    for i, content_hash in zip(usable, report.content_hashes, strict=False):  # none where the model is refused
        hashes[i] = content_hash
    return hashes


def announce(engine: KVBoost, texts: Sequence[str], namespace: str | None) -> None:
    """Make texts known that will stand in a prompt soon, and have their stored KV read in the background."""
    engine.register(texts, namespace=namespace)
    engine.prefetch(texts, namespace=namespace)


def _can_be_chunk(engine: KVBoost, text: str) -> bool:
    try:
        length = len(engine.library.describe(text, "").token_ids)
    except ValueError:
        return False
    limit = engine.library.max_chunk_tokens
    return limit is None or length <= limit
