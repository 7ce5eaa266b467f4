"""What all chunks of one engine share."""

from __future__ import annotations

from dataclasses import dataclass

from kvboost_rag.config import EncodingConfig
from kvboost_rag.prompt.tokens import PromptTokens


@dataclass(frozen=True)
class ChunkIdentity:
    """What all chunks of one engine share.

    Attributes:
        fingerprint: of the model.
        anchor_ids, separator_ids: parts of every encoding context.
        max_positions: longest prompt that can be reused, or None.
        quantization: codec of stored KV.
        batch_size: chunks encoded in one forward.
        sensitivity: whether each chunk's context sensitivity is stored with it.
    """

    fingerprint: str
    anchor_ids: tuple[int, ...] = ()
    separator_ids: tuple[int, ...] = ()
    max_positions: int | None = None
    quantization: str = "none"
    batch_size: int = 1
    sensitivity: bool = False

    @classmethod
    def of(
        cls, fingerprint: str, tokens: PromptTokens, encoding: EncodingConfig, max_positions: int | None
    ) -> ChunkIdentity:
        """Tokenise what the settings give as text."""
        anchor: tuple[int, ...] = ()
        if encoding.anchor:
            anchor = tokens.default_anchor_ids(None if encoding.anchor == "auto" else encoding.anchor)
        separator = tokens.document_ids(encoding.separator) if encoding.separator else ()
        return cls(
            fingerprint,
            anchor,
            separator,
            max_positions,
            encoding.quantization or "none",
            encoding.batch_size,
            encoding.sensitivity,
        )
