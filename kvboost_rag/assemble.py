"""Lay realigned chunk KV into one prompt-long buffer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvboost_rag.datamodels import ChunkKV, StoreEntry
from kvboost_rag.models.kv_buffer import KVBuffer
from kvboost_rag.placement_kernels import KERNEL
from kvboost_rag.realign import PositionTables, realign_entry_into, realign_into


@dataclass(frozen=True)
class PlacedChunk:
    """A chunk's position-free KV and the position of its first token in this prompt."""

    kv: ChunkKV
    start: int


@dataclass(frozen=True)
class PlacedEntry:
    """A chunk as it is stored, quantised or not, and the position of its first token in this prompt."""

    entry: StoreEntry
    start: int


def assemble(buffer: KVBuffer, chunks: Iterable[PlacedChunk | PlacedEntry], tables: PositionTables) -> None:
    """Write every chunk to its place; positions that no chunk covers are left for the partial forward to fill."""
    chunks = list(chunks)
    entries = [(chunk.entry, chunk.start) for chunk in chunks if isinstance(chunk, PlacedEntry)]
    by_kernel = bool(entries) and all(KERNEL.wanted(group.device) for group in buffer.layout.groups)
    if by_kernel and KERNEL.place(buffer, entries, tables):
        entries = []
    for entry, start in entries:
        realign_entry_into(buffer, entry, start, tables)
    for chunk in chunks:
        if isinstance(chunk, PlacedChunk):
            realign_into(buffer, chunk.kv, chunk.start, tables)
