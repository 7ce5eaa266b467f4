"""Placement of stored chunks through the Triton kernel, on a GPU: all chunks of a storage format in one launch.

Quantised keys are rotated before they are rounded to the buffer's dtype, where plain torch rounds twice; answers stay
the same to the bit from request to request, since chunks just encoded are placed from their stored form too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from kvboost_rag.datamodels import StoreEntry
from kvboost_rag.kv import quantization
from kvboost_rag.kv.buffer import KVBuffer, LayerGroup
from kvboost_rag.kv.checked_kernel import CheckedKernel
from kvboost_rag.kv.realign import PositionTables, realign_entry_into

if TYPE_CHECKING:
    from kvboost_kernels.place_chunk import Chunk

Placed = tuple[StoreEntry, int]
"""A stored chunk and the position of its first token."""

KERNEL = CheckedKernel("placement", "gpu")


def place(buffer: KVBuffer, chunks: Sequence[Placed], tables: PositionTables) -> bool:
    """Write every chunk to its place. False: plain torch has to do it (what is written is then undefined)."""
    groups = buffer.layout.groups
    if not chunks or not all(KERNEL.wanted(group.device) for group in groups):
        return False
    if any(size % 2 for group in groups for size in (group.key_head_dim, group.value_head_dim)):
        return False  # the kernel's packed codes come in pairs

    def ours() -> bool:
        for index, group in enumerate(groups):
            _place_group(buffer, index, group, chunks, tables)
        return True

    one_of_each = {entry.meta.get("codec"): (entry, start) for entry, start in chunks}
    kind = (*map(_shape, groups), buffer.layout.dtype, frozenset(one_of_each))
    return KERNEL.run(kind, ours, lambda _: _by_torch(buffer, one_of_each.values(), tables)) is not None


def _place_group(
    buffer: KVBuffer, index: int, group: LayerGroup, chunks: Sequence[Placed], tables: PositionTables
) -> None:
    from kvboost_kernels.place_chunk import Rotation, place_chunk

    angles, rotation = tables.per_group[index], None
    if group.rotation is not None and angles is not None:
        rotation = Rotation(*angles, pairing=group.rotation.pairing, offset=group.rotation.offset)
    parts = [part for entry, start in chunks for part in kernel_chunks(entry, index, start, group.device)]
    place_chunk(parts, buffer.keys[index], buffer.values[index], rotation=rotation, backend="triton")


def _by_torch(
    buffer: KVBuffer, chunks: Iterable[Placed], tables: PositionTables
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for entry, start in chunks:
        expected = KVBuffer(buffer.layout, len(entry.token_ids))
        end = start + len(entry.token_ids)
        spans = tuple(tables.span(i, start, end) for i in range(len(buffer.layout.groups)))
        realign_entry_into(expected, entry, 0, PositionTables(spans, end - start))
        for ours, plain in zip((*buffer.keys, *buffer.values), (*expected.keys, *expected.values), strict=True):
            yield ours[:, :, start:end], plain[:, :, : end - start]


def _shape(group: LayerGroup) -> tuple[object, ...]:
    turned = group.rotation and (group.rotation.pairing, group.rotation.offset, group.rotation.rotary_dim)
    return group.num_kv_heads, group.key_head_dim, group.value_head_dim, turned


def kernel_chunks(entry: StoreEntry, index: int, start: int, device: torch.device) -> Iterator[Chunk]:
    """One layer group of a stored chunk in the kernel's terms: what is quantised, and its edges that are not.

    Raises:
        ValueError: the payload was written by a codec that this version does not know.
    """
    from kvboost_kernels.place_chunk import Chunk, Quantised

    def tensor(name: str) -> torch.Tensor:
        return entry.tensors[name].to(device, non_blocking=True)

    keys, values = f"keys.{index}", f"values.{index}"
    bits = quantization.SETTINGS[entry.meta["codec"]] if quantization.is_quantised(entry.meta) else None
    if bits is None:
        yield Chunk(tensor(keys), tensor(values), start)
        return

    def codes(name: str, num_bits: Any, token_group: int, channel_group: int) -> Quantised:
        parts = tensor(f"{name}.codes"), tensor(f"{name}.scale"), tensor(f"{name}.zero")
        return Quantised(*parts, num_bits, token_group, channel_group)

    edge, middle = quantization.EDGE_TOKENS, entry.tensors[f"{keys}.codes"].shape[2]
    key_edges, value_edges = tensor(f"{keys}.edges"), tensor(f"{values}.edges")
    yield Chunk(key_edges[:, :, :edge], value_edges[:, :, :edge], start)
    per_channel, per_token = (
        codes(keys, bits.keys, middle, 1),
        codes(values, bits.values, 1, quantization.GROUP_CHANNELS),
    )
    yield Chunk(per_channel, per_token, start + edge)
    yield Chunk(key_edges[:, :, edge:], value_edges[:, :, edge:], start + edge + middle)
