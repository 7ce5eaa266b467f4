"""`row_linear` for bfloat16 on a CPU with matrix tiles (AMX), in code that numba compiles.

Imported only where numba is installed (the extra `cpu`) and `kvboost_kernels.amx.available()`.
"""

from __future__ import annotations

import torch

from kvboost_kernels import amx, compiled
from kvboost_kernels.compiled import memory
from kvboost_kernels.row_linear.tile_loops import Work, entry, scratch_bytes

MIN_WEIGHTS_A_THREAD = 1 << 15
"""Fewer are multiplied sooner than a thread is woken."""


def row_linear(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, threads: int = 1
) -> torch.Tensor:
    """`torch.nn.functional.linear` for few rows: sums in float32, rounded once.

    oneDNN lays the weights out anew in every call; here they are read as they lie and the rows are laid out. What a row
    comes out as does not depend on the rows beside it, nor on the number of threads.

    Args:
        rows: bfloat16 `[num_rows, num_inputs]`, as the weights such that `fits` holds.
        weight: `[num_outputs, num_inputs]`.
        bias: `[num_outputs]`, of any float dtype.
        threads: how many share the work; the caller is one of them.

    Returns:
        `[num_rows, num_outputs]`, contiguous.

    Raises:
        ValueError: the tensors are not as said above.
    """
    if not fits(rows, weight) or (bias is not None and bias.shape != weight.shape[:1]):
        shapes = [tuple(t.shape) for t in (rows, weight) if t is not None]
        raise ValueError(f"{rows.dtype} {shapes}: not rows and weights that tiles can be made of")
    (num_rows, num_inputs), num_outputs = rows.shape, weight.shape[0]
    outputs = rows.new_empty(num_rows, num_outputs)
    added = torch.zeros(16) if bias is None else bias.detach().float().contiguous()
    parts = max(1, min(threads, num_outputs // 32, weight.numel() // MIN_WEIGHTS_A_THREAD))
    size = scratch_bytes(num_rows, num_inputs)
    work = Work(
        *(rows.data_ptr(), 2 * rows.stride(0), weight.data_ptr(), outputs.data_ptr(), 2 * num_outputs),
        *(added.data_ptr(), 0 if bias is None else 4, amx.configuration().ctypes.data, memory(parts * size), size),
        *(num_rows, num_inputs, num_outputs, -(-num_outputs // 32)),
    )
    compiled.run(entry(), work, parts)
    return outputs


def fits(rows: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `row_linear` can do it: bfloat16 on a CPU, whole tiles, numbers side by side in memory, some rows."""
    return (
        rows.device.type == weight.device.type == "cpu"
        and rows.dtype == weight.dtype == torch.bfloat16
        and rows.dim() == weight.dim() == 2
        and rows.shape[1] == weight.shape[1]
        and rows.shape[1] % 32 == weight.shape[0] % 16 == 0
        and min(*rows.shape, *weight.shape) > 0
        and rows.stride(1) == 1
        and weight.is_contiguous()
    )
