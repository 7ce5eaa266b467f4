"""Chunks that end where the subject changes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvboost_rag.indexing.chunking.base import Chunker, CountTokens, TextChunk, check_sizes, check_text
from kvboost_rag.indexing.chunking.markdown import prose_units
from kvboost_rag.indexing.chunking.units import Unit, fitting_units, pack
from kvboost_rag.indexing.embeddings import Embed, load_embedder

_NEVER = 2.0
"""Cohesion above any cosine: a heading is not parted from what it heads while there is another choice."""


@dataclass(frozen=True)
class SemanticChunker(Chunker):
    """Cuts between sentences whose surroundings differ in meaning.

    Every sentence (or list item, table row, code block, JSON value: a unit) is embedded once. A gap's cohesion is the
    cosine between the mean of the `window` units before it and the mean of those after it. A chunk ends where cohesion
    falls below a percentile of the document's own gaps, or at the weakest gap before it would become too large.

    A unit is cut only if it alone exceeds `max_tokens`: JSON between its members, code at blank lines, then lines,
    lists and tables between items and rows, sentences between words.

    Follows percentile splitting as known from Kamradt's "5 levels of text splitting"; differs in comparing windows
    instead of single sentences, in bounds on the size, and in never cutting inside a unit.

    Args:
        count_tokens: counts with the tokenizer of the model that the chunks are for.
        embedder: whatever `load_embedder` takes; default all-MiniLM-L6-v2.
        min_tokens, max_tokens: size of a chunk; a text's last chunk may be smaller.
        percentile: share of gaps (in percent) that count as changes of subject.
        window: units on each side of a gap that are compared.
        language: ISO code, for sentence ends.
    """

    count_tokens: CountTokens
    embedder: Any = None
    min_tokens: int = 64
    max_tokens: int = 512
    percentile: float = 25.0
    window: int = 3
    language: str = "en"
    _embed: list[Embed] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_sizes(self.min_tokens, self.max_tokens)
        if not 0 <= self.percentile <= 100:
            raise ValueError(f"percentile={self.percentile!r}: expected a number from 0 to 100")
        if self.window < 1:
            raise ValueError(f"window={self.window!r}: expected at least 1 unit")

    def split(self, text: str) -> list[TextChunk]:
        check_text(text)
        units = prose_units(text, self.language)
        units = fitting_units(text, units, self.max_tokens, self.count_tokens)
        cohesion = self.cohesion(text, units)
        threshold = float(np.percentile(cohesion, self.percentile)) if len(cohesion) else 0.0
        sizes = (self.min_tokens, self.max_tokens)
        return pack(text, units, cohesion.tolist(), threshold, sizes, self.count_tokens)

    def cohesion(self, text: str, units: list[Unit]) -> NDArray[np.float64]:
        """Cosine between the windows before and after each gap, `[num_units - 1]`; high after a heading."""
        if len(units) < 2:
            return np.zeros(0)
        vectors = self._embedder()([text[unit.start : unit.end].strip() for unit in units])
        sums = np.concatenate([np.zeros((1, vectors.shape[1])), np.cumsum(vectors, axis=0, dtype=np.float64)])
        gaps = np.arange(1, len(units))
        before = sums[gaps] - sums[np.maximum(gaps - self.window, 0)]
        after = sums[np.minimum(gaps + self.window, len(units))] - sums[gaps]
        norms = np.linalg.norm(before, axis=1) * np.linalg.norm(after, axis=1)
        cosine = np.einsum("gd,gd->g", before, after) / np.where(norms > 0, norms, 1)
        # Rounded, so that the last bits of a matrix kernel do not move a cut.
        return np.where([unit.leads for unit in units[:-1]], _NEVER, np.round(cosine, 5))

    def _embedder(self) -> Embed:
        if not self._embed:
            self._embed.append(load_embedder(self.embedder))
        return self._embed[0]
