"""`deviation` and `attention_kl`: the kernels against the plain torch references."""

from __future__ import annotations

import pytest
import torch

from kvboost_kernels.deviation import attention_kl, deviation

pytestmark = pytest.mark.usefixtures("poison")

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def pair(tokens: int, dims: tuple[int, int], dtype: torch.dtype, layers: int = 2, heads: int = 3) -> list[torch.Tensor]:
    """Keys token-major, values a strided slice."""
    keys = torch.randn(layers, tokens, heads, dims[0]).to(dtype).transpose(1, 2)
    return [keys, torch.randn(layers, heads, tokens, 2 * dims[1]).to(dtype)[..., ::2]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dims", [(32, 32), (48, 80), (256, 128)])
@pytest.mark.parametrize("tokens", [1, 63])
def test_deviation(dtype, dims, tokens) -> None:
    fresh, stored = pair(tokens, dims, dtype), pair(tokens, dims, dtype)
    expected = deviation(*fresh, *stored)
    found = deviation(*fresh, *stored, backend="triton")
    torch.testing.assert_close(found.keys, expected.keys, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.values, expected.values, rtol=1e-5, atol=1e-6)


def test_deviation_of_chosen_rows() -> None:
    rows = torch.randperm(100)[:37]
    fresh, stored = pair(37, (32, 48), torch.float32), pair(100, (32, 48), torch.float32)
    found = deviation(*fresh, *stored, rows=rows, backend="triton")
    gathered = [t[:, :, rows] for t in stored]
    expected = deviation(*fresh, *gathered, backend="reference")
    torch.testing.assert_close(found.keys, expected.keys, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.values, expected.values, rtol=1e-5, atol=1e-6)


def test_deviation_of_zero_vectors() -> None:
    fresh, stored = pair(3, (32, 32), torch.float32), pair(3, (32, 32), torch.float32)
    stored[0][:, :, :2] = 0
    fresh[0][:, :, 0] = 0
    found = deviation(*fresh, *stored, backend="triton").keys
    assert (found[:, 0] == 0).all()
    assert (found[:, 1] == float("inf")).all()
    assert found[:, 2].isfinite().all()


@pytest.mark.parametrize(("layers", "heads", "tokens"), [(2, 3, 0), (0, 3, 5), (2, 0, 5)])
def test_deviation_of_nothing(layers, heads, tokens) -> None:
    parts = pair(tokens, (32, 32), torch.float32, layers, heads)
    found = deviation(*parts, *parts, backend="triton")
    assert found.keys.shape == (layers, tokens)
    assert (found.values == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize(
    "options", [{}, {"sliding_window": 21}, {"softcap": 3.0}], ids=lambda o: "+".join(o) or "plain"
)
def test_attention_kl(request_of, dtype, group, options) -> None:
    request = request_of(2, group, (48, 48), 90, [0, 5, 63, 64, 80], dtype)
    stored = (request.key.float() + 0.3 * torch.randn(request.key.shape)).to(dtype)
    arguments = (request.query, request.key, stored, request.rows)
    expected = attention_kl(*arguments, scaling=0.3, **options)
    found = attention_kl(*arguments, scaling=0.3, **options, backend="triton")
    assert expected[:, 1:].min() > 1e-3
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_attention_kl_edges(request_of) -> None:
    request = request_of(1, 2, (32, 32), 30, [29, -1, 500], torch.float32)
    noisy = request.key + torch.randn(request.key.shape)
    same = attention_kl(request.query, request.key, request.key, request.rows, scaling=0.2, backend="triton")
    assert (same == 0).all()
    windowed = attention_kl(
        request.query, request.key, noisy, request.rows, scaling=0.2, sliding_window=5, backend="triton"
    )
    assert (windowed[:, 0] > 0).all()
    assert (windowed[:, 1:] == 0).all()
    none = attention_kl(request.query[:, :, :0], request.key, noisy, request.rows[:0], scaling=0.2, backend="triton")
    assert none.shape == (2, 0)


def test_attention_kl_does_not_hide_nan(request_of) -> None:
    request = request_of(1, 1, (32, 32), 30, [29], torch.float32)
    broken = request.key.clone()
    broken[0, 0, 4] = float("nan")
    for keys in ((request.key, broken), (broken, request.key)):
        assert attention_kl(request.query, *keys, request.rows, scaling=0.2, backend="triton").isnan().all()
        assert attention_kl(request.query, *keys, request.rows, scaling=0.2, backend="reference").isnan().all()


def test_deviation_offsets_beyond_32_bits() -> None:
    torch.use_deterministic_algorithms(False)  # filling the reserved memory would make it real
    shape, strides = (2, 2, 5, 8), (2**31 + 64, 2**30, 2**28 + 8, 2**25)
    extent = sum(step * (size - 1) for step, size in zip(strides, shape, strict=True)) + 1
    fresh, stored = (torch.empty(extent, dtype=torch.float16).as_strided(shape, strides) for _ in range(2))
    fresh.copy_(torch.randn(shape))
    stored.copy_(torch.randn(shape))
    found = deviation(fresh, fresh, stored, stored, backend="triton")
    near = [t.contiguous() for t in (fresh, fresh, stored, stored)]
    assert torch.equal(found.keys, deviation(*near, backend="triton").keys)
