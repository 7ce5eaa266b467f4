"""What a source is given, checked and without empty texts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import compress
from typing import Any

from kvboost_rag.chunks.lookup import document_texts
from kvboost_rag.config import lone_surrogate
from kvboost_rag.indexing.embeddings import UNNAMED, ModelVectors
from kvboost_rag.indexing.source_texts import SourceTexts
from kvboost_rag.prompt.segments import canonical_text


@dataclass(frozen=True)
class ReadySource:
    """`SourceTexts` as texts, no empty one among them."""

    texts: list[str]
    embeddings: list[Any] | None
    space: str
    later: list[str]

    @property
    def all_texts(self) -> list[str]:
        return [*self.texts, *self.later]


def ready_sources(sources: Mapping[str, SourceTexts]) -> dict[str, ReadySource]:
    """Sources, checked.

    Raises:
        TypeError, ValueError: a source id or a text that cannot be used, another number of embeddings than texts, or
            embeddings for some sources only.
    """
    ready = {}
    for source_id, given in sources.items():
        if not isinstance(source_id, str) or not source_id:
            raise ValueError(f"source_id={source_id!r}: expected a text that is not empty")
        if lone_surrogate(source_id) is not None:
            raise ValueError(f"source_id={source_id!r}: expected valid Unicode")
        ready[source_id] = _ready(given)
    with_texts = [source for source in ready.values() if source.texts]
    if len({source.embeddings is None for source in with_texts}) > 1:
        raise ValueError("embeddings are given for some of the sources only")
    return ready


def joined_embeddings(sources: Iterable[ReadySource]) -> ModelVectors | None:
    """The vectors of all sources' `texts`, in order, or None if there are none.

    Raises:
        ValueError: they are of several models.
    """
    given = [source for source in sources if source.embeddings]
    spaces = {source.space for source in given}
    if len(spaces) > 1:
        raise ValueError(f"the sources' embeddings are of {len(spaces)} models: {', '.join(sorted(spaces))}")
    rows = [row for source in given for row in source.embeddings or ()]
    return ModelVectors(rows, spaces.pop()) if rows else None


def _ready(given: SourceTexts) -> ReadySource:
    texts, space, rows = document_texts(given.texts), UNNAMED, None
    used = [bool(canonical_text(text)) for text in texts]
    if given.embeddings is not None:
        vectors = ModelVectors.of(given.embeddings)
        if len(vectors.rows) != len(texts):
            raise ValueError(f"{len(vectors.rows)} embeddings are given for {len(texts)} texts")
        rows, space = list(compress(vectors.rows, used)), vectors.space
    later = [text for text in document_texts(given.later) if canonical_text(text)]
    return ReadySource(list(compress(texts, used)), rows, space, later)
