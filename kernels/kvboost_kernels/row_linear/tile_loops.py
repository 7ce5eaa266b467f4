"""`row_linear` on matrix tiles: the loops that numba compiles. Called by `cpu.py`."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from kvboost_kernels import amx, compiled, lanes
from kvboost_kernels.amx import CLEARS, LOADS, STORES, dot
from kvboost_kernels.compiled import INTEGER_BYTES, inner, reader_of_fields
from kvboost_kernels.lanes import take_number
from kvboost_kernels.row_linear import tile_steps as steps

clear_0, clear_1, clear_2, clear_3 = CLEARS[:4]
store_0, store_1, store_2, store_3 = STORES[:4]
load_left_0, load_left_1, load_right_0, load_right_1 = LOADS[4:]
dot_0, dot_1, dot_2, dot_3 = dot(0, 4, 6), dot(1, 4, 7), dot(2, 5, 6), dot(3, 5, 7)


class Work(NamedTuple):
    """One call in the terms of compiled code: sizes, addresses, and strides in bytes.

    Attributes:
        bias: of float32; `bias_step` bytes from output to output, 0 where all are the same.
        settings: 64 bytes that configure the tiles.
        scratch, scratch_bytes: memory for each part, and how much.
        items: blocks of 32 outputs.
    """

    rows_in: int
    rows_stride: int
    weights: int
    outputs: int
    outputs_stride: int
    bias: int
    bias_step: int
    settings: int
    scratch: int
    scratch_bytes: int
    num_rows: int
    num_inputs: int
    num_outputs: int
    items: int


NUM_FIELDS = len(Work._fields)
_fields = reader_of_fields(NUM_FIELDS)


def scratch_bytes(num_rows: int, num_inputs: int) -> int:
    """What a part needs: four tiles of results, and all rows as tiles."""
    return 4096 + -(-num_rows // 32) * 64 * num_inputs


@inner
def _pack_rows(work, tiles, packed):
    """All rows as right-hand tiles, those of the same inputs side by side."""
    for step in range(work.num_inputs // 32):
        for tile in range(tiles):
            if tile * 16 < work.num_rows:
                source = work.rows_in + tile * 16 * work.rows_stride + step * 64
                target = packed + (step * tiles + tile) * 1024
                amx.pack_right(source, work.rows_stride, work.num_rows - tile * 16, target)


@inner
def _multiply(work, item, following, tiles, packed, results):
    """32 outputs (or the last sixteen) of all rows; `following` is brought closer meanwhile."""
    output, stride, num_steps = item * 32, work.num_inputs * 2, work.num_inputs // 32
    weights, both = work.weights + output * stride, output + 32 <= work.num_outputs
    ahead = work.weights + following * 32 * stride
    for tile in range(0, tiles, 2):
        clear_0()
        clear_1()
        clear_2()
        clear_3()
        for step in range(num_steps):
            rows = packed + (step * tiles + tile) * 1024
            load_left_0(weights + step * 64, stride)
            load_right_0(rows, 64)
            dot_0()
            load_right_1(rows + 1024, 64)
            dot_1()
            if both:
                load_left_1(weights + 16 * stride + step * 64, stride)
                dot_2()
                dot_3()
            if tile == 0 and following * 32 + 32 <= work.num_outputs:
                steps.prefetch(ahead + step * 2048)
        store_0(results, 64)
        store_1(results + 1024, 64)
        if both:
            store_2(results + 2048, 64)
            store_3(results + 3072, 64)
        for half in range(2 if both else 1):
            first = output + half * 16
            for which in range(2):
                row = (tile + which) * 16
                target = work.outputs + row * work.outputs_stride + first * 2
                source = results + (2 * half + which) * 1024
                bias = work.bias + first * work.bias_step
                steps.write_outputs(source, bias, target, work.outputs_stride, work.num_rows - row)


@inner
def _part(work, taken, begun):
    """Take blocks of outputs until none is left."""
    amx.configure(work.settings)
    results = work.scratch + take_number(begun) * work.scratch_bytes
    tiles, packed = (work.num_rows + 31) // 32 * 2, results + 4096
    item = take_number(taken)
    if item < work.items:
        _pack_rows(work, tiles, packed)
    while item < work.items:
        following = take_number(taken)
        _multiply(work, item, following, tiles, packed, results)
        item = following
    amx.release()


@cache
def entry() -> Any:
    """The C function that computes one part of a call, given the address of a `Work`
    and the counters behind it: items taken, parts begun.

    Compiled, or loaded from numba's cache, before this returns.

    Raises:
        RuntimeError: this process may not use matrix tiles.
    """
    if not amx.available():
        raise RuntimeError("this processor has no matrix tiles, or the system or numba's settings keep them back")
    version = compiled.digest([amx.__file__, compiled.__file__, lanes.__file__, steps.__file__, __file__])

    def part(arguments):
        _ = version  # part of the key in numba's cache
        counters = arguments + NUM_FIELDS * INTEGER_BYTES
        _part(Work(*_fields(arguments)), counters, counters + INTEGER_BYTES)

    return compiled.entry(part)
