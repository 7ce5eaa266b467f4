"""Rotation of stored keys into their place on a CPU: one loop that numba compiles for the processor at hand.

torch runs the rotation as eight operations, each over all elements; here an element is read once, turned in float32,
rounded once and written once. Imported only where numba is installed (the extra `cpu`); compiled code is kept in
numba's cache on disk, so that only the first process of a machine compiles.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numba
import numpy as np
import torch
from numba.extending import intrinsic, overload

from kvboost_kernels import compiled, lanes
from kvboost_kernels.compiled import INTEGER_BYTES, reader_of_fields
from kvboost_kernels.lanes import HALVES, LANES, fetch_add, inline, load, multiply_add, pointer, store
from kvboost_kernels.place_chunk.layout import Pairing, Rotation, fits_loop

MIN_ELEMENTS_A_THREAD = 1 << 15
"""Fewer are turned sooner than a thread is woken."""

_NUM_FIELDS = 7
_fields = reader_of_fields(_NUM_FIELDS)


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


def _turn(builder: Any, x: Any, y: Any, cos: Any, sin: Any, to_x: Any, to_y: Any, halves: bool) -> None:
    """Sixteen pairs of channels, as the loop turns one."""
    first, second = (
        lanes.from_bfloat16(builder, load(builder, at, 0, HALVES)) if halves else load(builder, at) for at in (x, y)
    )
    c, s = load(builder, cos), load(builder, sin)
    turned = (
        multiply_add(builder, builder.fneg(second), s, builder.fmul(first, c)),
        multiply_add(builder, first, s, builder.fmul(second, c)),
    )
    for vector, target in zip(turned, (to_x, to_y), strict=True):
        store(builder, lanes.as_bfloat16(builder, vector) if halves else vector, target)


@inline
def _turn_bfloat16(builder: Any, x: Any, y: Any, cos: Any, sin: Any, to_x: Any, to_y: Any) -> None:
    _turn(builder, x, y, cos, sin, to_x, to_y, True)


@inline
def _turn_float32(builder: Any, x: Any, y: Any, cos: Any, sin: Any, to_x: Any, to_y: Any) -> None:
    _turn(builder, x, y, cos, sin, to_x, to_y, False)


@cache
def compiled_loop(dtype: torch.dtype, pairing: Pairing, offset: int, half: int, head_dim: int) -> Any:
    """The loop for one kind of keys, an entry of `compiled`: compiled, or loaded from disk, before this returns.

    Sizes are constants of the compiled code: with them known, the inner loop is vectorised without checks.

    Args:
        dtype: bfloat16 or float32, of keys and buffer alike.
        half: pairs of rotated channels, `rotary_dim // 2`.
    """
    interleaved, end, is_bfloat16 = pairing == "interleaved", offset + 2 * half, dtype == torch.bfloat16
    element, item = (np.uint16, 2) if is_bfloat16 else (np.float32, 4)
    whole = 0 if interleaved else half // LANES * LANES  # of pairs; they are turned sixteen at once
    version = compiled.digest([lanes.__file__, compiled.__file__, __file__])

    def part(arguments):
        _ = version  # part of the key in numba's cache
        out, row_stride, keys, cos, sin, tokens, rows = _fields(arguments)
        row = fetch_add(arguments + _NUM_FIELDS * INTEGER_BYTES)
        while row < rows:
            for token in range(tokens):
                to = out + (row * row_stride + token * head_dim) * item
                at = keys + (row * tokens + token) * head_dim * item
                cosines, sines = cos + token * half * 4, sin + token * half * 4
                for d in range(0, whole, LANES):
                    i, j = (offset + d) * item, (offset + half + d) * item
                    if is_bfloat16:
                        _turn_bfloat16(at + i, at + j, cosines + 4 * d, sines + 4 * d, to + i, to + j)
                    else:
                        _turn_float32(at + i, at + j, cosines + 4 * d, sines + 4 * d, to + i, to + j)
                if whole < half or offset or end < head_dim:
                    target = numba.carray(pointer(to), (head_dim,), element)
                    source = numba.carray(pointer(at), (head_dim,), element)
                    c = numba.carray(pointer(cosines), (half,), np.float32)
                    s = numba.carray(pointer(sines), (half,), np.float32)
                    for d in range(offset):
                        target[d] = source[d]
                    for d in range(whole, half):
                        i, j = (offset + 2 * d, offset + 2 * d + 1) if interleaved else (offset + d, offset + half + d)
                        x, y = _load(source, i), _load(source, j)
                        _store(target, i, _fused(-y, s[d], x * c[d]))
                        _store(target, j, _fused(x, s[d], y * c[d]))
                    for d in range(end, head_dim):
                        target[d] = source[d]
            row = fetch_add(arguments + _NUM_FIELDS * INTEGER_BYTES)

    return compiled.entry(part)


def rotate_into(out: torch.Tensor, keys: torch.Tensor, rotation: Rotation, threads: int = 1) -> None:
    """Write keys, turned as `reference.rotate` turns them, into `out`.

    Args:
        out: `[num_layers, num_kv_heads, seq_len, head_dim]`, a span of a contiguous buffer.
        keys: position-free, contiguous, of `out`'s shape and dtype, such that `fits_loop` holds.
        rotation: tables with a row for each of the `seq_len` tokens.
        threads: how many share the work; the caller is one of them.

    Raises:
        ValueError: the tensors are not as said above.
    """
    tables, end = (rotation.cos, rotation.sin), rotation.offset + rotation.rotary_dim
    if not 0 <= rotation.offset <= end <= keys.shape[-1] or any(table.device.type != "cpu" for table in tables):
        raise ValueError(f"channels {rotation.offset} to {end} of {keys.shape[-1]}, tables on {rotation.cos.device}")
    if not fits_loop(out, keys) or rotation.cos.shape[0] != keys.shape[2]:
        raise ValueError(
            f"keys {keys.dtype} {tuple(keys.shape)} and out {out.dtype} {tuple(out.shape)}, strides {out.stride()}: "
            f"expected a span of a contiguous buffer, contiguous keys and {rotation.cos.shape[0]} tokens, as the tables"
        )
    layers, heads, tokens, dim = keys.shape
    rows = layers * heads
    if not keys.numel():
        return
    row_stride = out.stride(1) if heads > 1 else out.stride(0) if layers > 1 else tokens * dim
    cos, sin = rotation.cos.float().contiguous(), rotation.sin.float().contiguous()
    work = (out.data_ptr(), row_stride, keys.data_ptr(), cos.data_ptr(), sin.data_ptr(), tokens, rows)
    parts = max(1, min(threads, rows, keys.numel() // MIN_ELEMENTS_A_THREAD))
    loop = compiled_loop(keys.dtype, rotation.pairing, rotation.offset, rotation.rotary_dim // 2, dim)
    compiled.run(loop, work, parts)
