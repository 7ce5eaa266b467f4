"""Intel's matrix tiles (AMX) for code that numba compiles: bfloat16 products in float32, in eight tiles of 1 KB.

`dot(c, a, b)` adds to tile `c` (16 by 16, float32) the product of tile `a` (16 rows of 32 bfloat16) and tile `b`, which
holds 32 rows of 16 columns with each two rows interleaved. A thread sets its tiles up with `configure` and gives them
back with `release`, in one call of compiled code; torch and oneDNN do the same, so that neither disturbs the other.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir

from kvboost_kernels.lanes import INT64, LANE_BYTES, LANES, WORDS, call, emitted, inline, load, store, transposed

_BYTE = ir.IntType(8)
_ADDRESS = ir.PointerType(_BYTE)
_NUM_TILES = 8
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18


def instruction(builder: Any, name: str, *operands: Any) -> None:
    """One instruction on tiles, an LLVM intrinsic: all that this module writes go through here."""
    call(builder, name, ir.VoidType(), *operands)


def _tile(number: int) -> Any:
    return ir.Constant(_BYTE, number)


def _mover(name: str, number: int) -> Any:
    @inline
    def move(builder: Any, address: Any, stride: Any) -> None:
        instruction(builder, name, _tile(number), builder.inttoptr(address, _ADDRESS), stride)

    return move


def _clearer(number: int) -> Any:
    return inline(lambda builder: instruction(builder, "llvm.x86.tilezero", _tile(number)))


LOADS = tuple(_mover("llvm.x86.tileloadd64", number) for number in range(_NUM_TILES))
"""`LOADS[t](address, stride)`: sixteen rows of 64 bytes into tile `t`, `stride` bytes from row to row."""
STORES = tuple(_mover("llvm.x86.tilestored64", number) for number in range(_NUM_TILES))
CLEARS = tuple(_clearer(number) for number in range(_NUM_TILES))


def dot(c: int, a: int, b: int) -> Any:
    """`tile c += tile a @ tile b`."""
    return inline(lambda builder: instruction(builder, "llvm.x86.tdpbf16ps", _tile(c), _tile(a), _tile(b)))


@inline
def configure(builder: Any, address: Any) -> None:
    """Set the thread's tiles up as the 64 bytes at `address` say (`configuration`)."""
    instruction(builder, "llvm.x86.ldtilecfg", builder.inttoptr(address, _ADDRESS))


@inline
def release(builder: Any) -> None:
    """Give the thread's tiles back."""
    instruction(builder, "llvm.x86.tilerelease")


def rows_apart(
    builder: Any, source: Any, stride: Any, first: Any, end: Any, kind: Any, number: int = LANES
) -> list[Any]:
    """Vectors that lie `stride` bytes apart: those of `[first, end)`, which must not be empty; zeros for the others.

    The others are not read.
    """
    read, nothing = [], ir.Constant(kind, [0] * LANES)
    for row in range(number):
        index = ir.Constant(INT64, row)
        exists = builder.and_(builder.icmp_signed("<=", first, index), builder.icmp_signed("<", index, end))
        offset = builder.mul(stride, builder.select(exists, index, first))
        read.append(builder.select(exists, load(builder, source, offset, kind), nothing))
    return read


@emitted
def pack_right(builder: Any, source: Any, stride: Any, count: Any, tile: Any) -> None:
    """Up to sixteen rows of 32 channels as a right-hand tile."""
    rows = rows_apart(builder, source, stride, ir.Constant(INT64, 0), count, WORDS)
    for row, vector in enumerate(transposed(builder, rows)):
        store(builder, vector, tile, LANE_BYTES * row)


@cache
def configuration() -> np.ndarray[Any, Any]:
    """What `configure` reads: all eight tiles full."""
    bytes_ = np.zeros(64, np.uint8)
    bytes_[0] = 1  # palette
    bytes_[16 : 16 + 2 * _NUM_TILES].view(np.uint16)[:] = 64
    bytes_[48 : 48 + _NUM_TILES] = 16
    return bytes_


@cache
def available() -> bool:
    """Whether this process may use tiles for bfloat16, and numba compiles for a processor that has them.

    Linux hands tiles out on request, once a process; a request that has been granted before changes nothing.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    from numba.core.registry import cpu_target

    features = str(cpu_target.target_context.codegen().magic_tuple())
    if not all(f"+{name}" in features for name in ("amx-tile", "amx-bf16", "avx512f", "avx512bw")):
        return False
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    return bool(syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0)
