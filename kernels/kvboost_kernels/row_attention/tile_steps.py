"""The steps of row attention on matrix tiles, as vector code over sixteen rows: a lane is a row, a vector a key.

Each says in numpy's terms what it does; `tests/kernels/test_tile_steps.py` holds it to that.

With logits as `keys @ query.T` a row's maximum and sum run down its lane, so that no step sums across one; keys are
read as they lie, and only the query and the values are laid out anew.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from kvboost_kernels import lanes
from kvboost_kernels.amx import rows_apart
from kvboost_kernels.lanes import HALVES, INT64, LANE_BYTES, LANES, WORDS, emitted, floats, load, store, words

MASKED = -3e30
"""Logit of a key that a row does not see: finite, so that a row that sees nothing yet stays free of NaN."""
LOWEST = -1e30
"""A row's maximum before its first key."""


def _interleave(builder: Any, keys: list[Any], tile: Any) -> None:
    pairs = []
    for even, odd in zip(keys[::2], keys[1::2], strict=True):
        upper = builder.shl(builder.zext(odd, WORDS), words(16))
        pairs.append(builder.or_(builder.zext(even, WORDS), upper))
    for channel, vector in enumerate(lanes.transposed(builder, pairs)):
        store(builder, vector, tile, LANE_BYTES * channel)


@emitted
def pack_values(builder: Any, source: Any, stride: Any, first: Any, end: Any, tile: Any) -> None:
    """Sixteen channels of keys `[first, end)` of 32, zeros for the others, as a left-hand tile: a row a channel."""
    _interleave(builder, rows_apart(builder, source, stride, first, end, HALVES, 2 * LANES), tile)


@emitted
def pack_32_values(builder: Any, source: Any, stride: Any, tile: Any) -> None:
    """`pack_values` of 32 keys."""
    offsets = (builder.mul(stride, ir.Constant(INT64, key)) for key in range(2 * LANES))
    _interleave(builder, [load(builder, source, offset, HALVES) for offset in offsets], tile)


@emitted
def mask(builder: Any, logits: Any, first_key: Any, positions: Any, window: Any) -> None:
    """`logits[position - window < key <= position or MASKED]` of sixteen keys: a vector a key, a lane a row."""
    position = load(builder, positions, 0, WORDS)
    oldest = builder.sub(position, lanes.broadcast(builder, window))
    first = lanes.broadcast(builder, first_key)
    for row in range(LANES):
        key = builder.add(first, words(row))
        seen = builder.and_(builder.icmp_signed("<=", key, position), builder.icmp_signed(">", key, oldest))
        logit = load(builder, logits, LANE_BYTES * row)
        store(builder, builder.select(seen, logit, floats(MASKED)), logits, LANE_BYTES * row)


@emitted
def update_max(builder: Any, logits: Any, peak: Any) -> None:
    """`peak = maximum(peak, logits.max(0))`, of sixteen keys' logits."""
    found = [load(builder, logits, LANE_BYTES * row) for row in range(LANES)]
    while len(found) > 1:  # in pairs: one after the other, each would wait for the one before
        found = [lanes.larger(builder, a, b) for a, b in zip(found[::2], found[1::2], strict=True)]
    store(builder, lanes.larger(builder, found[0], load(builder, peak)), peak)


@emitted
def rescale(builder: Any, old: Any, new: Any, scale: Any, total: Any, factor: Any) -> None:
    """`factor = exp2((old - new) * scale)`; `total *= factor`; `old = new`."""
    before, after, times = load(builder, old), load(builder, new), load(builder, scale)
    change = lanes.exp2(builder, builder.fmul(builder.fsub(before, after), times))
    # Exactly 1 where nothing changes: a row must not depend on how many blocks it is taken through.
    change = builder.select(builder.fcmp_ordered("==", before, after), floats(1.0), change)
    store(builder, change, factor)
    store(builder, builder.fmul(load(builder, total), change), total)
    store(builder, after, old)


@emitted
def multiply(builder: Any, tile: Any, factor: Any) -> None:
    """`tile *= factor`, a lane a row."""
    by = load(builder, factor)
    for row in range(LANES):
        store(builder, builder.fmul(load(builder, tile, LANE_BYTES * row), by), tile, LANE_BYTES * row)


@emitted
def exp_weights(builder: Any, logits: Any, peak: Any, scale: Any, total: Any, tile: Any) -> None:
    """`weights = exp2((logits - peak) * scale)` of 32 keys; `total += weights.sum(0)`.

    `tile`: the weights as a right-hand tile, rounded to bfloat16 (the halfway case up).
    """
    times, top = load(builder, scale), load(builder, peak)
    below = builder.fneg(builder.fmul(top, times))
    sums = [floats(0.0), floats(0.0)]
    for pair in range(LANES):
        halves = []
        for odd in range(2):
            logit = load(builder, logits, LANE_BYTES * (2 * pair + odd))
            weight = lanes.exp2(builder, lanes.multiply_add(builder, logit, times, below))
            sums[odd] = builder.fadd(sums[odd], weight)
            halves.append(builder.add(builder.bitcast(weight, WORDS), words(0x8000)))
        even, odd_half = builder.lshr(halves[0], words(16)), builder.and_(halves[1], words(0xFFFF0000))
        store(builder, builder.or_(even, odd_half), tile, LANE_BYTES * pair)
    store(builder, builder.fadd(load(builder, total), builder.fadd(*sums)), total)


@emitted
def add_mass(builder: Any, logits: Any, offset: Any, scale: Any, mass: Any) -> None:
    """`mass += exp2(logits * scale - offset)`, of sixteen keys."""
    times, below = load(builder, scale), builder.fneg(load(builder, offset))
    for row in range(LANES):
        logit = load(builder, logits, LANE_BYTES * row)
        weight = lanes.exp2(builder, lanes.multiply_add(builder, logit, times, below))
        store(builder, builder.fadd(load(builder, mass, LANE_BYTES * row), weight), mass, LANE_BYTES * row)


@emitted
def sum_lanes(builder: Any, tile: Any, target: Any) -> None:
    """`target = tile.sum(1)`: each of a tile's vectors as one number."""
    found = lanes.transposed(builder, [load(builder, tile, LANE_BYTES * row) for row in range(LANES)])
    while len(found) > 1:
        found = [builder.fadd(a, b) for a, b in zip(found[::2], found[1::2], strict=True)]
    store(builder, found[0], target)


@emitted
def begin(builder: Any, peak: Any, total: Any) -> None:
    """`peak = LOWEST`; `total = 0`: rows before their first key."""
    store(builder, floats(LOWEST), peak)
    store(builder, floats(0.0), total)


@emitted
def copy_lanes(builder: Any, source: Any, target: Any) -> None:
    """`target = source`, one vector."""
    store(builder, load(builder, source), target)


@emitted
def clear_tile(builder: Any, tile: Any) -> None:
    """Zeros in memory, as large as a tile."""
    for row in range(LANES):
        store(builder, floats(0.0), tile, LANE_BYTES * row)


@emitted
def copy_row(builder: Any, source: Any, channels_left: Any, target: Any) -> None:
    """32 channels of a key; zeros where it does not exist."""
    exists = builder.icmp_signed(">", channels_left, ir.Constant(INT64, 0))
    with builder.if_else(exists) as (there, missing):
        with there:
            store(builder, load(builder, source, 0, WORDS), target)
        with missing:
            store(builder, words(0), target)


@emitted
def invert(builder: Any, total: Any, inverse: Any) -> None:
    """`inverse = 1 / total`."""
    store(builder, builder.fdiv(floats(1.0), load(builder, total)), inverse)


@emitted
def write_rows(builder: Any, tile: Any, inverse: Any, target: Any, stride: Any, count: Any) -> None:
    """`target[row, :16] = bfloat16(tile[:, row] * inverse[row])` of up to sixteen rows, `stride` bytes apart."""
    by = load(builder, inverse)
    channels = [builder.fmul(load(builder, tile, LANE_BYTES * row), by) for row in range(LANES)]
    for row, vector in enumerate(lanes.transposed(builder, channels)):
        with builder.if_then(builder.icmp_signed("<", ir.Constant(INT64, row), count)):
            store(builder, lanes.as_bfloat16(builder, vector), target, builder.mul(stride, ir.Constant(INT64, row)))
