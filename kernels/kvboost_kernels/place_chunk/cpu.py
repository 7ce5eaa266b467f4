"""Rotation of stored keys into their place on a CPU: one loop that numba compiles for the processor at hand.

torch runs the rotation as eight operations, each over all elements; here an element is read once, turned in float32,
rounded once and written once. Imported only where numba is installed (the extra `cpu`); compiled code is kept in
numba's cache on disk, so that only the first process of a machine compiles.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any

import numba
import numpy as np
import torch
from numba.extending import intrinsic, overload

from kvboost_kernels.place_chunk.layout import Pairing, Rotation

DTYPES = (torch.bfloat16, torch.float32)
MIN_ELEMENTS_A_THREAD = 1 << 15
"""Fewer are turned sooner than a thread is woken."""

Loop = Callable[..., None]


@intrinsic
def _fused(typing, a, b, c):
    """`a * b + c` rounded once, as torch's `addcmul` has it where the processor can."""
    single = numba.float32
    return single(single, single, single), lambda context, builder, signature, values: builder.fma(*values)


def _load(source, index):
    """An element in float32; bfloat16 comes as its bits."""


@overload(_load)
def _typed_load(source, index):
    if source.dtype == numba.uint16:
        return lambda source, index: np.uint32(np.uint32(source[index]) << np.uint32(16)).view(np.float32)
    return lambda source, index: source[index]


def _store(target, index, number):
    """The nearest bfloat16, ties to even, as torch rounds, and one NaN for all; or the number as it is."""


@overload(_store)
def _typed_store(target, index, number):
    def rounded(target, index, number):
        bits = np.float32(number).view(np.uint32)
        odd = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))
        nearest = np.uint32(np.uint32(bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))
        target[index] = np.uint16(nearest if number == number else np.uint32(0x7FC0))

    def plain(target, index, number):
        target[index] = number

    return rounded if target.dtype == numba.uint16 else plain


@cache
def compiled_loop(dtype: torch.dtype, pairing: Pairing, offset: int, half: int, head_dim: int) -> Loop:
    """The loop for one kind of keys, compiled (or loaded from numba's cache) before this returns.

    Sizes are constants of the compiled code: with them known, the inner loop is vectorised without checks.

    Args:
        dtype: one of `DTYPES`, of keys and buffer alike.
        half: pairs of rotated channels, `rotary_dim // 2`.
    """
    interleaved, end = pairing == "interleaved", offset + 2 * half

    def loop(out, out_stride, keys, cos, sin, first, last):
        tokens = cos.shape[0]
        for row in range(first, last):
            for token in range(tokens):
                start, begin = row * out_stride + token * head_dim, (row * tokens + token) * head_dim
                target, source = out[start : start + head_dim], keys[begin : begin + head_dim]
                c, s = cos[token], sin[token]
                for d in range(offset):
                    target[d] = source[d]
                for d in range(half):
                    i, j = (offset + 2 * d, offset + 2 * d + 1) if interleaved else (offset + d, offset + half + d)
                    x, y = _load(source, i), _load(source, j)
                    _store(target, i, _fused(-y, s[d], x * c[d]))
                    _store(target, j, _fused(x, s[d], y * c[d]))
                for d in range(end, head_dim):
                    target[d] = source[d]

    compiled = _jit(loop)
    table, numbers = np.zeros((1, half), np.float32), _numbers(torch.zeros(head_dim, dtype=dtype))
    compiled(numbers, head_dim, numbers.copy(), table, table, 0, 1)
    return compiled


def _jit(function: Loop) -> Loop:
    options = {"nogil": True, "error_model": "numpy"}
    try:
        return numba.njit(function, cache=True, **options)
    except RuntimeError:  # neither the module's folder nor the user's cache can be written
        return numba.njit(function, **options)


def fits(out: torch.Tensor, keys: torch.Tensor) -> bool:
    """Whether the loop can address these: see `rotate_into`."""
    heads, dim = keys.shape[1], keys.shape[3]
    strides = (heads * out.stride(1), out.stride(1), dim, 1)
    return (
        out.device.type == keys.device.type == "cpu"
        and out.dtype == keys.dtype
        and keys.dtype in DTYPES
        and out.shape == keys.shape
        and keys.is_contiguous()
        and all(size < 2 or mine == wanted for size, mine, wanted in zip(out.shape, out.stride(), strides, strict=True))
    )


def rotate_into(out: torch.Tensor, keys: torch.Tensor, rotation: Rotation, threads: int = 1) -> None:
    """Write keys, turned as `reference.rotate` turns them, into `out`.

    Args:
        out: `[num_layers, num_kv_heads, seq_len, head_dim]`, a span of a contiguous buffer.
        keys: position-free, contiguous, of `out`'s shape and dtype, one of `DTYPES`.
        rotation: tables with a row for each of the `seq_len` tokens.
        threads: how many share the work; the caller is one of them.

    Raises:
        ValueError: the tensors are not as said above.
    """
    if not fits(out, keys) or rotation.cos.shape[0] != keys.shape[2]:
        raise ValueError(
            f"keys {keys.dtype} {tuple(keys.shape)} and out {out.dtype} {tuple(out.shape)}, strides {out.stride()}: "
            f"expected a span of a contiguous buffer, contiguous keys and {rotation.cos.shape[0]} tokens, as the tables"
        )
    layers, heads, tokens, dim = keys.shape
    rows = layers * heads
    if not keys.numel():
        return
    loop = compiled_loop(keys.dtype, rotation.pairing, rotation.offset, rotation.rotary_dim // 2, dim)
    row_stride = out.stride(1) if heads > 1 else out.stride(0) if layers > 1 else tokens * dim
    reach = out.as_strided(((rows - 1) * row_stride + tokens * dim,), (1,))
    tables = rotation.cos.contiguous().numpy(), rotation.sin.contiguous().numpy()
    arguments = _numbers(reach), row_stride, _numbers(keys.view(-1)), *tables
    parts = max(1, min(threads, rows, keys.numel() // MIN_ELEMENTS_A_THREAD))
    edges = [rows * part // parts for part in range(parts + 1)]
    helpers = _helpers(os.getpid(), threads - 1) if parts > 1 else None
    waiting = [helpers.submit(loop, *arguments, *part) for part in pairwise(edges[1:])] if helpers else []
    loop(*arguments, edges[0], edges[1])
    for part in waiting:
        part.result()


def _numbers(tensor: torch.Tensor) -> Any:
    """The same memory as a numpy array; bfloat16, which numpy lacks, by its bits."""
    tensor = tensor.detach()
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


@cache
def _helpers(process: int, count: int) -> ThreadPoolExecutor:
    """Threads besides the caller's. They do not survive a fork, hence one pool a process."""
    return ThreadPoolExecutor(count, thread_name_prefix=f"kvboost-rotation-{process}")
