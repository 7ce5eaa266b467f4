"""Lay realigned chunk KV into one prompt-long buffer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvboost_rag.datamodels import ChunkKV
from kvboost_rag.models.kv_buffer import KVBuffer
from kvboost_rag.realign import PositionTables, realign_into


@dataclass(frozen=True)
class PlacedChunk:
    """A chunk's position-free KV and the position of its first token in this prompt."""

    kv: ChunkKV
    start: int


def assemble(buffer: KVBuffer, chunks: Iterable[PlacedChunk], tables: PositionTables) -> None:
    """Write every chunk to its place; positions that no chunk covers are left for the partial forward to fill."""
    for chunk in chunks:
        realign_into(buffer, chunk.kv, chunk.start, tables)
