"""What all chunks of one engine share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvboost_rag.config import EncodingConfig
from kvboost_rag.datamodels import ChunkRecord
from kvboost_rag.encode.encoder import ChunkJob, EncodingJob
from kvboost_rag.encode.mixture import PLAIN, ContextWeights
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
        leading: whether each chunk's KV after the anchor alone is stored with it.
        weights: how chunks with several encoding contexts are combined; None: by the mean.
    """

    fingerprint: str
    anchor_ids: tuple[int, ...] = ()
    separator_ids: tuple[int, ...] = ()
    max_positions: int | None = None
    quantization: str = "none"
    batch_size: int = 1
    sensitivity: bool = False
    weights: ContextWeights | None = None
    leading: bool = False

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
            encoding.context_weights,
            bool(encoding.leading) and not encoding.groups,
        )

    def leads(self, record: ChunkRecord) -> bool:
        """Whether the chunk's KV after the anchor alone is something else than its KV, and is to be kept."""
        return self.leading and bool(record.neighbours) and not record.forward_tokens

    def leading_job(self, record: ChunkRecord) -> EncodingJob:
        """What encodes the chunk after the anchor alone."""
        return EncodingJob(record.token_ids, record.anchor_ids)

    def current(self, record: ChunkRecord) -> ChunkRecord:
        """The record with the mixture that this engine makes of its contexts.

        Fitted weights are for as many contexts as they were fitted on, none of them empty or cut out of a group.
        """
        if not record.splits:
            return record if not record.mixture else replace(record, mixture="")
        weights = self.weights
        fits = weights is not None and len(record.splits) == weights.num_contexts and min(record.splits) > 0
        mixture = weights.digest if weights is not None and fits and not record.forward_tokens else PLAIN
        return record if record.mixture == mixture else replace(record, mixture=mixture)

    def job(self, record: ChunkRecord, contexts: Sequence[tuple[int, ...]]) -> ChunkJob:
        """What encodes a `current` record after its contexts, given as token ids."""
        parts = tuple(EncodingJob(record.token_ids, context, record.forward_tokens) for context in contexts)
        if not record.splits:
            return ChunkJob(parts)
        if self.weights is None or record.mixture == PLAIN:
            used = [i for i, size in enumerate(record.splits) if size]
            return ChunkJob(tuple(parts[i] for i in used), tuple(float(record.splits[i]) for i in used))
        alone = (EncodingJob(record.token_ids, record.anchor_ids),) if self.weights.needs_alone else ()
        return ChunkJob((*alone, *parts), weights=self.weights)
