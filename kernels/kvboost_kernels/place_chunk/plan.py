"""From chunks to kernel launches: groups by storage format, the pointer table, and the tile size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from kvboost_kernels.dispatch import Launch
from kvboost_kernels.place_chunk.layout import Chunk, Quantised, Rotation
from kvboost_kernels.place_chunk.triton import place_kernel

_SOURCES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.uint8: tl.uint8,
}
_TILE_ELEMENTS = 4096
"""Elements of a tile, for 128 threads: enough bytes in flight, no spills (`docs/kernels.md`)."""


def plan(chunks: Sequence[Chunk], keys: torch.Tensor, values: torch.Tensor, rotation: Rotation | None) -> list[Launch]:
    """One launch for each storage format among the chunks that hold tokens."""
    groups: dict[tuple[Any, ...], list[Chunk]] = {}
    for chunk in chunks:
        if chunk.num_tokens:
            groups.setdefault((_format(chunk.keys), _format(chunk.values)), []).append(chunk)
    return [_plan_group(group, keys, values, rotation) for group in groups.values()]


def _plan_group(chunks: list[Chunk], keys: torch.Tensor, values: torch.Tensor, rotation: Rotation | None) -> Launch:
    widest = triton.next_power_of_2(max(keys.shape[3], values.shape[3]))
    quantised = any(isinstance(s, Quantised) for s in (chunks[0].keys, chunks[0].values))
    block_t = max(8, min(64, _TILE_ELEMENTS // (2 * widest if quantised else widest)))
    table, tiles = _tables(chunks, block_t, keys.device)
    rotary = 0 if rotation is None else rotation.rotary_dim
    args: dict[str, Any] = {
        "table": table,
        "tiles": tiles,
        "cos": rotation.cos.contiguous() if rotation is not None and rotary else None,
        "sin": rotation.sin.contiguous() if rotation is not None and rotary else None,
        "keys": keys,
        "values": values,
        "num_heads": keys.shape[1],
        **dict(zip(("k_l", "k_h", "k_t", "k_d"), keys.stride(), strict=True)),
        **dict(zip(("v_l", "v_h", "v_t", "v_d"), values.stride(), strict=True)),
        **_constants("KEY", [c.keys for c in chunks], block_t),
        **_constants("VALUE", [c.values for c in chunks], block_t),
        "ROTARY": rotary,
        "ROTARY_START": rotation.offset if rotation is not None and rotary else 0,
        "INTERLEAVED": rotation is not None and rotation.pairing == "interleaved",
        "BLOCK_T": block_t,
    }
    return Launch(place_kernel, (tiles.shape[0], keys.shape[0], 2 * min(1, keys.shape[1])), args, num_warps=4)


def _format(source: torch.Tensor | Quantised) -> tuple[Any, ...]:
    """What one compiled kernel has in common: (dtype, bits, channel group, dtype of the scales)."""
    if isinstance(source, Quantised):
        return torch.uint8, source.bits, source.channel_group, source.scale.dtype
    return source.dtype, 0, 1, torch.float32


def _constants(side: str, sources: list[torch.Tensor | Quantised], block_t: int) -> dict[str, Any]:
    dtype, bits, channel_group, scales = _format(sources[0])
    dim = int(sources[0].shape[3])
    groups = [(s.token_group, s.shape[2]) for s in sources if isinstance(s, Quantised)]
    one_row = all(group % block_t == 0 or group >= tokens for group, tokens in groups)
    return {
        f"{side}_SOURCE": _SOURCES[dtype],
        f"{side}_SCALES": _SOURCES[scales],
        f"{side}_BITS": bits,
        f"{side}_GROUP": channel_group,
        f"{side}_ONE_ROW": one_row,
        f"{side}_ALIGNED": all(_is_aligned(s, one_row) for s in sources),
        f"{side}_DIM": dim,
        f"{side}_SECTION": _section(dim, bits, channel_group),
    }


def _section(dim: int, bits: int, channel_group: int) -> int:
    """Widest run of channels that has one scale per token and, for packed codes, one nibble."""
    run = dim // 2 if bits == 4 else dim
    return channel_group if channel_group >= 16 and run % channel_group == 0 else run


def _is_aligned(source: torch.Tensor | Quantised, one_row: bool) -> bool:
    """Whether rows can be read 16 bytes at a time in every layer and head."""
    if isinstance(source, torch.Tensor):
        return _rows_aligned(source, 16, 3)
    parts = (source.scale, source.offset)
    return _rows_aligned(source.codes, 16, 3) and all(_rows_aligned(t, 8, 3 if one_row else 2) for t in parts)


def _rows_aligned(tensor: torch.Tensor, elements: int, num_dims: int) -> bool:
    """Data on 16 bytes, channels contiguous, and the first `num_dims` strides multiples of `elements`."""
    steps = [stride for stride, size in zip(tensor.stride()[:num_dims], tensor.shape, strict=False) if size > 1]
    return tensor.data_ptr() % 16 == 0 and tensor.stride(3) == 1 and all(step % elements == 0 for step in steps)


def _tables(chunks: list[Chunk], block_t: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Int64 on the device, in one copy: what the kernel reads of each chunk, and (chunk, first token) of each tile."""
    numbers: list[int] = []
    for chunk in chunks:
        numbers += [chunk.start, chunk.num_tokens, *_fields(chunk.keys), *_fields(chunk.values)]
    end_of_table = len(numbers)
    for index, chunk in enumerate(chunks):
        for first in range(0, chunk.num_tokens, block_t):
            numbers += (index, first)
    on_device = torch.tensor(numbers, dtype=torch.int64).to(device)
    return on_device[:end_of_table].view(len(chunks), -1), on_device[end_of_table:].view(-1, 2)


def _fields(source: torch.Tensor | Quantised) -> list[int]:
    """data, layer, head, token, channel stride; scale, offset, their four strides, token group."""
    if not isinstance(source, Quantised):
        return [source.data_ptr(), *source.stride(), 0, 0, 0, 0, 0, 0, 1]
    return [
        source.codes.data_ptr(),
        *source.codes.stride(),
        source.scale.data_ptr(),
        source.offset.data_ptr(),
        *source.scale.stride(),
        source.token_group,
    ]
