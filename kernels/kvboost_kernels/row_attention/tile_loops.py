"""Row attention on matrix tiles: the loops that numba compiles. Called by `cpu.py`, which says what is computed."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from kvboost_kernels import amx, compiled, lanes
from kvboost_kernels.amx import CLEARS, LOADS, STORES, dot
from kvboost_kernels.compiled import INTEGER_BYTES, inner, reader_of_fields
from kvboost_kernels.lanes import LANE_BYTES, read_integer, take_number
from kvboost_kernels.row_attention import tile_steps as steps

BLOCK = 128
"""Keys between two looks at the rows' maxima."""
_LOGITS_BYTES, _WEIGHTS_BYTES = BLOCK * LANE_BYTES, BLOCK * LANE_BYTES // 2

clear_0, clear_1 = CLEARS[0], CLEARS[1]
load_0, load_1, load_left, load_right_0, load_right_1 = LOADS[:5]
store_0, store_1 = STORES[0], STORES[1]
dot_0, dot_1 = dot(0, 2, 3), dot(1, 2, 4)


class Work(NamedTuple):
    """One call in the terms of compiled code: sizes, addresses, and strides in bytes.

    Attributes:
        positions: of int32, all rows', the last one's repeated up to whole pairs of tiles (32 rows).
        bounds: of int64, lowest and highest position of each sixteen rows.
        peaks, totals: of float32 `[num_heads, padded rows]`: each row's largest logit, and its sum of weights over it;
            for the mass, instead of totals, log2 of the sum of exponentials, infinite for rows that do not count.
        mass: of float32 `[num_heads, padded end]`; 0 where attention itself is wanted.
        settings: 64 bytes that configure the tiles, then sixteen times scaling · log2(e).
        scratch, scratch_bytes: memory for each part, and how much.
        kv_len: keys that exist in memory.
        begin, end: the first key that some row sees, and the one behind the last.
        window: a row sees as many keys, its own included.
        items: heads; where attention itself is wanted, times pairs of tiles of rows.
    """

    query: int
    query_head: int
    query_row: int
    keys: int
    keys_head: int
    keys_row: int
    values: int
    values_head: int
    values_row: int
    output: int
    output_head: int
    output_row: int
    positions: int
    bounds: int
    peaks: int
    totals: int
    mass: int
    mass_bytes: int
    settings: int
    scratch: int
    scratch_bytes: int
    rows: int
    group: int
    kv_len: int
    begin: int
    end: int
    window: int
    channels: int
    value_channels: int
    items: int


NUM_FIELDS = len(Work._fields)
_fields = reader_of_fields(NUM_FIELDS)


class Scratch(NamedTuple):
    """Addresses within a part's own memory."""

    lanes: int
    logits: int
    weights: int
    query: int
    output: int
    tail: int
    values: int


def scratch_bytes(channels: int, value_channels: int, end: int) -> int:
    """What a part needs, in whole vectors. For the mass a vector of sums a key takes the place of values."""
    fixed = 8 * LANE_BYTES + 4 * _LOGITS_BYTES + 4 * _WEIGHTS_BYTES
    return fixed + 64 * channels + 128 * value_channels + 32 * channels + 2 * value_channels * (end + 32) + LANE_BYTES


@inner
def _part_scratch(work, part):
    start = work.scratch + part * work.scratch_bytes
    logits = start + 8 * LANE_BYTES
    weights = logits + 4 * _LOGITS_BYTES
    query = weights + 4 * _WEIGHTS_BYTES
    output = query + 64 * work.channels
    tail = output + 128 * work.value_channels
    return Scratch(start, logits, weights, query, output, tail, tail + 32 * work.channels)


@inner
def _lowest(work, tile):
    return read_integer(work.bounds + 16 * tile)


@inner
def _highest(work, tile):
    return read_integer(work.bounds + 16 * tile + 8)


@inner
def _pack_query(work, head, row, scratch):
    num_steps = work.channels // 32
    for tile in range(2):
        first = row + tile * 16
        source = work.query + head * work.query_head + first * work.query_row
        for step in range(num_steps if first < work.rows else 0):
            target = scratch.query + (tile * num_steps + step) * 1024
            amx.pack_right(source + step * 64, work.query_row, work.rows - first, target)


@inner
def _pack_values(work, kv_head, scratch):
    """Values of a key head as tiles. Zeros for keys that no row sees: what lies there may be anything, NaN too."""
    values, tiles = work.values + kv_head * work.values_head, work.value_channels // 16
    for key in range(work.begin // BLOCK * BLOCK, work.end, 32):
        for tile in range(tiles):
            source = values + key * work.values_row + tile * 32
            target = scratch.values + (key // 32 * tiles + tile) * 1024
            if work.begin <= key and key + 32 <= work.end:
                steps.pack_32_values(source, work.values_row, target)
            elif key + 32 <= work.begin:
                steps.clear_tile(target)
            else:
                first, end = max(0, work.begin - key), min(32, work.end - key)
                steps.pack_values(source, work.values_row, first, end, target)


@inner
def _copy_tail(work, kv_head, scratch):
    """The keys behind the last whole tile of them, and zeros."""
    keys, first = work.keys + kv_head * work.keys_head, work.kv_len // 16 * 16
    for key in range(first, first + 16):
        for step in range(work.channels // 32):
            target = scratch.tail + (key - first) * work.channels * 2 + step * 64
            steps.copy_row(keys + key * work.keys_row + step * 64, work.kv_len - key, target)


@inner
def _seen(work, tile):
    """The keys that some row of a pair of tiles sees, from a multiple of `BLOCK` in steps of 32.

    Blocks begin where they do for any other rows, so that a row's sums are made up in the same order.
    """
    lowest = min(_lowest(work, tile), _lowest(work, tile + 1))
    highest = max(_highest(work, tile), _highest(work, tile + 1))
    return max(0, lowest - work.window + 1) // BLOCK * BLOCK, (highest + 32) // 32 * 32


@inner
def _multiply_keys(work, keys, key, both, logits, scratch):
    """Logits of sixteen keys for the sixteen rows of a tile, and of the next one."""
    num_steps = work.channels // 32
    if key + 16 <= work.kv_len:
        source, stride = keys + key * work.keys_row, work.keys_row
    else:
        source, stride = scratch.tail, work.channels * 2
    clear_0()
    clear_1()
    for step in range(num_steps):
        load_left(source + step * 64, stride)
        load_right_0(scratch.query + step * 1024, 64)
        dot_0()
        if both:
            load_right_1(scratch.query + (num_steps + step) * 1024, 64)
            dot_1()
    store_0(logits, 64)
    if both:
        store_1(logits + _LOGITS_BYTES, 64)


@inner
def _hide(work, tile, logits, first, last):
    """Mark the logits of keys `[first, last)` that a row of the tile does not see."""
    lowest, highest = _lowest(work, tile), _highest(work, tile)
    if last > lowest or first <= highest - work.window:
        for key in range(first, last, 16):
            if key + 15 > lowest or key <= highest - work.window:
                positions = work.positions + tile * LANE_BYTES
                steps.hide(logits + (key - first) * LANE_BYTES, key, positions, work.window)


@inner
def _raise_peak(work, state, logits, count):
    """Bring a row's maximum and sum of weights up to `count` more keys."""
    peak, total, raised, factor = state, state + 2 * LANE_BYTES, state + 4 * LANE_BYTES, state + 6 * LANE_BYTES
    steps.copy_lanes(peak, raised)
    for key in range(0, count, 16):
        steps.raise_peak(logits + key * LANE_BYTES, raised)
    steps.move_peak(peak, raised, work.settings + LANE_BYTES, total, factor)


@inner
def _mix_values(work, channel, both, first, count, weights, scratch):
    """Add `count` weighted values from key `first` on to sixteen channels of the output."""
    tiles = work.value_channels // 16
    one, two = scratch.output + channel * 1024, scratch.output + (tiles + channel) * 1024
    load_0(one, 64)
    if both:
        load_1(two, 64)
    for key in range(0, count, 32):
        load_left(scratch.values + ((first + key) // 32 * tiles + channel) * 1024, 64)
        load_right_0(weights + key * LANE_BYTES // 2, 64)
        dot_0()
        if both:
            load_right_1(weights + _WEIGHTS_BYTES + key * LANE_BYTES // 2, 64)
            dot_1()
    store_0(one, 64)
    if both:
        store_1(two, 64)


@inner
def _finish(work, head, tile, which, scratch):
    state = scratch.lanes + which * LANE_BYTES
    peak, total, inverse = state, state + 2 * LANE_BYTES, state + 6 * LANE_BYTES
    row, tiles = tile * 16, work.value_channels // 16
    steps.invert(total, inverse)
    target = work.output + head * work.output_head + row * work.output_row
    for channel in range(tiles):
        source = scratch.output + (which * tiles + channel) * 1024
        steps.write_rows(source, inverse, target + channel * 32, work.output_row, work.rows - row)
    place = (head * _num_tiles(work) + tile) * LANE_BYTES
    steps.copy_lanes(peak, work.peaks + place)
    steps.copy_lanes(total, work.totals + place)


@inner
def _num_tiles(work):
    return (work.rows + 31) // 32 * 2


@inner
def _attend(work, head, tile, both, scratch):
    """Attention of a pair of tiles of one head's rows.

    Three blocks of keys are under way at once, step by step: logits of the next one, weights of the current one, values
    of the one before. A tile that is read just after it was written, or the other way round, would wait for memory.
    """
    keys = work.keys + head // work.group * work.keys_head
    tiles, num_rows = work.value_channels // 16, 2 if both else 1
    _pack_query(work, head, tile * 16, scratch)
    for which in range(2):
        steps.begin(scratch.lanes + which * LANE_BYTES, scratch.lanes + (2 + which) * LANE_BYTES)
    for place in range(2 * tiles):
        steps.clear_tile(scratch.output + place * 1024)
    low, high = _seen(work, tile)
    for key in range(low, min(low + BLOCK, high), 16):
        _multiply_keys(work, keys, key, both, scratch.logits + (key - low) * LANE_BYTES, scratch)
    before, parity = 0, 0
    for key in range(low, high + BLOCK, BLOCK):
        count, after = max(0, min(BLOCK, high - key)), max(0, min(BLOCK, high - key - BLOCK))
        logits = scratch.logits + parity * 2 * _LOGITS_BYTES
        next_logits = scratch.logits + (1 - parity) * 2 * _LOGITS_BYTES
        weights = scratch.weights + parity * 2 * _WEIGHTS_BYTES
        last_weights = scratch.weights + (1 - parity) * 2 * _WEIGHTS_BYTES
        for which in range(num_rows if count else 0):
            _hide(work, tile + which, logits + which * _LOGITS_BYTES, key, key + count)
            _raise_peak(work, scratch.lanes + which * LANE_BYTES, logits + which * _LOGITS_BYTES, count)
        for step in range(BLOCK // 16):
            if step * 16 < after:
                target = next_logits + step * 16 * LANE_BYTES
                _multiply_keys(work, keys, key + BLOCK + step * 16, both, target, scratch)
            which, start = step // (BLOCK // 32), step % (BLOCK // 32) * 32
            if which < num_rows and start < count:
                state = scratch.lanes + which * LANE_BYTES
                source = logits + which * _LOGITS_BYTES + start * LANE_BYTES
                target = weights + which * _WEIGHTS_BYTES + start * LANE_BYTES // 2
                steps.weigh(source, state, work.settings + LANE_BYTES, state + 2 * LANE_BYTES, target)
            for channel in range(tiles * step // (BLOCK // 16), tiles * (step + 1) // (BLOCK // 16)):
                _mix_values(work, channel, both, key - BLOCK, before, last_weights, scratch)
        for which in range(num_rows if count else 0):
            for channel in range(tiles):
                place = scratch.output + (which * tiles + channel) * 1024
                steps.multiply(place, scratch.lanes + (6 + which) * LANE_BYTES)
        before, parity = count, 1 - parity
    for which in range(num_rows):
        _finish(work, head, tile + which, which, scratch)


@inner
def _measure(work, head, tile, both, scratch):
    """Add the weights that a pair of tiles of one head's rows gives each key to the part's own sums, a lane a row."""
    keys = work.keys + head // work.group * work.keys_head
    _pack_query(work, head, tile * 16, scratch)
    low, high = _seen(work, tile)
    for key in range(low, high, BLOCK):
        stop = min(key + BLOCK, high)
        for start in range(key, stop, 16):
            _multiply_keys(work, keys, start, both, scratch.logits + (start - key) * LANE_BYTES, scratch)
        for which in range(2 if both else 1):
            offset = work.totals + (head * _num_tiles(work) + tile + which) * LANE_BYTES
            logits = scratch.logits + which * _LOGITS_BYTES
            _hide(work, tile + which, logits, key, stop)
            for start in range(key, stop, 16):
                source, sums = logits + (start - key) * LANE_BYTES, scratch.values + start * LANE_BYTES
                steps.add_mass(source, offset, work.settings + LANE_BYTES, sums)


@inner
def _measure_head(work, head, scratch):
    """The mass of one head: by one part, so that its sums are made up in one order."""
    for key in range(0, work.end, 16):
        steps.clear_tile(scratch.values + key * LANE_BYTES)
    for tile in range(0, _num_tiles(work), 2):
        _measure(work, head, tile, (tile + 1) * 16 < work.rows, scratch)
    for key in range(0, work.end, 16):
        steps.sum_lanes(scratch.values + key * LANE_BYTES, work.mass + head * work.mass_bytes + key * 4)


@inner
def _part(work, taken, begun):
    """Take items until none is left: for the mass heads, else pairs of tiles, of each head the longest rows first."""
    amx.configure(work.settings)
    scratch, packed, pairs = _part_scratch(work, take_number(begun)), -1, _num_tiles(work) // 2
    item = take_number(taken)
    while item < work.items:
        head = item // (1 if work.mass else pairs)
        if head // work.group != packed:
            packed = head // work.group
            _copy_tail(work, packed, scratch)
            if not work.mass:
                _pack_values(work, packed, scratch)
        if work.mass:
            _measure_head(work, head, scratch)
        else:
            tile = (pairs - 1 - item % pairs) * 2
            _attend(work, head, tile, (tile + 1) * 16 < work.rows, scratch)
        item = take_number(taken)
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
