"""Rotate position-free keys to the positions they take in a prompt."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvboost_rag.datamodels import ChunkKV, StoreEntry
from kvboost_rag.kv import quantization
from kvboost_rag.kv.buffer import KVBuffer, KVLayout
from kvboost_rag.kv.numba_rotation import rotate_into
from kvboost_rag.kv.rope import Rotation

Tables = tuple[torch.Tensor, torch.Tensor]
CACHED_ELEMENTS = 1 << 20
"""Key elements rotated at once on a CPU: few enough that their float32 intermediates stay in the cores' caches, many
enough that the eight operations on them are worth starting."""


@dataclass(frozen=True)
class PositionTables:
    """cos and sin of positions `0 … num_positions`, float32.

    One pair of `[num_positions, rotary_dim // 2]` a layer group, None for groups without rotation.
    """

    per_group: tuple[Tables | None, ...]
    num_positions: int

    @classmethod
    def of(cls, layout: KVLayout, num_positions: int) -> PositionTables:
        """From the model's rotary modules, each called once."""
        found: dict[tuple[int, torch.device], Tables] = {}
        per_group: list[Tables | None] = []
        for group in layout.groups:
            if group.rotation is None:
                per_group.append(None)
                continue
            key = (id(group.rotation.source), group.device)
            if key not in found:
                positions = torch.arange(num_positions, device=group.device)
                found[key] = group.rotation.source.tables(positions)
            per_group.append(found[key])
        return cls(tuple(per_group), num_positions)

    def span(self, group: int, start: int, end: int) -> Tables | None:
        """Rows `[start, end)` of one group's tables."""
        tables = self.per_group[group]
        return None if tables is None else (tables[0][start:end], tables[1][start:end])


def realign_into(buffer: KVBuffer, kv: ChunkKV, start: int, tables: PositionTables) -> None:
    """Write a chunk's KV to positions `[start, start + seq_len)` of the buffer, keys rotated to these positions."""
    realign_keys_into(buffer, kv, start, tables)
    copy_values_into(buffer, kv, start)


def realign_keys_into(buffer: KVBuffer, kv: ChunkKV, start: int, tables: PositionTables) -> None:
    """The keys' half of `realign_into`."""
    end = start + kv.seq_len
    for index, group in enumerate(buffer.layout.groups):
        _write_keys(buffer.keys[index][:, :, start:end], kv.keys[index], group.rotation, tables.span(index, start, end))


def copy_values_into(buffer: KVBuffer, kv: ChunkKV, start: int) -> None:
    """The values' half of `realign_into`."""
    for target, values in zip(buffer.values, kv.values, strict=True):
        target[:, :, start : start + kv.seq_len].copy_(values)


def realign_entry_into(buffer: KVBuffer, entry: StoreEntry, start: int, tables: PositionTables) -> None:
    """`realign_into` for a stored chunk: values are dequantised straight into the buffer, keys through one temporary
    tensor a group, since rotation needs both members of a pair."""
    if not quantization.is_quantised(entry.meta):
        realign_into(buffer, quantization.decode(entry.tensors, entry.meta), start, tables)
        return
    end = start + len(entry.token_ids)
    spans = [tables.span(index, start, end) for index in range(len(buffer.layout.groups))]
    places = [keys[:, :, start:end] for keys in buffer.keys]
    free = [torch.empty_like(p) if span is not None else p for p, span in zip(places, spans, strict=True)]
    values = tuple(values[:, :, start:end] for values in buffer.values)
    quantization.decode_into(entry.tensors, entry.meta, ChunkKV(tuple(free), values))
    for group, place, keys, span in zip(buffer.layout.groups, places, free, spans, strict=True):
        if keys is not place:
            _write_keys(place, keys, group.rotation, span)


def _write_keys(out: torch.Tensor, keys: torch.Tensor, rotation: Rotation | None, tables: Tables | None) -> None:
    if rotation is None or tables is None:
        out.copy_(keys)
        return
    keys = keys.to(out.device)
    if rotate_into(out, keys, rotation, tables):
        return
    step = len(keys)
    if out.device.type == "cpu" and keys[:1].numel():
        step = max(1, CACHED_ELEMENTS // keys[:1].numel())
    for layer in range(0, len(keys), step):
        rotation.rotate_into(out[layer : layer + step], keys[layer : layer + step], tables)


def position_free(kv: ChunkKV, layout: KVLayout, start: int, tables: PositionTables) -> ChunkKV:
    """Undo the rotation of keys that stand at positions `[start, start + seq_len)`; float32 arithmetic."""
    keys = []
    for index, group in enumerate(layout.groups):
        span = tables.span(index, start, start + kv.seq_len)
        free = kv.keys[index]
        if group.rotation is not None and span is not None:
            free = group.rotation.undo(free, span)
        keys.append(free)
    return ChunkKV(tuple(keys), kv.values)
