"""A chunk's KV as it came out of the store, an encoder or a donor."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvboost_rag.datamodels import ChunkKV, ChunkRecord, DiskChoice, EntryCheck, HitKind, Segment, StoreEntry
from kvboost_rag.kv import quantization
from kvboost_rag.kv.assemble import PlacedChunk, PlacedEntry

SENSITIVITY = "sensitivity"
"""Name of the tensor `[seq_len]` in a stored entry."""


@dataclass(frozen=True)
class FetchedChunk:
    """A chunk's KV as the store keeps it (encoded by `quantization`), and where it came from.

    Attributes:
        payload: tensors and meta strings of the stored entry, or of one that is like it.
        encoded_tokens: what was forwarded to get it (encoding context included), 0 for a hit.
        kept: whether the store holds it; False costs the next call another encoding.
        disk_choice: what was decided about a chunk on disk, None where there was nothing to decide.
        computed_tokens: of a donor hit: tokens of the chunk that no donor could give.
    """

    record: ChunkRecord
    payload: StoreEntry
    hit: HitKind
    encoded_tokens: int = 0
    kept: bool = True
    disk_choice: DiskChoice | None = None
    computed_tokens: int = 0

    @property
    def num_bytes(self) -> int:
        return self.payload.num_bytes

    @property
    def sensitivity(self) -> torch.Tensor | None:
        """Float16 `[seq_len]` (`encode.context_sensitivity`), or None if it is not stored with the chunk."""
        return self.payload.tensors.get(SENSITIVITY)

    def sensitivity_of(self, segment: Segment) -> torch.Tensor | None:
        """Of the chunk's tokens that stand in a prompt."""
        whole = self.sensitivity
        return None if whole is None else whole[segment.chunk_start : segment.chunk_start + len(segment.token_ids)]

    def placed(self, segment: Segment, low: int, high: int) -> PlacedEntry | PlacedChunk:
        """The chunk's tokens that stand in a prompt, to be placed there.

        Args:
            low, high: positions `[low, high)` that may be written: the chunk as a whole, if it fits in there.
        """
        start = segment.start - segment.chunk_start
        if low <= start and start + len(self.payload.token_ids) <= high:
            return PlacedEntry(self.payload, start)
        rows = slice(segment.chunk_start, segment.chunk_start + len(segment.token_ids))
        kv = self.kv
        part = ChunkKV(tuple(k[:, :, rows] for k in kv.keys), tuple(v[:, :, rows] for v in kv.values))
        return PlacedChunk(part, segment.start)

    @property
    def kv(self) -> ChunkKV:
        """Position-free KV in the model's dtype; decoded at each call."""
        return quantization.decode(self.payload.tensors, self.payload.meta)


def entry_of(
    record: ChunkRecord, check: EntryCheck, tensors: dict[str, torch.Tensor], meta: dict[str, str]
) -> StoreEntry:
    """A chunk's KV in the form of the store."""
    return StoreEntry(
        record.content_hash,
        record.namespace,
        record.fingerprint,
        record.token_ids,
        check.context_hash,
        tensors,
        meta,
    )
