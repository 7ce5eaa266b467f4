"""Intel's matrix tiles in numpy, so that the loops run on any machine: compiled code calls back for each instruction.

Only the instructions on tiles are replaced, where `kvboost_kernels.amx` writes them; all other code is what a processor
with tiles runs. Semantics from Intel's manual: a tile is sixteen rows of 64 bytes; TDPBF16PS sums the even and the odd
products apart, pair by pair, and adds both to the destination. (Not emulated: numbers below 2**-126 become 0.)
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numba
import numpy as np
import pytest
from llvmlite import ir

from kvboost_kernels import amx, compiled
from kvboost_kernels.lanes import INT64
from kvboost_kernels.row_attention import tile_loops

ROWS, ROW_BYTES = 16, 64
_ENTRY = tile_loops.entry
FAULTS: list[str] = []
"""What a processor would have answered with a fault. An exception cannot cross compiled code."""
_TILES: dict[int, np.ndarray[Any, Any]] = {}
"""Of each thread that has configured them: uint8 `[8, ROWS, ROW_BYTES]`."""


def _of_this_thread(number: int) -> np.ndarray[Any, Any]:
    tiles = _TILES.get(threading.get_native_id())
    if tiles is None:
        FAULTS.append("an instruction on tiles that were not configured")
        return np.zeros((ROWS, ROW_BYTES), np.uint8)
    return tiles[number]


def ldtilecfg(address: int) -> None:
    if ctypes.string_at(address, 64) != amx.configuration().tobytes():
        FAULTS.append("another configuration")
    _TILES[threading.get_native_id()] = np.full((8, ROWS, ROW_BYTES), 0xFF, np.uint8)  # NaN: nothing counts on zeros


def tilerelease() -> None:
    _TILES.pop(threading.get_native_id(), None)


def tilezero(number: int) -> None:
    _of_this_thread(number)[:] = 0


def tileloadd64(number: int, address: int, stride: int) -> None:
    rows = b"".join(ctypes.string_at(address + row * stride, ROW_BYTES) for row in range(ROWS))
    _of_this_thread(number)[:] = np.frombuffer(rows, np.uint8).reshape(ROWS, ROW_BYTES)


def tilestored64(number: int, address: int, stride: int) -> None:
    for row, content in enumerate(_of_this_thread(number)):
        ctypes.memmove(address + row * stride, content.tobytes(), ROW_BYTES)


def tdpbf16ps(c: int, a: int, b: int) -> None:
    """`c [16, 16] += a [16, 32] @ b [32, 16]`, `b` with each two rows interleaved."""
    left, right = (_as_float32(_of_this_thread(number)) for number in (a, b))
    sums = np.zeros((ROWS, ROWS, 2), np.float32)
    with np.errstate(all="ignore"):
        for pair in range(ROWS):  # a product of two bfloat16 is exact in float32: as if fused
            sums += left[:, pair, None] * right[pair]
        result = _of_this_thread(c).view(np.float32)
        result += sums[..., 0] + sums[..., 1]


def _as_float32(tile: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """`[16, 16, 2]`: rows, pairs, even and odd."""
    return (tile.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(ROWS, ROWS, 2)


@cache
def _callbacks() -> dict[str, Any]:
    """C functions by the names of LLVM's intrinsics. Kept: compiled code holds their addresses."""
    counts = {ldtilecfg: 1, tilerelease: 0, tilezero: 1, tileloadd64: 3, tilestored64: 3, tdpbf16ps: 3}
    return {
        f"llvm.x86.{function.__name__}": ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * count)(function)
        for function, count in counts.items()
    }


def _call_back(builder: Any, name: str, *operands: Any) -> None:
    """In place of `amx.instruction`: call the emulation, every operand as an int64."""
    address = ctypes.cast(_callbacks()[name], ctypes.c_void_p).value
    kind = ir.FunctionType(ir.VoidType(), [INT64] * len(operands))
    function = builder.inttoptr(ir.Constant(INT64, address), ir.PointerType(kind))
    builder.call(function, [_as_int64(builder, operand) for operand in operands])


def _as_int64(builder: Any, operand: Any) -> Any:
    if isinstance(operand.type, ir.PointerType):
        return builder.ptrtoint(operand, INT64)
    return operand if operand.type == INT64 else builder.zext(operand, INT64)


@cache
def _compiled() -> Any:
    """The loops, compiled once a process, and not kept on disk."""

    def entry(function: Callable[[int], None]) -> Any:
        return numba.cfunc(numba.types.void(numba.types.int64))(function)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(amx, "available", lambda: True)
        patched.setattr(amx, "instruction", _call_back)
        patched.setattr(compiled, "entry", entry)
        return _ENTRY.__wrapped__()


@contextmanager
def tiles_or_emulation() -> Iterator[None]:
    """The processor's tiles where it has them, else emulated ones."""
    if amx.available():
        yield
        return
    FAULTS.clear()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tile_loops, "entry", _compiled)
        patched.setattr("kvboost_kernels.row_attention.cpu.entry", _compiled)
        patched.setattr("kvboost_rag.forward.amx_attention.can_compile", lambda: True)
        yield
    assert not FAULTS
    assert not _TILES, "a thread has not given its tiles back"
