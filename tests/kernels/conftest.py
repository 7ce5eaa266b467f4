"""Inputs for the kernels: small, of odd sizes, seeded, and where asked for not contiguous."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kvboost_kernels.place_chunk import Quantised, Rotation
from kvboost_kernels.row_attention.request import Request

Stored = Callable[..., "torch.Tensor | Quantised"]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def poison() -> Iterator[None]:
    """Fresh memory holds NaN, so that an element that nobody wrote shows."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def nothing_can_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """numba finds no folder for its cache."""
    numba = pytest.importorskip("numba")
    cfunc = numba.cfunc

    def read_only(signature: Any, **options: Any) -> Any:
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return cfunc(signature, **options)

    monkeypatch.setattr(numba, "cfunc", read_only)


@pytest.fixture
def stored() -> Stored:
    """`stored(shape, dtype, kind)`: what a store may hold for a tensor `[layers, heads, tokens, dim]`.

    Kinds: `plain`, `strided` (token-major, and a slice), `int8` and `int4` with scales per channel over all tokens,
    `int8 rows`, `int4 rows` with scales per token over 16 channels, `int4 blocks` over 7 tokens x 5 channels,
    `int8 blocks` per channel over 37 tokens, which is more than a tile and not a multiple of one.
    """

    def make(shape: tuple[int, int, int, int], dtype: torch.dtype, kind: str) -> torch.Tensor | Quantised:
        layers, heads, tokens, dim = shape
        if kind == "plain":
            return torch.randn(shape).to(dtype)
        if kind == "strided":
            return (
                torch.randn(layers, tokens + 5, heads, dim + 3)
                .to(dtype)[:, 2 : tokens + 2, :, 1 : dim + 1]
                .transpose(1, 2)
            )
        bits = 4 if kind.startswith("int4") else 8
        token_group, channel_group = max(tokens, 1), 1
        if kind.endswith("rows"):
            token_group, channel_group = 1, 16
        elif kind.endswith("blocks"):
            token_group, channel_group = (7, 5) if bits == 4 else (37, 1)
        groups = (layers, heads, -(-tokens // token_group), -(-dim // channel_group))
        codes = torch.randint(0, 256, (layers, heads, tokens, dim * bits // 8), dtype=torch.uint8)
        scales = torch.float16 if kind.endswith("rows") else torch.float32
        scale, offset = (torch.rand(groups) / 2**bits + 0.001).to(scales), torch.randn(groups).to(scales)
        return Quantised(codes, scale, offset, bits, token_group, channel_group)

    return make


@pytest.fixture
def rotation() -> Callable[..., Rotation]:
    """`rotation(num_positions, rotary_dim, pairing, offset)` with angles of any size and an attention scaling."""

    def make(num_positions: int, rotary_dim: int, pairing: Any = "half", offset: int = 0) -> Rotation:
        angles = 10 * torch.randn(num_positions, rotary_dim // 2)
        return Rotation(1.1 * angles.cos(), 1.1 * angles.sin(), pairing, offset)

    return make


@pytest.fixture
def request_of() -> Callable[..., Request]:
    """`request_of(kv_heads, group, dims, kv_len, rows, dtype, **options)`: attention over rows, strides not contiguous.

    Columns that no row sees hold NaN, as fresh memory may.
    """

    def make(
        kv_heads: int,
        group: int,
        dims: tuple[int, int],
        kv_len: int,
        rows: list[int],
        dtype: torch.dtype,
        **options: Any,
    ) -> Request:
        query = torch.randn(1, len(rows), kv_heads * group, dims[0]).to(dtype).transpose(1, 2)
        key = torch.randn(1, kv_heads, kv_len + 3, dims[0]).to(dtype)[:, :, :kv_len]
        value = torch.randn(1, kv_len, kv_heads, 2 * dims[1]).to(dtype)[..., ::2].transpose(1, 2)
        last = max(rows, default=-1)
        key[:, :, last + 1 :] = value[:, :, last + 1 :] = float("nan")
        return Request(query, key, value, torch.tensor(rows, dtype=torch.int64), dims[0] ** -0.5, **options)

    return make
