"""`place_chunk` as one Triton kernel over (tile of a chunk, layer, keys or values).

Chunks come as a table of pointers and strides, so that any number of separately allocated tensors share one launch.
The heads of a layer are looped over inside a program: the angles of its tokens are loaded once and stay in registers.
All offsets are 64-bit: a buffer for a long prompt has more than 2**31 elements.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Columns of the table that describe one tensor of a chunk; keys first, then values, after (start, num_tokens).
NUM_HEADER = tl.constexpr(2)
NUM_FIELDS = tl.constexpr(12)


@triton.jit
def load_section(
    codes, scale, offset, s_t, s_d, g_t, g_d, token_group, first, token, live,
    START: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, DIM: tl.constexpr,
    BITS: tl.constexpr, CHANNEL_GROUP: tl.constexpr, ONE_ROW: tl.constexpr,
):  # fmt: skip
    """Channels `[START, START + WIDTH)` of the tokens `token`, dequantised: float32 `[BLOCK_T, BLOCK_D]`."""
    step = tl.arange(0, BLOCK_D).to(tl.int64)
    channel = START + step
    inside = step < WIDTH
    mask = live[:, None] & inside[None, :]
    if BITS == 0:
        return tl.load(codes + token[:, None] * s_t + channel[None, :] * s_d, mask=mask, other=0.0).to(tl.float32)
    if BITS == 8:
        x = tl.load(codes + token[:, None] * s_t + channel[None, :] * s_d, mask=mask, other=0).to(tl.float32)
    else:
        # A section inside one half of the head reads contiguous bytes and one nibble of each.
        HALF: tl.constexpr = DIM // 2
        if START + WIDTH <= HALF:
            byte, shift = channel, step * 0
        elif START >= HALF:
            byte, shift = channel - HALF, step * 0 + 4
        else:
            byte, shift = channel % HALF, (channel // HALF) * 4
        packed = tl.load(codes + token[:, None] * s_t + byte[None, :] * s_d, mask=mask, other=0).to(tl.int32)
        x = ((packed >> shift.to(tl.int32)[None, :]) & 15).to(tl.float32)
    # Scales vary by token and channel; whichever axis is constant over the tile keeps extent 1 and broadcasts.
    if ONE_ROW:
        row = tl.zeros([1], tl.int64) + first // token_group
        row_live = row >= 0
    else:
        row = token // token_group
        row_live = live
    if START // CHANNEL_GROUP == (START + WIDTH - 1) // CHANNEL_GROUP:
        column = tl.zeros([1], tl.int64) + START // CHANNEL_GROUP
        column_live = column >= 0
    else:
        column = channel // CHANNEL_GROUP
        column_live = inside
    at = row[:, None] * g_t + column[None, :] * g_d
    there = row_live[:, None] & column_live[None, :]
    scales = tl.load(scale + at, mask=there, other=0.0).to(tl.float32)
    return x * scales + tl.load(offset + at, mask=there, other=0.0).to(tl.float32)


@triton.jit
def store_section(
    target, d_t, d_d, column, live, x, START: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    step = tl.arange(0, BLOCK_D).to(tl.int64)
    at = column[:, None] * d_t + (START + step)[None, :] * d_d
    tl.store(target + at, x.to(target.dtype.element_ty), mask=live[:, None] & (step < WIDTH)[None, :])


@triton.jit
def place_heads(
    fields, target, d_l, d_h, d_t, d_d, cos, sin, start, first, num_tokens, layer, num_heads,
    SOURCE: tl.constexpr, SCALES: tl.constexpr, BITS: tl.constexpr, CHANNEL_GROUP: tl.constexpr,
    ONE_ROW: tl.constexpr, ALIGNED: tl.constexpr, DIM: tl.constexpr, SECTION: tl.constexpr, ROTARY: tl.constexpr,
    ROTARY_START: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """One tile of tokens of one tensor of one chunk in one layer: every head. `ROTARY` = 0 copies all channels."""
    codes = tl.load(fields + 0).to(tl.pointer_type(SOURCE))
    s_h, s_t, s_d = tl.load(fields + 2), tl.load(fields + 3), tl.load(fields + 4)
    codes += layer * tl.load(fields + 1)
    scale = tl.load(fields + 5).to(tl.pointer_type(SCALES))
    offset = tl.load(fields + 6).to(tl.pointer_type(SCALES))
    g_h, g_t, g_d = tl.load(fields + 8), tl.load(fields + 9), tl.load(fields + 10)
    token_group = tl.load(fields + 11)
    scale += layer * tl.load(fields + 7)
    offset += layer * tl.load(fields + 7)
    if ALIGNED:  # checked by the host for every chunk of the launch: loads of 16 bytes
        codes, s_h, s_t, s_d = tl.multiple_of(codes, 16), tl.multiple_of(s_h, 16), tl.multiple_of(s_t, 16), 1
        scale, offset, g_h, g_d = tl.multiple_of(scale, 16), tl.multiple_of(offset, 16), tl.multiple_of(g_h, 8), 1
        if ONE_ROW:
            g_t = tl.multiple_of(g_t, 8)

    token = first + tl.arange(0, BLOCK_T).to(tl.int64)
    live = token < num_tokens
    column = start + token
    target += layer * d_l

    HALF: tl.constexpr = ROTARY // 2
    BLOCK_H: tl.constexpr = triton.next_power_of_2(max(HALF, 1))
    if ROTARY > 0:
        pair = tl.arange(0, BLOCK_H)
        angle = column[:, None] * HALF + pair[None, :]
        known = live[:, None] & (pair < HALF)[None, :]
        c = tl.load(cos + angle, mask=known, other=1.0)
        s = tl.load(sin + angle, mask=known, other=0.0)
    BLOCK_D: tl.constexpr = triton.next_power_of_2(SECTION)
    for _head in range(num_heads):
        if ROTARY > 0:
            if INTERLEAVED:
                both = load_section(codes, scale, offset, s_t, s_d, g_t, g_d, token_group, first, token, live,
                                    ROTARY_START, ROTARY, 2 * BLOCK_H, DIM, BITS, CHANNEL_GROUP, ONE_ROW)  # fmt: skip
                x1, x2 = tl.split(tl.reshape(both, (BLOCK_T, BLOCK_H, 2)))
                turned = tl.reshape(tl.join(x1 * c - x2 * s, x2 * c + x1 * s), (BLOCK_T, 2 * BLOCK_H))
                store_section(target, d_t, d_d, column, live, turned, ROTARY_START, ROTARY, 2 * BLOCK_H)
            else:
                x1 = load_section(codes, scale, offset, s_t, s_d, g_t, g_d, token_group, first, token, live,
                                  ROTARY_START, HALF, BLOCK_H, DIM, BITS, CHANNEL_GROUP, ONE_ROW)  # fmt: skip
                x2 = load_section(codes, scale, offset, s_t, s_d, g_t, g_d, token_group, first, token, live,
                                  ROTARY_START + HALF, HALF, BLOCK_H, DIM, BITS, CHANNEL_GROUP, ONE_ROW)  # fmt: skip
                store_section(target, d_t, d_d, column, live, x1 * c - x2 * s, ROTARY_START, HALF, BLOCK_H)
                store_section(target, d_t, d_d, column, live, x2 * c + x1 * s, ROTARY_START + HALF, HALF, BLOCK_H)
        for begin in tl.static_range(0, ROTARY_START, SECTION):
            x = load_section(codes, scale, offset, s_t, s_d, g_t, g_d, token_group, first, token, live,
                             begin, min(SECTION, ROTARY_START - begin), BLOCK_D,
                             DIM, BITS, CHANNEL_GROUP, ONE_ROW)  # fmt: skip
            store_section(target, d_t, d_d, column, live, x, begin, min(SECTION, ROTARY_START - begin), BLOCK_D)
        for begin in tl.static_range(ROTARY_START + ROTARY, DIM, SECTION):
            x = load_section(codes, scale, offset, s_t, s_d, g_t, g_d, token_group, first, token, live,
                             begin, min(SECTION, DIM - begin), BLOCK_D,
                             DIM, BITS, CHANNEL_GROUP, ONE_ROW)  # fmt: skip
            store_section(target, d_t, d_d, column, live, x, begin, min(SECTION, DIM - begin), BLOCK_D)
        codes += s_h
        scale += g_h
        offset += g_h
        target += d_h


@triton.jit
def place_kernel(
    table, tiles, cos, sin, keys, values, num_heads,
    k_l, k_h, k_t, k_d, v_l, v_h, v_t, v_d,
    KEY_SOURCE: tl.constexpr, KEY_SCALES: tl.constexpr,
    KEY_BITS: tl.constexpr, KEY_GROUP: tl.constexpr, KEY_ONE_ROW: tl.constexpr,
    KEY_ALIGNED: tl.constexpr, KEY_DIM: tl.constexpr, KEY_SECTION: tl.constexpr,
    VALUE_SOURCE: tl.constexpr, VALUE_SCALES: tl.constexpr,
    VALUE_BITS: tl.constexpr, VALUE_GROUP: tl.constexpr, VALUE_ONE_ROW: tl.constexpr,
    VALUE_ALIGNED: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_SECTION: tl.constexpr,
    ROTARY: tl.constexpr, ROTARY_START: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles of all chunks, layers, 2). `tiles` holds (chunk, first token) of each tile."""
    tile = tl.program_id(0)
    layer = tl.program_id(1).to(tl.int64)
    row = table + tl.load(tiles + 2 * tile) * (NUM_HEADER + 2 * NUM_FIELDS)
    first = tl.load(tiles + 2 * tile + 1)
    start, num_tokens = tl.load(row), tl.load(row + 1)
    if tl.program_id(2) == 0:
        place_heads(row + NUM_HEADER, keys, k_l, k_h, k_t, k_d, cos, sin, start, first, num_tokens, layer, num_heads,
                    KEY_SOURCE, KEY_SCALES, KEY_BITS, KEY_GROUP, KEY_ONE_ROW, KEY_ALIGNED, KEY_DIM, KEY_SECTION,
                    ROTARY, ROTARY_START, INTERLEAVED, BLOCK_T)  # fmt: skip
    else:
        place_heads(row + NUM_HEADER + NUM_FIELDS, values, v_l, v_h, v_t, v_d, cos, sin, start, first, num_tokens,
                    layer, num_heads, VALUE_SOURCE, VALUE_SCALES, VALUE_BITS, VALUE_GROUP, VALUE_ONE_ROW, VALUE_ALIGNED,
                    VALUE_DIM, VALUE_SECTION, 0, 0, False, BLOCK_T)  # fmt: skip
