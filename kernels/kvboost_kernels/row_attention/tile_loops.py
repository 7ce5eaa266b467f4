"""Row attention on matrix tiles: the loops that numba compiles. Called by `cpu.py`; their twin is `reference.py`.

FlashAttention's online softmax (arXiv 2205.14135) over blocks of `BLOCK` keys, here m and l are `peaks` and `totals`:

    m' = max(m, max(logits));  c = exp(m − m');  w = exp(logits − m');  l' = l · c + Σ w;  out' = out · c + w @ values

Exponentials are powers of two of logits · scaling · log2(e).
"""

from __future__ import annotations

from functools import cache
from typing import Any

from kvboost_kernels import amx, compiled, lanes
from kvboost_kernels.compiled import INTEGER_BYTES, inner
from kvboost_kernels.lanes import LANE_BYTES, fetch_add
from kvboost_kernels.row_attention import tile_products, tile_work
from kvboost_kernels.row_attention import tile_steps as steps
from kvboost_kernels.row_attention.tile_products import (
    accumulate_values,
    copy_tail,
    multiply_keys,
    pack_query,
    pack_values,
)
from kvboost_kernels.row_attention.tile_work import (
    BLOCK,
    LOGITS_BYTES,
    NUM_FIELDS,
    TILE_BYTES,
    WEIGHTS_BYTES,
    Scratch,
    Work,
    highest,
    lowest,
    num_tiles,
    read_work,
    scratch_of,
    visible_keys,
)


@inner
def _mask(work: Work, tile: int, logits: int, first: int, last: int) -> None:
    """Mark the logits of keys `[first, last)` that a row of the tile does not see."""
    low, high = lowest(work, tile), highest(work, tile)
    if last > low or first <= high - work.window:
        for key in range(first, last, 16):
            if key + 15 > low or key <= high - work.window:
                positions = work.positions + tile * LANE_BYTES
                steps.mask(logits + (key - first) * LANE_BYTES, key, positions, work.window)


@inner
def _update_max(work: Work, state: int, logits: int, count: int) -> None:
    """Bring a row's maximum and sum of weights up to `count` more keys."""
    peak, total, raised, factor = state, state + 2 * LANE_BYTES, state + 4 * LANE_BYTES, state + 6 * LANE_BYTES
    steps.copy_lanes(peak, raised)
    for key in range(0, count, 16):
        steps.update_max(logits + key * LANE_BYTES, raised)
    steps.rescale(peak, raised, work.settings + LANE_BYTES, total, factor)


@inner
def _finish(work: Work, head: int, tile: int, which: int, scratch: Scratch) -> None:
    """Output of a tile of rows, `output / total` rounded to bfloat16; and what its log-sum-exp is made of."""
    state = scratch.state + which * LANE_BYTES
    peak, total, inverse = state, state + 2 * LANE_BYTES, state + 6 * LANE_BYTES
    row, tiles = tile * 16, work.value_channels // 16
    steps.invert(total, inverse)
    target = work.output.address + head * work.output.head + row * work.output.row
    for channel in range(tiles):
        source = scratch.output + (which * tiles + channel) * TILE_BYTES
        steps.write_rows(source, inverse, target + channel * 32, work.output.row, work.rows - row)
    place = (head * num_tiles(work) + tile) * LANE_BYTES
    steps.copy_lanes(peak, work.peaks + place)
    steps.copy_lanes(total, work.totals + place)


@inner
def _attend(work: Work, head: int, tile: int, both: bool, scratch: Scratch) -> None:
    """Attention of a pair of tiles of one head's rows.

    Three blocks of keys are under way at once, step by step: logits of the next one, weights of the current one, values
    of the one before. A tile that is read just after it was written, or the other way round, would wait for memory.
    """
    keys = work.keys.address + head // work.group * work.keys.head
    tiles, num_rows = work.value_channels // 16, 2 if both else 1
    pack_query(work, head, tile * 16, scratch)
    for which in range(2):
        steps.begin(scratch.state + which * LANE_BYTES, scratch.state + (2 + which) * LANE_BYTES)
    for place in range(2 * tiles):
        steps.clear_tile(scratch.output + place * TILE_BYTES)
    low, high = visible_keys(work, tile)
    for key in range(low, min(low + BLOCK, high), 16):
        multiply_keys(work, keys, key, both, scratch.logits + (key - low) * LANE_BYTES, scratch)
    before, parity = 0, 0
    for key in range(low, high + BLOCK, BLOCK):
        count, after = max(0, min(BLOCK, high - key)), max(0, min(BLOCK, high - key - BLOCK))
        logits = scratch.logits + parity * 2 * LOGITS_BYTES
        next_logits = scratch.logits + (1 - parity) * 2 * LOGITS_BYTES
        weights = scratch.weights + parity * 2 * WEIGHTS_BYTES
        last_weights = scratch.weights + (1 - parity) * 2 * WEIGHTS_BYTES
        for which in range(num_rows if count else 0):
            _mask(work, tile + which, logits + which * LOGITS_BYTES, key, key + count)
            _update_max(work, scratch.state + which * LANE_BYTES, logits + which * LOGITS_BYTES, count)
        for step in range(BLOCK // 16):
            if step * 16 < after:
                target = next_logits + step * 16 * LANE_BYTES
                multiply_keys(work, keys, key + BLOCK + step * 16, both, target, scratch)
            which, start = step // (BLOCK // 32), step % (BLOCK // 32) * 32
            if which < num_rows and start < count:
                state = scratch.state + which * LANE_BYTES
                source = logits + which * LOGITS_BYTES + start * LANE_BYTES
                target = weights + which * WEIGHTS_BYTES + start * LANE_BYTES // 2
                steps.exp_weights(source, state, work.settings + LANE_BYTES, state + 2 * LANE_BYTES, target)
            for channel in range(tiles * step // (BLOCK // 16), tiles * (step + 1) // (BLOCK // 16)):
                accumulate_values(work, channel, both, (key - BLOCK, before), last_weights, scratch)
        for which in range(num_rows if count else 0):
            for channel in range(tiles):
                place = scratch.output + (which * tiles + channel) * TILE_BYTES
                steps.multiply(place, scratch.state + (6 + which) * LANE_BYTES)
        before, parity = count, 1 - parity
    for which in range(num_rows):
        _finish(work, head, tile + which, which, scratch)


@inner
def _measure(work: Work, head: int, tile: int, both: bool, scratch: Scratch) -> None:
    """Add the weights that a pair of tiles of one head's rows gives each key to the part's own sums, a lane a row."""
    keys = work.keys.address + head // work.group * work.keys.head
    pack_query(work, head, tile * 16, scratch)
    low, high = visible_keys(work, tile)
    for key in range(low, high, BLOCK):
        stop = min(key + BLOCK, high)
        for start in range(key, stop, 16):
            multiply_keys(work, keys, start, both, scratch.logits + (start - key) * LANE_BYTES, scratch)
        for which in range(2 if both else 1):
            offset = work.totals + (head * num_tiles(work) + tile + which) * LANE_BYTES
            logits = scratch.logits + which * LOGITS_BYTES
            _mask(work, tile + which, logits, key, stop)
            for start in range(key, stop, 16):
                source, sums = logits + (start - key) * LANE_BYTES, scratch.values + start * LANE_BYTES
                steps.add_mass(source, offset, work.settings + LANE_BYTES, sums)


@inner
def _measure_head(work: Work, head: int, scratch: Scratch) -> None:
    """The mass of one head: by one part, so that its sums are made up in one order."""
    for key in range(0, work.end, 16):
        steps.clear_tile(scratch.values + key * LANE_BYTES)
    for tile in range(0, num_tiles(work), 2):
        _measure(work, head, tile, (tile + 1) * 16 < work.rows, scratch)
    for key in range(0, work.end, 16):
        steps.sum_lanes(scratch.values + key * LANE_BYTES, work.mass + head * work.mass_bytes + key * 4)


@inner
def _part(work: Work, taken: int, begun: int) -> None:
    """Take items until none is left: for the mass heads, else pairs of tiles, of each head the longest rows first."""
    amx.configure(work.settings)
    scratch, packed, pairs = scratch_of(work, fetch_add(begun)), -1, num_tiles(work) // 2
    item = fetch_add(taken)
    while item < work.items:
        head = item // (1 if work.mass else pairs)
        if head // work.group != packed:
            packed = head // work.group
            copy_tail(work, packed, scratch)
            if not work.mass:
                pack_values(work, packed, scratch)
        if work.mass:
            _measure_head(work, head, scratch)
        else:
            tile = (pairs - 1 - item % pairs) * 2
            _attend(work, head, tile, (tile + 1) * 16 < work.rows, scratch)
        item = fetch_add(taken)
    amx.release()


@cache
def entry() -> Any:
    """The C function that computes one part of a call, given the address of a `Work`'s numbers
    and the counters after them: items taken, parts begun.

    Compiled, or loaded from numba's cache, before this returns.

    Raises:
        RuntimeError: this process may not use matrix tiles.
    """
    if not amx.available():
        raise RuntimeError("this processor has no matrix tiles, or the system or numba's settings keep them back")
    modules = (amx, compiled, lanes, steps, tile_work, tile_products)
    version = compiled.digest([*(str(module.__file__) for module in modules), __file__])

    def part(arguments):  # type: ignore[no-untyped-def]
        _ = version  # part of the key in numba's cache
        counters = arguments + NUM_FIELDS * INTEGER_BYTES
        _part(read_work(arguments), counters, counters + INTEGER_BYTES)

    return compiled.entry(part)
