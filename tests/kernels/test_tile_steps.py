"""The vector steps of row attention on matrix tiles, each beside what its docstring says in numpy's terms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba")

import numba

from kvboost_kernels import amx
from kvboost_kernels.row_attention import tile_steps as steps

LANES = 16


def run(step: Any, *arguments: np.ndarray | int) -> None:
    """Call a step; arrays go by address."""
    calls = {
        2: lambda a, b: step(a, b),
        3: lambda a, b, c: step(a, b, c),
        4: lambda a, b, c, d: step(a, b, c, d),
        5: lambda a, b, c, d, e: step(a, b, c, d, e),
        6: lambda a, b, c, d, e, f: step(a, b, c, d, e, f),
    }
    numba.njit(calls[len(arguments)])(*(a if isinstance(a, int) else a.ctypes.data for a in arguments))


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape, np.float32)


def bits(numbers: np.ndarray) -> np.ndarray:
    """Bfloat16, nearest even, as uint16."""
    wide = numbers.view(np.uint32)
    return ((wide + 0x7FFF + (wide >> 16 & 1)) >> 16).astype(np.uint16)


def floats(halves: np.ndarray) -> np.ndarray:
    return (halves.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("window", [1, 5, 1 << 30])
def test_mask(window: int) -> None:
    logits, positions = draw(16, LANES), np.arange(40, 40 + 2 * LANES, 2, dtype=np.int32)
    key = 45 + np.arange(16)[:, None]
    expected = np.where((key <= positions) & (key > positions - window), logits, np.float32(steps.MASKED))
    run(steps.mask, logits, 45, positions, window)
    np.testing.assert_array_equal(logits, expected)


def test_update_max_and_rescale() -> None:
    logits, peak, total, scale = draw(16, LANES), draw(LANES), draw(2 * LANES)[LANES:], np.full(LANES, 0.7, np.float32)
    raised, factor = peak.copy(), np.zeros(LANES, np.float32)
    run(steps.update_max, logits, raised)
    np.testing.assert_array_equal(raised, np.maximum(peak, logits.max(0)))
    expected = np.exp2((peak - raised) * scale)
    old, summed = peak.copy(), total.copy()
    run(steps.rescale, old, raised, scale, summed, factor)
    np.testing.assert_allclose(factor, expected, rtol=1e-5)
    np.testing.assert_allclose(summed, total * expected, rtol=1e-5)
    np.testing.assert_array_equal(old, raised)
    run(steps.rescale, old, raised, scale, summed, factor)
    np.testing.assert_array_equal(factor, np.ones(LANES, np.float32))  # exactly


def test_exp_weights() -> None:
    logits, scale = 3 * draw(32, LANES), np.full(LANES, 1.3, np.float32)
    logits[5] = steps.MASKED
    peak, total, tile = logits.max(0), draw(LANES), np.zeros((LANES, LANES, 2), np.uint16)
    before = total.copy()
    run(steps.exp_weights, logits, peak, scale, total, tile)
    expected = np.exp2((logits - peak) * scale)
    np.testing.assert_allclose(total, before + expected.sum(0), rtol=1e-4)
    found = floats(tile).transpose(0, 2, 1).reshape(32, LANES)  # pairs of keys interleaved
    np.testing.assert_allclose(found, expected, rtol=2**-8, atol=1e-6)
    assert not found[5].any()


def test_mass_and_sums() -> None:
    logits, offset, scale, mass = draw(16, LANES), draw(LANES), np.full(LANES, 0.9, np.float32), draw(16, LANES)
    offset[3] = np.inf  # a row that does not count
    expected = mass + np.exp2(logits * scale - offset)
    run(steps.add_mass, logits, offset, scale, mass)
    np.testing.assert_allclose(mass, expected, rtol=1e-5, atol=2e-5)  # `exp2` is exact to 3e-6 of the value
    sums = np.zeros(16, np.float32)
    run(steps.sum_lanes, mass, sums)
    np.testing.assert_allclose(sums, mass.sum(1), rtol=1e-5, atol=1e-5)


def test_small_ones() -> None:
    tile, factor = draw(16, LANES), draw(LANES)
    expected, total, inverse = tile * factor, draw(LANES), np.zeros(LANES, np.float32)
    run(steps.multiply, tile, factor)
    np.testing.assert_array_equal(tile, expected)
    run(steps.invert, total, inverse)
    np.testing.assert_allclose(inverse, 1 / total, rtol=1e-6)
    run(steps.begin, inverse, total)
    assert (inverse == np.float32(steps.LOWEST)).all()
    assert not total.any()


@pytest.mark.parametrize("count", [1, 9, 40])
def test_write_rows(count: int) -> None:
    """Sixteen channels of the rows that exist, and nothing after them."""
    tile, inverse, out = draw(16, LANES), draw(LANES), np.full((LANES, 24), 7, np.uint16)
    run(steps.write_rows, tile, inverse, out, 48, count)
    number = min(count, LANES)
    np.testing.assert_array_equal(out[:number, :16], bits((tile * inverse).T.copy())[:number])
    assert (out[number:] == 7).all()
    assert (out[:, 16:] == 7).all()


@pytest.mark.parametrize(("first", "end"), [(0, 32), (3, 20), (31, 32)])
def test_packing(first: int, end: int) -> None:
    """Values as a left-hand tile, rows as a right-hand one; rows outside are zeros, whatever lies there."""
    values = bits(draw(32, 40))
    spoilt, tile = values.copy(), np.zeros((16, 32), np.uint16)
    spoilt[:first] = spoilt[end:] = 0x7FC0
    run(steps.pack_values, spoilt, 80, first, end, tile)
    expected = np.where((np.arange(32) >= first) & (np.arange(32) < end), values[:, :16].T, 0)
    np.testing.assert_array_equal(tile, expected)
    if (first, end) == (0, 32):
        run(steps.pack_32_values, values, 80, tile)
        np.testing.assert_array_equal(tile, expected)
    right = np.zeros((16, 16, 2), np.uint16)
    run(amx.pack_right, values, 80, end - first, right)
    rows = np.where(np.arange(16)[:, None] < end - first, values[:16, :32], 0)
    np.testing.assert_array_equal(right, rows.reshape(16, 16, 2).transpose(1, 0, 2))


def test_keys_that_do_not_exist_are_zeros() -> None:
    key, out = bits(draw(64)), np.full(32, 7, np.uint16)
    run(steps.copy_row, key, 1, out)
    np.testing.assert_array_equal(out, key[:32])
    run(steps.copy_row, key, 0, out)
    assert not out.any()
