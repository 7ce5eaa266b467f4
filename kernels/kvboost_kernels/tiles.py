"""Device functions shared by the attention kernels. Logits are in units of log 2: exponentials are `exp2`."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kvboost_kernels.dispatch import interpreting

LOG2E = tl.constexpr(1.4426950408889634)


def dot_constants(dtype: torch.dtype, block_k: int, hip: bool) -> dict[str, Any]:
    """How matrix products take operands of `dtype`: their type, `PRECISION` (matters for float32 only) and `CHUNK`.

    float32 products run on NVIDIA's tensor cores as three TF32 products (error about 2**-21, where one has 2**-11):
    the scalar path of `ieee` keeps whole rows in registers and spills. AMD's matrix cores take float32 as it is.
    Triton's interpreter (3.9) stores bfloat16 as its bit pattern and would multiply the patterns as integers.
    """
    if dtype == torch.bfloat16 and interpreting():
        dtype = torch.float32
    types = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
    chunk = min(block_k, 32) if dtype == torch.float32 else block_k
    return {"DOT": types[dtype], "PRECISION": "ieee" if hip else "tf32x3", "CHUNK": chunk}


@triton.jit
def packed_rows(rows, num_rows, kv_head, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """Tile `program_id(0)` of the rows of all query heads that share `kv_head`: head, row, position, live.

    Row-major over (row, head of the group), so that a tile spans few positions and its keys end early.
    """
    packed = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    row = packed // GROUP
    live = row < num_rows
    position = tl.load(rows + row, mask=live, other=-1).to(tl.int32)  # only offsets need 64 bits
    return kv_head * GROUP + packed % GROUP, row, position, live


@triton.jit
def visible_range(position, live, kv_len, window, BLOCK_N: tl.constexpr):
    """Columns `[low, high)` that any row of the tile may see; `low` is a multiple of `BLOCK_N`."""
    high = tl.minimum(tl.max(position, 0) + 1, kv_len)
    low = high * 0
    if window is not None:
        first = tl.min(tl.where(live, position, kv_len), 0) - window + 1
        low = tl.maximum(first, 0) // BLOCK_N * BLOCK_N
    return low, high


@triton.jit
def load_rows(base, offset, s_d, live, first, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """`[len(offset), BLOCK_D]`: the channels from `first` on of rows at int64 offsets, zeros where not live."""
    step = first + tl.arange(0, BLOCK_D).to(tl.int64)
    mask = live[:, None]
    if DIM % BLOCK_D != 0:
        mask = mask & (step < DIM)[None, :]
    return tl.load(base + offset[:, None] + step[None, :] * s_d, mask=mask, other=0.0)


@triton.jit
def dot(a, b, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """`a @ b`, operands as `DOT`, accumulated in float32."""
    return tl.dot(a.to(DOT), b.to(DOT), input_precision=PRECISION)


@triton.jit
def products(
    query, q_at, q_d, live, q, key, k_at, k_d, inside,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Queries against keys, float32 `[M, N]`: rows at the offsets `q_at`, `k_at`.

    `q` is the tile of queries, loaded once. Where it is too wide for the register file (`CHUNK < BLOCK_D`) it is not
    used, and both operands are read `CHUNK` channels at a time.
    """
    if CHUNK >= BLOCK_D:
        s = dot(q, tl.trans(load_rows(key, k_at, k_d, inside, 0, DIM, BLOCK_D)), DOT, PRECISION)
    else:
        s = tl.zeros([live.shape[0], inside.shape[0]], tl.float32)
        for d in tl.range(0, DIM, CHUNK, num_stages=1):  # not unrolled
            a = load_rows(query, q_at, q_d, live, d, DIM, CHUNK)
            b = load_rows(key, k_at, k_d, inside, d, DIM, CHUNK)
            s += dot(a, tl.trans(b), DOT, PRECISION)
    return s


@triton.jit
def logits2(s, position, column, inside, scaling, softcap, window):
    """`log2(e) *` the capped logits of the products `s`, `-inf` where a row does not see a key or none is there."""
    s = s * scaling
    if softcap is not None:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1), which saturates without overflow trouble.
        s = softcap * (1.0 - 2.0 / (tl.exp2(s * (2.0 * LOG2E / softcap)) + 1.0))
    visible = (column[None, :] <= position[:, None]) & inside[None, :]
    if window is not None:
        visible &= column[None, :] > position[:, None] - window
    return tl.where(visible, s * LOG2E, float("-inf"))


@triton.jit
def finite_or_zero(x):
    """Row maxima before any visible key are `-inf`; subtracting 0 instead keeps `-inf - -inf` out."""
    return tl.where(x == float("-inf"), 0.0, x)
