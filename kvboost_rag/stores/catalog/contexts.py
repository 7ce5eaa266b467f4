"""What is left of a chunk's encoding contexts."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from kvboost_rag.datamodels import ChunkRecord


def without(record: ChunkRecord, gone: Collection[str]) -> ChunkRecord:
    """The record with contexts that name none of the chunks that are gone; one that has nothing left is dropped."""
    contexts = [tuple(key for key in context if key not in gone) for context in record.contexts]
    kept = [left for left, before in zip(contexts, record.contexts, strict=True) if left or not before] or [()]
    splits = tuple(map(len, kept)) if len(kept) > 1 else ()
    neighbours = tuple(key for context in kept for key in context)
    mixture = record.mixture if splits else ""
    return replace(record, neighbours=neighbours, splits=splits, mixture=mixture, forward_tokens=0)
