"""A chunk's KV as it came out of the store, an encoder or a donor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from kvboost_rag.datamodels import ChunkKV, ChunkRecord, DiskChoice, EntryCheck, HitKind, Segment, StoreEntry
from kvboost_rag.kv import quantization
from kvboost_rag.kv.assemble import PlacedChunk, PlacedEntry

_T = TypeVar("_T")
SENSITIVITY = "sensitivity"
"""Name of the tensor `[seq_len]` in a stored entry."""

LEADING = "leading."
"""What names begin with, of tensors and meta strings of a chunk's KV after the anchor alone."""
LEADING_CODEC = "k8v8"


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

    @property
    def leading(self) -> StoreEntry:
        """As it stands after the anchor alone, as an entry of its own; the chunk itself where that is not stored."""
        tensors, meta = _leading_part(self.payload.tensors), _leading_part(self.payload.meta)
        return replace(self.payload, tensors=tensors, meta=meta) if tensors else self.payload

    def placed(self, segment: Segment, low: int, high: int, leading: bool = False) -> PlacedEntry | PlacedChunk:
        """The chunk's tokens that stand in a prompt, to be placed there.

        Args:
            low, high: positions `[low, high)` that may be written: the chunk as a whole, if it fits in there.
            leading: no document stands before it.
        """
        payload = self.leading if leading else self.payload
        start = segment.start - segment.chunk_start
        if low <= start and start + len(payload.token_ids) <= high:
            return PlacedEntry(payload, start)
        rows = slice(segment.chunk_start, segment.chunk_start + len(segment.token_ids))
        kv = quantization.decode(payload.tensors, payload.meta)
        part = ChunkKV(tuple(k[:, :, rows] for k in kv.keys), tuple(v[:, :, rows] for v in kv.values))
        return PlacedChunk(part, segment.start)

    @property
    def kv(self) -> ChunkKV:
        """Position-free KV in the model's dtype; decoded at each call."""
        return quantization.decode(self.payload.tensors, self.payload.meta)


def _leading_part(named: Mapping[str, _T]) -> dict[str, _T]:
    return {name.removeprefix(LEADING): value for name, value in named.items() if name.startswith(LEADING)}


def leading_parts(kv: ChunkKV) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """KV after the anchor alone as it lies in a chunk's entry beside the chunk's own: tensors and meta strings."""
    tensors, meta = quantization.encode(kv, LEADING_CODEC)
    return {LEADING + n: t for n, t in tensors.items()}, {LEADING + n: m for n, m in meta.items()}


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
