"""The rotation that numba compiles for a CPU, beside the reference and beside torch's own order of operations."""

from __future__ import annotations

import pytest
import torch

from kvboost_kernels.place_chunk import Rotation
from kvboost_kernels.place_chunk.reference import rotate

pytest.importorskip("numba")

from kvboost_kernels.place_chunk import cpu
from kvboost_rag.kv.rope import Rotation as ModelRotation

TOKENS, START, CAPACITY = 37, 5, 50
SHAPES = {
    "whole": ("half", 0, 64, 64),
    "interleaved": ("interleaved", 0, 64, 64),
    "odd": ("half", 5, 10, 33),
    "sixteen and some, in the middle": ("half", 3, 74, 80),
    "one pair": ("interleaved", 3, 2, 6),
}
"""Pairing, offset, rotary dim and head dim."""
DTYPES = (torch.bfloat16, torch.float32)


def _tables(half: int, tokens: int = TOKENS) -> tuple[torch.Tensor, torch.Tensor]:
    angles = 300 * torch.rand(tokens, half, generator=torch.Generator().manual_seed(1))
    return 1.2 * angles.cos(), 1.2 * angles.sin()


def _keys(layers: int, heads: int, dim: int, dtype: torch.dtype, tokens: int = TOKENS) -> torch.Tensor:
    keys = 4 * torch.randn(layers, heads, tokens, dim, generator=torch.Generator().manual_seed(2))
    return keys.to(dtype)


def _place(keys: torch.Tensor, rotation: Rotation, threads: int = 1) -> torch.Tensor:
    """The whole buffer, NaN before."""
    layers, heads, tokens, dim = keys.shape
    buffer = torch.full((layers, heads, CAPACITY, dim), float("nan"), dtype=keys.dtype)
    cpu.rotate_into(buffer[:, :, START : START + tokens], keys, rotation, threads)
    return buffer


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("layers", "heads", "threads"), [(3, 2, 1), (1, 5, 2), (7, 1, 3), (1, 1, 2)])
def test_same_bits_as_torch_and_nothing_beside_the_span(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, shape: str, layers: int, heads: int, threads: int
) -> None:
    monkeypatch.setattr(cpu, "MIN_ELEMENTS_A_THREAD", 1)
    pairing, offset, rotary_dim, dim = SHAPES[shape]
    keys, tables = _keys(layers, heads, dim, dtype), _tables(rotary_dim // 2)
    buffer = _place(keys, Rotation(*tables, pairing=pairing, offset=offset), threads)
    expected = torch.empty_like(keys)
    ModelRotation(None, pairing, offset, rotary_dim).rotate_into(expected, keys, tables)
    assert torch.equal(buffer[:, :, START : START + TOKENS], expected)
    assert bool(buffer[:, :, :START].isnan().all() and buffer[:, :, START + TOKENS :].isnan().all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_is_the_rotation_of_the_reference(dtype: torch.dtype, shape: str) -> None:
    pairing, offset, rotary_dim, dim = SHAPES[shape]
    keys, rotation = _keys(2, 3, dim, dtype), Rotation(*_tables(rotary_dim // 2), pairing=pairing, offset=offset)
    placed = _place(keys, rotation)[:, :, START : START + TOKENS]
    torch.testing.assert_close(placed, rotate(keys, rotation, slice(0, TOKENS)).to(dtype), atol=1e-5, rtol=8e-3)


def test_rounds_to_bfloat16_as_torch_does() -> None:
    """All 65,536 numbers there are, infinities and NaN included, under tables that make every sum need rounding."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    keys = bits.view(torch.bfloat16).reshape(1, 1, 256, 256)
    cos, sin = torch.full((256, 128), 1 + 2**-8), torch.full((256, 128), 2**-9)
    expected = torch.empty_like(keys)
    ModelRotation(None, "half", 0, 256).rotate_into(expected, keys, (cos, sin))
    out = torch.empty_like(keys)
    cpu.rotate_into(out, keys, Rotation(cos, sin))
    assert torch.equal(out.isnan(), expected.isnan())
    number = ~expected.isnan()
    assert torch.equal(out[number].view(torch.int16), expected[number].view(torch.int16))


def test_no_tokens_are_no_work() -> None:
    keys, cos = _keys(2, 2, 8, torch.float32, tokens=0), torch.zeros(0, 4)
    assert bool(_place(keys, Rotation(cos, cos)).isnan().all())


def test_refuses_what_it_cannot_address() -> None:
    tables, keys = _tables(4), _keys(2, 2, 8, torch.float32)
    rotation, buffer = Rotation(*tables), torch.zeros(2, 2, CAPACITY, 8)
    span = buffer[:, :, :TOKENS]
    wrong = {
        "keys with other strides": (span, keys.transpose(0, 1).contiguous().transpose(0, 1)),
        "a buffer with other strides": (buffer.transpose(0, 1)[:, :, :TOKENS], keys),
        "half precision": (span.half(), keys.half()),
        "two dtypes": (span.bfloat16(), keys),
        "too few tokens": (buffer[:, :, :9], keys[:, :, :9].contiguous()),
    }
    for name, (out, source) in wrong.items():
        with pytest.raises(ValueError, match="contiguous"):
            cpu.rotate_into(out, source, rotation)
        assert not buffer.any(), name


def test_refuses_channels_that_do_not_exist() -> None:
    buffer, keys = torch.zeros(1, 1, CAPACITY, 32), _keys(1, 1, 32, torch.float32)
    for rotation in (Rotation(*_tables(32)), Rotation(*_tables(8), offset=20)):
        with pytest.raises(ValueError, match="channels"):
            cpu.rotate_into(buffer[:, :, :TOKENS], keys, rotation)
    assert not buffer.any()


def test_compiles_where_nothing_can_be_kept(nothing_can_be_kept: None) -> None:
    keys, tables = _keys(1, 2, 12, torch.float32), _tables(6)
    expected = torch.empty_like(keys)
    ModelRotation(None, "half", 0, 12).rotate_into(expected, keys, tables)
    assert torch.equal(_place(keys, Rotation(*tables))[:, :, START : START + TOKENS], expected)
