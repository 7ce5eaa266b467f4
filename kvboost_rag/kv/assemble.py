"""Lay realigned chunk KV into one prompt-long buffer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvboost_rag.datamodels import ChunkKV, StoreEntry
from kvboost_rag.kv import quantization
from kvboost_rag.kv.buffer import KVBuffer
from kvboost_rag.kv.realign import PositionTables, copy_values_into, realign_entry_into, realign_keys_into
from kvboost_rag.kv.triton_placement import place


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
    if place(buffer, entries, tables):
        entries = []
    plain = [chunk for chunk in chunks if isinstance(chunk, PlacedChunk)]
    for entry, start in entries:
        if quantization.is_quantised(entry.meta):
            realign_entry_into(buffer, entry, start, tables)
        else:
            plain.append(PlacedChunk(quantization.decode(entry.tensors, entry.meta), start))
    for chunk in plain:
        realign_keys_into(buffer, chunk.kv, chunk.start, tables)
    # Values after all keys: the threads that torch copies with spin for a while, on the cores that rotate the keys.
    for chunk in plain:
        copy_values_into(buffer, chunk.kv, chunk.start)
