"""Row attention on matrix tiles: what one call works on, in the terms of compiled code.

Sixteen rows of query are a tile of rows; two of them, a pair, are attended at a time. Sizes are numbers of rows, keys
and channels; addresses and strides are in bytes.
"""

from __future__ import annotations

from typing import NamedTuple

from kvboost_kernels.compiled import inner, reader_of_fields
from kvboost_kernels.lanes import LANE_BYTES, read_integer

BLOCK = 128
"""Keys between two looks at the rows' maxima."""
LOGITS_BYTES, WEIGHTS_BYTES = BLOCK * LANE_BYTES, BLOCK * LANE_BYTES // 2
TILE_BYTES = 1024


class Heads(NamedTuple):
    """A tensor `[1, H, T, D]` whose channels lie side by side."""

    address: int
    head: int
    """From head to head."""
    row: int
    """From token to token."""


class Work(NamedTuple):
    """One call.

    Attributes:
        query, keys, values, output: bfloat16; the output is 0 where the attention mass is wanted.
        positions: of int32, all rows', the last one's repeated up to whole pairs of tiles (32 rows).
        bounds: of int64, lowest and highest position of each tile of rows.
        peaks, totals: of float32 `[num_heads, padded rows]`: each row's largest logit, and its sum of weights over it;
            for the mass, instead of totals, log2 of the sum of exponentials, infinite for rows that do not count.
        mass: of float32 `[num_heads, padded end]`; 0 where attention itself is wanted.
        settings: 64 bytes that configure the tiles, then sixteen times scaling · log2(e).
        scratch, scratch_bytes: memory for each part, and how much.
        kv_len: keys that exist in memory.
        begin, end: the first key that some row sees, and the one after the last.
        window: a row sees as many keys, its own included.
        items: heads; where attention itself is wanted, times pairs of tiles of rows.
    """

    query: Heads
    keys: Heads
    values: Heads
    output: Heads
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

    def numbers(self) -> list[int]:
        """As `read_work` takes them."""
        query, keys, values, output, *rest = self
        return [*query, *keys, *values, *output, *rest]


NUM_FIELDS = 4 * len(Heads._fields) + len(Work._fields) - 4
_fields = reader_of_fields(NUM_FIELDS)


@inner
def read_work(arguments: int) -> Work:
    """`Work.numbers` at an address."""
    f = _fields(arguments)
    return Work(
        Heads(f[0], f[1], f[2]), Heads(f[3], f[4], f[5]), Heads(f[6], f[7], f[8]), Heads(f[9], f[10], f[11]), *f[12:]
    )


class Scratch(NamedTuple):
    """Addresses within a part's own memory; numbers of vectors are of sixteen float32, a lane a row.

    Attributes:
        state: eight vectors, each quantity for both tiles of the pair: largest logit, sum of weights, new largest
            logit, and the factor that brings what was summed so far to it.
        logits: float32 `[2 buffers, 2 tiles, BLOCK keys, 16 rows]`.
        weights: right-hand tiles of bfloat16 `[2 buffers, 2 tiles, BLOCK // 32, 32 keys, 16 rows]`.
        query: right-hand tiles `[2 tiles, channels // 32, 32 channels, 16 rows]`.
        output: float32 `[2 tiles, value_channels, 16 rows]`.
        tail: the keys after the last whole tile of them, bfloat16 `[16 keys, channels]`.
        values: left-hand tiles `[keys // 32, value_channels // 16, 16 channels, 32 keys]`; for the mass instead sums,
            float32 `[keys, 16 rows]`.
    """

    state: int
    logits: int
    weights: int
    query: int
    output: int
    tail: int
    values: int


def scratch_bytes(channels: int, value_channels: int, end: int) -> int:
    """What a part needs, in whole vectors. For the mass a vector of sums a key takes the place of values."""
    fixed = 8 * LANE_BYTES + 4 * LOGITS_BYTES + 4 * WEIGHTS_BYTES
    return fixed + 64 * channels + 128 * value_channels + 32 * channels + 2 * value_channels * (end + 32) + LANE_BYTES


@inner
def scratch_of(work: Work, part: int) -> Scratch:
    """The memory of one part."""
    start = work.scratch + part * work.scratch_bytes
    logits = start + 8 * LANE_BYTES
    weights = logits + 4 * LOGITS_BYTES
    query = weights + 4 * WEIGHTS_BYTES
    output = query + 64 * work.channels
    tail = output + 128 * work.value_channels
    return Scratch(start, logits, weights, query, output, tail, tail + 32 * work.channels)


@inner
def num_tiles(work: Work) -> int:
    """Tiles of rows, in whole pairs."""
    return (work.rows + 31) // 32 * 2


@inner
def lowest(work: Work, tile: int) -> int:
    """The smallest position of a tile of rows."""
    return read_integer(work.bounds + 16 * tile)


@inner
def highest(work: Work, tile: int) -> int:
    """The largest position of a tile of rows."""
    return read_integer(work.bounds + 16 * tile + 8)


@inner
def visible_keys(work: Work, tile: int) -> tuple[int, int]:
    """Keys `[low, high)` that some row of a pair of tiles sees, from a multiple of `BLOCK` in steps of 32.

    Blocks begin where they do for any other rows, so that a row's sums are made up in the same order.
    """
    first = min(lowest(work, tile), lowest(work, tile + 1))
    last = max(highest(work, tile), highest(work, tile + 1))
    return max(0, first - work.window + 1) // BLOCK * BLOCK, (last + 32) // 32 * 32
