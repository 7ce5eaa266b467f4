"""Device functions shared by the attention kernels. Logits are in units of log 2: exponentials are `exp2`."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kvboost_kernels.dispatch import interpreting

LOG2E = tl.constexpr(1.4426950408889634)


def dot_dtype(dtype: torch.dtype) -> Any:
    """The type in which matrix products take operands of `dtype`: the same, but for the interpreter's bfloat16.

    Triton's interpreter (3.9) stores bfloat16 as its bit pattern and multiplies the patterns as integers.
    """
    if dtype == torch.bfloat16 and interpreting():
        return tl.float32
    return {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[dtype]


@triton.jit
def packed_rows(rows, num_rows, kv_head, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """Tile `program_id(0)` of the rows of all query heads that share `kv_head`: head, row, position, live.

    Row-major over (row, head of the group), so that a tile spans few positions and its keys end early.
    """
    packed = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    row = packed // GROUP
    live = row < num_rows
    position = tl.load(rows + row, mask=live, other=-1)
    return kv_head * GROUP + packed % GROUP, row, position, live


@triton.jit
def visible_range(position, live, kv_len, window, BLOCK_N: tl.constexpr):
    """Columns `[low, high)` that any row of the tile may see; `low` is a multiple of `BLOCK_N`."""
    high = tl.minimum(tl.max(position, 0) + 1, kv_len).to(tl.int32)
    low = high * 0
    if window is not None:
        first = tl.min(tl.where(live, position, kv_len), 0) - window + 1
        low = (tl.maximum(first, 0) // BLOCK_N * BLOCK_N).to(tl.int32)
    return low, high


@triton.jit
def load_rows(base, offset, s_d, live, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """`[len(offset), BLOCK_D]`: a row of `DIM` elements from each int64 offset, zeros beyond and where not live."""
    step = tl.arange(0, BLOCK_D).to(tl.int64)
    mask = live[:, None] & (step < DIM)[None, :]
    return tl.load(base + offset[:, None] + step[None, :] * s_d, mask=mask, other=0.0)


@triton.jit
def dot(a, b, DOT: tl.constexpr):
    """`a @ b`, operands as `DOT`, accumulated in float32; float32 operands are not rounded to TF32."""
    return tl.dot(a.to(DOT), b.to(DOT), input_precision="ieee")


@triton.jit
def logits2(q, k, position, column, kv_len, scaling, softcap, window, DOT: tl.constexpr):
    """`log2(e) *` capped logits of queries `[M, D]` against keys `[N, D]`, and which of them are visible."""
    s = dot(q, tl.trans(k), DOT) * scaling
    if softcap is not None:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1), which saturates without overflow trouble.
        s = softcap * (1.0 - 2.0 / (tl.exp2(s * (2.0 * LOG2E / softcap)) + 1.0))
    visible = (column[None, :] <= position[:, None]) & (column < kv_len)[None, :]
    if window is not None:
        visible &= column[None, :] > position[:, None] - window
    return tl.where(visible, s * LOG2E, float("-inf")), visible


@triton.jit
def finite_or_zero(x):
    """Row maxima before any visible key are `-inf`; subtracting 0 instead keeps `-inf - -inf` out."""
    return tl.where(x == float("-inf"), 0.0, x)
