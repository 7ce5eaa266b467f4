"""Row attention on matrix tiles: the two products, and how their operands are laid out.

TDPBF16PS adds to a tile of float32 the product of a left-hand tile (16 by 32, bfloat16, as it lies in memory) and a
right-hand one (32 by 16, each two rows interleaved). Both products have rows of query as columns of the result, so that
a lane of the vector code between them is a row, and keys, the larger operand, are read as they lie.

| register | `multiply_keys`: logits = keys @ query.T | `accumulate_values`: output.T += values.T @ weights |
|---|---|---|
| 0, 1 (sums, float32) | 16 keys × 16 rows, of either tile | 16 channels × 16 rows, of either tile |
| 2 (left) | 16 keys × 32 channels, from the buffer | 16 channels × 32 keys, packed once a key head |
| 3, 4 (right) | 32 channels × 16 rows, packed once a pair | 32 keys × 16 rows, from `tile_steps.exp_weights` |
| 5, 6, 7 | free | free |

One left-hand tile serves both tiles of rows. `both` is whether the second of them has any row.
"""

from __future__ import annotations

from kvboost_kernels import amx
from kvboost_kernels.amx import CLEARS, LOADS, STORES, dot
from kvboost_kernels.compiled import inner
from kvboost_kernels.lanes import LANE_BYTES
from kvboost_kernels.row_attention import tile_steps as steps
from kvboost_kernels.row_attention.tile_work import BLOCK, LOGITS_BYTES, TILE_BYTES, WEIGHTS_BYTES, Scratch, Work

clear_0, clear_1 = CLEARS[0], CLEARS[1]
load_0, load_1, load_left, load_right_0, load_right_1 = LOADS[:5]
store_0, store_1 = STORES[0], STORES[1]
dot_0, dot_1 = dot(0, 2, 3), dot(1, 2, 4)


@inner
def pack_query(work: Work, head: int, row: int, scratch: Scratch) -> None:
    """Rows `[row, row + 32)` of a head as right-hand tiles; zeros after the last."""
    num_steps = work.channels // 32
    for tile in range(2):
        first = row + tile * 16
        source = work.query.address + head * work.query.head + first * work.query.row
        for step in range(num_steps if first < work.rows else 0):
            target = scratch.query + (tile * num_steps + step) * TILE_BYTES
            amx.pack_right(source + step * 64, work.query.row, work.rows - first, target)


@inner
def pack_values(work: Work, kv_head: int, scratch: Scratch) -> None:
    """Values of a key head as left-hand tiles. Zeros for keys that no row sees: what lies there may be anything, NaN
    too."""
    values, tiles = work.values.address + kv_head * work.values.head, work.value_channels // 16
    for key in range(work.begin // BLOCK * BLOCK, work.end, 32):
        for tile in range(tiles):
            source = values + key * work.values.row + tile * 32
            target = scratch.values + (key // 32 * tiles + tile) * TILE_BYTES
            if work.begin <= key and key + 32 <= work.end:
                steps.pack_32_values(source, work.values.row, target)
            elif key + 32 <= work.begin:
                steps.clear_tile(target)
            else:
                first, end = max(0, work.begin - key), min(32, work.end - key)
                steps.pack_values(source, work.values.row, first, end, target)


@inner
def copy_tail(work: Work, kv_head: int, scratch: Scratch) -> None:
    """The keys after the last whole tile of them, and zeros."""
    keys, first = work.keys.address + kv_head * work.keys.head, work.kv_len // 16 * 16
    for key in range(first, first + 16):
        for step in range(work.channels // 32):
            target = scratch.tail + (key - first) * work.channels * 2 + step * 64
            steps.copy_row(keys + key * work.keys.row + step * 64, work.kv_len - key, target)


@inner
def multiply_keys(work: Work, keys: int, key: int, both: bool, logits: int, scratch: Scratch) -> None:
    """`logits[:16] = keys[key : key + 16] @ query.T`, float32, for either tile of rows (`LOGITS_BYTES` apart)."""
    num_steps = work.channels // 32
    if key + 16 <= work.kv_len:
        source, stride = keys + key * work.keys.row, work.keys.row
    else:
        source, stride = scratch.tail, work.channels * 2
    clear_0()
    clear_1()
    for step in range(num_steps):
        load_left(source + step * 64, stride)
        load_right_0(scratch.query + step * TILE_BYTES, 64)
        dot_0()
        if both:
            load_right_1(scratch.query + (num_steps + step) * TILE_BYTES, 64)
            dot_1()
    store_0(logits, 64)
    if both:
        store_1(logits + LOGITS_BYTES, 64)


@inner
def accumulate_values(
    work: Work, channel: int, both: bool, keys: tuple[int, int], weights: int, scratch: Scratch
) -> None:
    """`output.T[16 * channel :][:16] += values[keys].T[16 * channel :][:16] @ weights`, for either tile of rows.

    Args:
        channel: of `value_channels // 16`.
        keys: the first, and how many.
        weights: `[keys, 16 rows]` as right-hand tiles, `WEIGHTS_BYTES` apart.
    """
    first, count = keys
    tiles = work.value_channels // 16
    one, two = scratch.output + channel * TILE_BYTES, scratch.output + (tiles + channel) * TILE_BYTES
    load_0(one, 64)
    if both:
        load_1(two, 64)
    for key in range(0, count, 32):
        load_left(scratch.values + ((first + key) // 32 * tiles + channel) * TILE_BYTES, 64)
        load_right_0(weights + key * LANE_BYTES // 2, 64)
        dot_0()
        if both:
            load_right_1(weights + WEIGHTS_BYTES + key * LANE_BYTES // 2, 64)
            dot_1()
    store_0(one, 64)
    if both:
        store_1(two, 64)
