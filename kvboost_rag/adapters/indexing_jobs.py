"""What indexing through a framework has in common: texts that are no chunks, and trouble that must not end the job."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvboost_rag.config import lone_surrogate
from kvboost_rag.prompt.segments import canonical_text

if TYPE_CHECKING:
    from kvboost_rag.chunks.registry import ChunkRegistry
    from kvboost_rag.engine import KVBoost

logger = logging.getLogger(__name__)


def can_be_chunk(registry: ChunkRegistry, text: str) -> bool:
    """Whether a text is whole Unicode and has tokens, not more of them than the model's context has room for."""
    if lone_surrogate(text) is not None:
        return False
    limit = registry.max_chunk_tokens
    num_tokens = len(registry.tokens.document_ids(canonical_text(text)))
    return num_tokens > 0 and (limit is None or num_tokens <= limit)


def whole_unicode(texts: Sequence[str]) -> list[str]:
    """The texts with a question mark where half a character stands, which no embedding model reads."""
    return [text if lone_surrogate(text) is None else text.encode("utf-8", "replace").decode() for text in texts]


@contextmanager
def tolerated(engine: KVBoost, strict: bool | None = None) -> Iterator[None]:
    """Log what fails inside: what is missing is encoded when it stands in a prompt. Strict jobs and engines raise."""
    try:
        yield
    except Exception as error:
        if strict or engine.config.strict:
            raise
        logger.warning("the KV of documents could not be brought up to date: %s", error, exc_info=error)
