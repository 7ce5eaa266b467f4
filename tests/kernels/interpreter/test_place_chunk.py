"""`place_chunk`: the kernel against the plain torch reference."""

from __future__ import annotations

import pytest
import torch

from kvboost_kernels.place_chunk import Chunk, place_chunk
from kvboost_kernels.place_chunk.plan import plan

KINDS = ["plain", "strided", "int8", "int4", "int8 rows", "int4 rows", "int4 blocks", "int8 blocks"]
ROTATIONS = {
    "none": None,
    "half, all": (64, "half", 0),
    "half, first": (24, "half", 0),
    "half, last": (24, "half", 40),
    "interleaved, all": (64, "interleaved", 0),
    "interleaved, middle": (20, "interleaved", 30),
}
DIM, VALUE_DIM, CAPACITY = 64, 48, 150
# Start and length: odd, one token, empty, longer than a tile; gaps between them.
SPANS = [(3, 33), (40, 1), (41, 0), (60, 70), (142, 8)]
# The interpreter cuts float32 to bfloat16 instead of rounding (a GPU rounds): one unit in the last place.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}


def buffers(dtype: torch.dtype, layers: int = 2, heads: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """NaN in every element; keys token-major as some caches lay them out, values contiguous."""
    keys = torch.full((layers, CAPACITY, heads, DIM), float("nan"), dtype=dtype).transpose(1, 2)
    return keys, torch.full((layers, heads, CAPACITY, VALUE_DIM), float("nan"), dtype=dtype)


def assert_placed_alike(chunks, rotation, dtype) -> None:
    expected, found = buffers(dtype), buffers(dtype)
    place_chunk(chunks, *expected, rotation=rotation, backend="reference")
    place_chunk(chunks, *found, rotation=rotation, backend="triton")
    covered = torch.zeros(CAPACITY, dtype=torch.bool)
    for chunk in chunks:
        covered[chunk.start : chunk.start + chunk.num_tokens] = True
    for want, got in zip(expected, found, strict=True):
        assert got[:, :, ~covered].isnan().all(), "wrote outside the chunks"
        assert not got[:, :, covered].isnan().any(), "left elements of a chunk unwritten"
        torch.testing.assert_close(got, want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype], equal_nan=True)


def make_chunks(stored, dtype, key_kind, value_kind, spans=SPANS):
    return [
        Chunk(stored((2, 3, n, DIM), dtype, key_kind), stored((2, 3, n, VALUE_DIM), dtype, value_kind), start)
        for start, n in spans
    ]


@pytest.mark.parametrize("name", ROTATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_storage_and_rotation(stored, rotation, kind, name) -> None:
    turn = None if ROTATIONS[name] is None else rotation(CAPACITY, *ROTATIONS[name])
    values = "int4 rows" if kind == "int8" else kind
    assert_placed_alike(make_chunks(stored, torch.float32, kind, values), turn, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["plain", "strided", "int8"])
def test_half_precision(stored, rotation, kind, dtype) -> None:
    turn = rotation(CAPACITY, DIM)
    assert_placed_alike(make_chunks(stored, dtype, kind, kind), turn, dtype)


def test_copying_is_exact(stored) -> None:
    """Without rotation nothing is computed: every bit arrives."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        chunk = Chunk(stored((2, 3, 35, DIM), dtype, "plain"), stored((2, 3, 35, VALUE_DIM), dtype, "plain"), 7)
        keys, values = buffers(dtype)
        place_chunk([chunk], keys, values, backend="triton")
        assert torch.equal(keys[:, :, 7:42], chunk.keys)
        assert torch.equal(values[:, :, 7:42], chunk.values)


def test_rounded_once(stored, rotation) -> None:
    """float16 keys are rotated in float32 and rounded to float16 at the end, bit for bit like float32 keys."""
    chunk = Chunk(
        stored((2, 3, 65, DIM), torch.float16, "plain"), stored((2, 3, 65, VALUE_DIM), torch.float16, "plain"), 9
    )
    turn = rotation(CAPACITY, DIM)
    narrow, wide = buffers(torch.float16), buffers(torch.float32)
    place_chunk([chunk], *narrow, rotation=turn, backend="triton")
    place_chunk([chunk], *wide, rotation=turn, backend="triton")
    assert torch.equal(narrow[0][:, :, 9:74], wide[0][:, :, 9:74].half())


def test_formats_share_launches(stored, rotation) -> None:
    """One launch a storage format, whatever the lengths; edges in full precision beside quantised middles."""
    dtype = torch.float16
    chunks = [
        *make_chunks(stored, dtype, "plain", "plain", [(0, 4), (33, 4), (40, 4)]),
        *make_chunks(stored, dtype, "int8", "int4 rows", [(4, 29), (50, 77)]),
    ]
    turn = rotation(CAPACITY, DIM)
    assert len(plan(chunks, *buffers(dtype), turn)) == 2
    assert_placed_alike(chunks, turn, dtype)


@pytest.mark.parametrize("heads", [0, 3])
def test_nothing_to_place(stored, heads) -> None:
    keys, values = buffers(torch.float32, heads=heads)
    place_chunk([], keys, values, backend="triton")
    empty = Chunk(torch.empty(2, heads, 0, DIM), torch.empty(2, heads, 0, VALUE_DIM), CAPACITY)
    place_chunk([empty], keys, values, backend="triton")
    if heads == 0:
        place_chunk(
            [Chunk(torch.empty(2, 0, 5, DIM), torch.empty(2, 0, 5, VALUE_DIM), 0)], keys, values, backend="triton"
        )
    assert keys.isnan().all()


@pytest.mark.parametrize("axis", ["layer", "head", "token", "channel"])
def test_offsets_beyond_32_bits(axis) -> None:
    """The last element lies more than 2**31 elements behind the first, in the source and in the buffer.

    The memory is reserved, not touched: only the pages of a few rows become real.
    """
    layers, heads, tokens, dim = 2, 2, 3, 8
    far = 2**31 + 64
    steps = {"layer": far, "head": far, "token": far // 2 + 64, "channel": far // 7 + 8}
    small = {"layer": 8 * 32, "head": 4 * 32, "token": 32, "channel": 1} | {axis: steps[axis]}
    strides = tuple(small[name] for name in ("layer", "head", "token", "channel"))
    extent = sum(step * (size - 1) for step, size in zip(strides, (layers, heads, tokens, dim), strict=True)) + 1
    assert extent > 2**31
    source, target = (torch.empty(extent, dtype=torch.float16) for _ in range(2))
    shape = (layers, heads, tokens, dim)
    keys, buffer = source.as_strided(shape, strides), target.as_strided(shape, strides)
    keys.copy_(torch.randn(shape))
    values = torch.randn(shape).half()
    near = torch.zeros(shape).half()
    place_chunk([Chunk(keys, values, 0)], buffer, near, backend="triton")
    assert torch.equal(buffer, keys)
    assert torch.equal(near, values)
