"""The only hash function of the project, and the dual hash of chunks.

SHA-256 over length-prefixed, domain-tagged fields, so that no two different lists of fields give the same bytes
(a public fault elsewhere: an adapter's name that collided with a cache salt).
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvboost_rag.datamodels import ChunkRecord

ROOT_HASH = "0" * 64
"""Preceding hash of a prompt's first block."""


def hash_fields(domain: str, *fields: bytes) -> str:
    """SHA-256 hex digest of `fields` under the tag `domain`; each field is preceded by its length (8 bytes)."""
    digest = hashlib.sha256()
    for part in (domain.encode(), *fields):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def token_bytes(token_ids: Sequence[int]) -> bytes:
    """Little-endian int64, the same on every platform."""
    ids = array("q", token_ids)
    if ids.itemsize != 8:  # pragma: no cover - no such platform is supported by torch
        raise RuntimeError("array('q') is not 64 bits wide on this platform")
    return ids.tobytes()


def content_hash(fingerprint: str, namespace: str, token_ids: Sequence[int]) -> str:
    """Identifies token ids whatever stands before them, for one model and one namespace."""
    return hash_fields("content", fingerprint.encode(), namespace.encode(), token_bytes(token_ids))


def prefix_hash(fingerprint: str, namespace: str, preceding: str, token_ids: Sequence[int]) -> str:
    """Identifies token ids *and* all that precedes them: chains the hash of the preceding block (or `ROOT_HASH`)."""
    return hash_fields("prefix", fingerprint.encode(), namespace.encode(), preceding.encode(), token_bytes(token_ids))


def context_hash(token_ids: Sequence[int]) -> str:
    """Identifies an encoding context by its token ids."""
    return hash_fields("context", token_bytes(token_ids))


def encoding_contexts(record: ChunkRecord, neighbour_tokens: Iterable[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Token ids in front of a chunk in each of its encoding contexts; `neighbour_tokens` are of `record.neighbours`.

    The separator makes a chunk begin as it does in a prompt, after a blank line instead of in mid-sentence: with four
    neighbours it halves the KL to full prefill (`benchmarks/evidence.py`).
    """
    tokens = iter(neighbour_tokens)
    return tuple(
        (*record.anchor_ids, *(i for _ in context for i in (*next(tokens), *record.separator_ids)))
        for context in record.contexts
    )


def record_context_hash(record: ChunkRecord, neighbour_tokens: Iterable[Sequence[int]]) -> str:
    """Identifies all that a chunk was encoded after: its context, or its contexts and how they are combined."""
    contexts = encoding_contexts(record, neighbour_tokens)
    if not record.splits:
        return context_hash(contexts[0])
    return hash_fields("contexts", record.mixture.encode(), *map(token_bytes, contexts))
