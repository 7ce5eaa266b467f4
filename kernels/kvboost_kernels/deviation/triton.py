"""The kernels of `deviation` and `attention_kl`."""

from __future__ import annotations

import triton
import triton.language as tl

from kvboost_kernels.tiles import finite_or_zero, load_rows, logits2, packed_rows, products, visible_range


@triton.jit
def relative_distance(
    fresh, stored, f_h, f_t, f_d, s_h, s_t, s_d, token, stored_token, live, num_heads,
    DIM: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`[BLOCK_T]` over all heads; the pointers are at the layer."""
    moved = tl.zeros([BLOCK_T], tl.float32)
    norm = tl.zeros([BLOCK_T], tl.float32)
    for _head in range(num_heads):
        a = load_rows(fresh, token * f_t, f_d, live, 0, DIM, BLOCK_D).to(tl.float32)
        b = load_rows(stored, stored_token * s_t, s_d, live, 0, DIM, BLOCK_D).to(tl.float32)
        moved += tl.sum((a - b) * (a - b), 1)
        norm += tl.sum(b * b, 1)
        fresh += f_h
        stored += s_h
    # 0 / 0 is 0: nothing moved. x / 0 is inf.
    return tl.where(moved == 0, 0.0, tl.sqrt(moved) / tl.sqrt(norm))


@triton.jit(do_not_specialize=["num_tokens"])
def deviation_kernel(
    fresh_keys, fresh_values, stored_keys, stored_values, rows, keys, values,
    fk_l, fk_h, fk_t, fk_d, sk_l, sk_h, sk_t, sk_d, fv_l, fv_h, fv_t, fv_d, sv_l, sv_h, sv_t, sv_d,
    num_heads, num_tokens,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles of tokens, layers, 2): keys, then values."""
    layer = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    live = token < num_tokens
    stored_token = token
    if rows is not None:
        stored_token = tl.load(rows + token, mask=live, other=0)
    at = layer * num_tokens + token
    if tl.program_id(2) == 0:
        found = relative_distance(fresh_keys + layer * fk_l, stored_keys + layer * sk_l, fk_h, fk_t, fk_d,
                                  sk_h, sk_t, sk_d, token, stored_token, live, num_heads,
                                  KEY_DIM, BLOCK_T, BLOCK_K)  # fmt: skip
        tl.store(keys + at, found, mask=live)
    else:
        found = relative_distance(fresh_values + layer * fv_l, stored_values + layer * sv_l, fv_h, fv_t, fv_d,
                                  sv_h, sv_t, sv_d, token, stored_token, live, num_heads,
                                  VALUE_DIM, BLOCK_T, BLOCK_V)  # fmt: skip
        tl.store(values + at, found, mask=live)


@triton.jit(do_not_specialize=["num_rows", "kv_len"])
def kl_kernel(
    query, fresh, stored, rows, out, q_h, q_r, q_d, f_h, f_n, f_d, s_h, s_n, s_d,
    num_rows, kv_len, scaling, softcap, window,
    GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles of packed rows, key heads). `KL = E_fresh[a - b] - log sum exp(a) + log sum exp(b)`."""
    kv_head = tl.program_id(1).to(tl.int64)
    head, row, position, live = packed_rows(rows, num_rows, kv_head, GROUP, BLOCK_M)
    q_at = head * q_h + row * q_r
    q = load_rows(query, q_at, q_d, live, 0, DIM, BLOCK_K)
    low, high = visible_range(position, live, kv_len, window, BLOCK_N)
    top_a = tl.full([BLOCK_M], float("-inf"), tl.float32)
    top_b = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total_a = tl.zeros([BLOCK_M], tl.float32)
    total_b = tl.zeros([BLOCK_M], tl.float32)
    gap = tl.zeros([BLOCK_M], tl.float32)
    for n in range(low, high, BLOCK_N):
        column = n + tl.arange(0, BLOCK_N)
        wide = column.to(tl.int64)
        inside = column < high
        a = products(query, q_at, q_d, live, q, fresh + kv_head * f_h, wide * f_n, f_d, inside,
                     DIM, BLOCK_K, CHUNK, DOT, PRECISION)  # fmt: skip
        a = logits2(a, position, column, inside, scaling, softcap, window)
        b = products(query, q_at, q_d, live, q, stored + kv_head * s_h, wide * s_n, s_d, inside,
                     DIM, BLOCK_K, CHUNK, DOT, PRECISION)  # fmt: skip
        b = logits2(b, position, column, inside, scaling, softcap, window)
        new_a, new_b = tl.maximum(top_a, tl.max(a, 1)), tl.maximum(top_b, tl.max(b, 1))
        shift_a, shift_b = finite_or_zero(new_a), finite_or_zero(new_b)
        p = tl.exp2(a - shift_a[:, None])
        keep = tl.exp2(top_a - shift_a)
        gap = gap * keep + tl.sum(p * tl.where(p > 0, a - b, 0.0), 1)
        total_a = total_a * keep + tl.sum(p, 1)
        total_b = total_b * tl.exp2(top_b - shift_b) + tl.sum(tl.exp2(b - shift_b[:, None]), 1)
        top_a, top_b = new_a, new_b
    count_a, count_b = tl.where(total_a != 0, total_a, 1.0), tl.where(total_b != 0, total_b, 1.0)
    norm_a, norm_b = finite_or_zero(top_a) + tl.log2(count_a), finite_or_zero(top_b) + tl.log2(count_b)
    divergence = (gap / count_a - norm_a + norm_b) * 0.6931471805599453  # from log 2 to nats
    # Rounding can leave a little less than 0. `maximum` would turn NaN into 0.
    tl.store(out + head * num_rows + row, tl.where(divergence < 0, 0.0, divergence), mask=live)
