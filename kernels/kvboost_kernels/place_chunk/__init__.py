"""`place_chunk`: stored chunks into the assembled buffers, in one pass.

For every chunk: dequantise, rotate the position-free keys to their target positions, and write keys and values
straight into the chunk's span of the prompt-long buffers. What would otherwise be five passes over the data
(dequantise, two products, sum, copy) reads each stored byte once and writes each assembled byte once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvboost_kernels.dispatch import Backend, uses_triton
from kvboost_kernels.place_chunk.layout import Chunk, Pairing, Quantised, Rotation, check
from kvboost_kernels.place_chunk.reference import dequantise, place_chunk_reference

__all__ = ["Chunk", "Pairing", "Quantised", "Rotation", "dequantise", "place_chunk"]


def place_chunk(
    chunks: Sequence[Chunk],
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    rotation: Rotation | None = None,
    backend: Backend = "auto",
) -> None:
    """Write `chunks` into `keys` and `values`, in place. Positions that no chunk covers are left as they are.

    The rotation `(x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin)` of RoFormer (arXiv 2104.09864) is done in float32
    and rounded once, to the buffers' dtype, also where the chunk was stored quantised. A token at column `c` of the
    buffer takes the angles in row `c` of the tables.

    Chunks of one storage format (dtype, bits, channel group) go in one launch, whatever their lengths and strides.

    Args:
        chunks: any number, in any order, not overlapping; empty ones are allowed.
        keys: `[num_layers, num_kv_heads, capacity, key_head_dim]`, float32, float16 or bfloat16, any strides.
        values: `[num_layers, num_kv_heads, capacity, value_head_dim]`, likewise.
        rotation: cos and sin tables and how they apply; None leaves the keys as they are stored (no-RoPE layers).
        backend: see `Backend`.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, a chunk lies outside the buffers or overlaps another, or the
            tables have too few positions. Nothing has been written then.
    """
    check(chunks, keys, values, rotation)
    tensors = {"keys": keys, "values": values}
    if rotation is not None:
        tensors |= {"cos": rotation.cos, "sin": rotation.sin}
    for i, chunk in enumerate(chunks):
        tensors |= {f"chunk {i} {name}": tensor for name, tensor in chunk.tensors().items()}
    if uses_triton(backend, tensors):
        from kvboost_kernels.place_chunk.plan import plan

        for launch in plan(chunks, keys, values, rotation):
            launch.run()
    else:
        place_chunk_reference(chunks, keys, values, rotation)
