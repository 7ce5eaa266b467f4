"""What a source is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SourceTexts:
    """The chunks that a source is to have.

    Attributes:
        texts: chunk texts in order, or objects with `page_content` or `text`; empty ones are left out.
        embeddings: their vectors `[num_texts, dim]`, plain or as `embeddings.ModelVectors`, or None.
        later: further chunks that are encoded only when they first stand in a prompt.
    """

    texts: Sequence[Any]
    embeddings: Any = None
    later: Sequence[Any] = ()
