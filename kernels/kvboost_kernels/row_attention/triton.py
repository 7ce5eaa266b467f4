"""The kernels of `row_attention`: attention over a range of keys, merging of ranges, and attention mass."""

from __future__ import annotations

import triton
import triton.language as tl

from kvboost_kernels.tiles import LOG2E, dot, finite_or_zero, load_rows, logits2, packed_rows, products, visible_range


@triton.jit(do_not_specialize=["num_rows", "kv_len"])  # they change from call to call
def attend_kernel(
    query, key, value, rows, sinks, out, lse, mean,
    q_h, q_r, q_d, k_h, k_n, k_d, v_h, v_n, v_d, o_s, o_h, o_r,
    num_rows, kv_len, num_splits, scaling, softcap, window,
    GROUP: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles of packed rows, key heads, splits of the visible keys).

    Writes normalised output and, per (split, head, row), `lse` = log2 of the sum of exponentials over the keys and, if
    `mean` is given, the mean logit under the weights (both in units of log 2).
    """
    kv_head = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    head, row, position, live = packed_rows(rows, num_rows, kv_head, GROUP, BLOCK_M)
    q_at = head * q_h + row * q_r
    q = load_rows(query, q_at, q_d, live, 0, KEY_DIM, BLOCK_K)
    low, high = visible_range(position, live, kv_len, window, BLOCK_N)
    share = tl.cdiv(tl.cdiv(high - low, BLOCK_N), num_splits) * BLOCK_N
    start = low + split * share
    end = tl.minimum(start + share, high)

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    weighted = tl.zeros([BLOCK_M], tl.float32)  # sum of exp2(s - top) * (s - top)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for n in range(start, end, BLOCK_N):
        column = n + tl.arange(0, BLOCK_N)
        wide = column.to(tl.int64)
        inside = column < high  # what lies beyond may be uninitialised memory, and 0 * NaN is NaN
        s = products(query, q_at, q_d, live, q, key + kv_head * k_h, wide * k_n, k_d, inside,
                     KEY_DIM, BLOCK_K, CHUNK, DOT, PRECISION)  # fmt: skip
        s = logits2(s, position, column, inside, scaling, softcap, window)
        new_top = tl.maximum(top, tl.max(s, 1))
        shift = finite_or_zero(new_top)
        p = tl.exp2(s - shift[:, None])
        keep = tl.exp2(top - shift)
        if mean is not None:
            moved = weighted + total * (finite_or_zero(top) - shift)
            weighted = keep * moved + tl.sum(p * tl.where(p > 0, s - shift[:, None], 0.0), 1)
        total = total * keep + tl.sum(p, 1)
        v = load_rows(value + kv_head * v_h, wide * v_n, v_d, inside, 0, VALUE_DIM, BLOCK_V)
        acc = acc * keep[:, None] + dot(p.to(v.dtype), v, DOT, PRECISION)
        top = new_top

    seen = total != 0  # true of NaN
    count = tl.where(seen, total, 1.0)
    shift = finite_or_zero(top)
    at = (split.to(tl.int64) * tl.num_programs(1) * GROUP + head) * num_rows + row
    tl.store(lse + at, tl.where(seen, shift + tl.log2(count), float("-inf")), mask=live)
    if mean is not None:
        tl.store(mean + at, tl.where(seen, shift + weighted / count, 0.0), mask=live)
    if sinks is not None:  # only where there is one split; otherwise the merge applies them
        sink = tl.load(sinks + head, mask=live, other=float("-inf")).to(tl.float32) * LOG2E
        count += tl.exp2(sink - shift)
    step = tl.arange(0, BLOCK_V).to(tl.int64)
    place = out + split.to(tl.int64) * o_s + (head * o_h + row * o_r)[:, None] + step[None, :]
    result = (acc / count[:, None]).to(out.dtype.element_ty)
    tl.store(place, result, mask=live[:, None] & (step < VALUE_DIM)[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def merge_kernel(
    parts, part_lse, part_mean, sinks, out, lse, mean, p_s, p_h, p_r, o_h, o_r, num_rows, num_splits,
    VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Grid: (rows, heads). One row's splits into one, weighted by their sums of exponentials."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    split = tl.arange(0, BLOCK_S).to(tl.int64)
    known = split < num_splits
    one = head * num_rows + row
    each = split * tl.num_programs(1) * num_rows + one
    sums = tl.load(part_lse + each, mask=known, other=float("-inf"))
    top = finite_or_zero(tl.max(sums, 0))
    weight = tl.exp2(sums - top)
    total = tl.sum(weight, 0)
    count = tl.where(total != 0, total, 1.0)
    tl.store(lse + one, tl.where(total != 0, top + tl.log2(count), float("-inf")))
    if mean is not None:
        tl.store(mean + one, tl.sum(weight * tl.load(part_mean + each, mask=known, other=0.0), 0) / count)
    if sinks is not None:
        count += tl.exp2(tl.load(sinks + head).to(tl.float32) * LOG2E - top)
    step = tl.arange(0, BLOCK_V).to(tl.int64)
    at = (split * p_s + head * p_h + row * p_r)[:, None] + step[None, :]
    part = tl.load(parts + at, mask=known[:, None] & (step < VALUE_DIM)[None, :], other=0.0)
    result = (tl.sum(part * weight[:, None], 0) / count).to(out.dtype.element_ty)
    tl.store(out + head * o_h + row * o_r + step, result, mask=step < VALUE_DIM)


@triton.jit(do_not_specialize=["num_rows", "num_mass_rows", "kv_len"])
def mass_kernel(
    query, key, rows, mass_rows, sinks, lse, mass, q_h, q_r, q_d, k_h, k_n, k_d,
    num_rows, num_mass_rows, kv_len, scaling, softcap, window,
    GROUP: tl.constexpr, KEY_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid: (key tiles, key heads). Weights of the mass rows on each key, summed over rows and heads of the group."""
    kv_head = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    wide = column.to(tl.int64)
    inside = column < kv_len
    found = tl.zeros([BLOCK_N], tl.float32)
    for m in range(0, num_mass_rows * GROUP, BLOCK_M):
        packed = (m + tl.arange(0, BLOCK_M)).to(tl.int64)
        listed = packed // GROUP < num_mass_rows
        row = tl.load(mass_rows + packed // GROUP, mask=listed, other=0)
        live = listed & (row >= 0) & (row < num_rows)
        head = kv_head * GROUP + packed % GROUP
        position = tl.load(rows + row, mask=live, other=-1).to(tl.int32)
        q_at = head * q_h + row * q_r
        q = load_rows(query, q_at, q_d, live, 0, KEY_DIM, BLOCK_K)
        s = products(query, q_at, q_d, live, q, key + kv_head * k_h, wide * k_n, k_d, inside,
                     KEY_DIM, BLOCK_K, CHUNK, DOT, PRECISION)  # fmt: skip
        s = logits2(s, position, column, inside, scaling, softcap, window)
        norm = tl.load(lse + head * num_rows + row, mask=live, other=0.0)
        if sinks is not None:
            sink = tl.load(sinks + head, mask=live, other=float("-inf")).to(tl.float32) * LOG2E
            larger = finite_or_zero(tl.maximum(norm, sink))
            norm = larger + tl.log2(tl.exp2(norm - larger) + tl.exp2(sink - larger))
        found += tl.sum(tl.exp2(s - finite_or_zero(norm)[:, None]), 0)
    tl.store(mass + kv_head * kv_len + wide, found, mask=inside)
