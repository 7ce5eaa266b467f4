"""Steps of `row_linear` on matrix tiles, as vector code: a tile of results has an output a row, an input row a lane."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from kvboost_kernels import lanes
from kvboost_kernels.lanes import INT64, LANE_BYTES, LANES, call, emitted, load, store

_BYTE, _INT32 = ir.IntType(8), ir.IntType(32)
_READ, _TO_L2, _DATA = (ir.Constant(_INT32, number) for number in (0, 2, 1))


@emitted
def write_outputs(builder: Any, tile: Any, bias: Any, target: Any, stride: Any, count: Any) -> None:
    """Sixteen outputs, `bias` added, of up to sixteen rows that lie `stride` apart, rounded to bfloat16."""
    shift = load(builder, bias)
    outputs = [load(builder, tile, LANE_BYTES * row) for row in range(LANES)]
    for row, vector in enumerate(lanes.transposed(builder, outputs)):
        with builder.if_then(builder.icmp_signed("<", ir.Constant(INT64, row), count)):
            rounded = lanes.as_bfloat16(builder, builder.fadd(vector, shift))
            store(builder, rounded, target, builder.mul(stride, ir.Constant(INT64, row)))


@emitted
def prefetch(builder: Any, address: Any) -> None:
    """Ask for 2 KB to be brought into the second-level cache."""
    for line in range(32):
        pointer = lanes.at(builder, address, LANE_BYTES * line, _BYTE)
        call(builder, "llvm.prefetch.p0", ir.VoidType(), pointer, _READ, _TO_L2, _DATA)
