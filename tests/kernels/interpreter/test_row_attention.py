"""`row_attention`: the kernels against the plain torch reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvboost_kernels.row_attention import row_attention
from kvboost_kernels.row_attention.plan import row_attention_triton
from kvboost_kernels.row_attention.reference import row_attention_reference
from kvboost_kernels.row_attention.request import Request

pytestmark = pytest.mark.usefixtures("poison")

# bfloat16 is cut, not rounded, in the interpreter.
TOLERANCE = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
SCATTERED = [0, 3, 17, 63, 64, 65, 90, 99]


def assert_alike(request: Request, num_splits: int | None = None) -> None:
    expected = row_attention_reference(request)
    found = row_attention_triton(request, num_splits)
    tolerance = TOLERANCE[request.query.dtype]
    for name, want, got, atol in zip(
        ("output", "mass", "entropy"), expected, found, (tolerance, 1e-6, 1e-4), strict=True
    ):
        assert (want is None) == (got is None), name
        if want is not None:
            assert want.dtype == got.dtype
            torch.testing.assert_close(got, want, rtol=tolerance, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("group", [1, 3, 4, 8])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_grouped_heads(request_of, group, num_splits) -> None:
    request = request_of(2, group, (32, 32), 101, SCATTERED, torch.float32)
    assert_alike(replace(request, mass_rows=torch.tensor([7, 2]), entropy=True), num_splits)


@pytest.mark.parametrize("dims", [(32, 32), (48, 80), (96, 96), (128, 64), (192, 128), (256, 256)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_head_dims_and_dtypes(request_of, dims, dtype) -> None:
    request = request_of(1, 2, dims, 75, [70, 5, 33], dtype, entropy=True, mass_rows=torch.tensor([0]))
    assert_alike(request)


@pytest.mark.parametrize(
    "options",
    [
        {"sliding_window": 1},
        {"sliding_window": 20},
        {"sliding_window": 1000},
        {"softcap": 2.0},
        {"softcap": 50.0, "sliding_window": 33},
        {"sinks": torch.tensor([3.0, -2.0, 0.5, 80.0, -80.0, 0.0])},
        {"sinks": torch.tensor([3.0, -2.0, 0.5, 80.0, -80.0, 0.0]), "sliding_window": 7, "softcap": 5.0},
    ],
    ids=lambda options: "+".join(options),
)
@pytest.mark.parametrize("num_splits", [1, 4])
def test_options(request_of, options, num_splits) -> None:
    request = request_of(2, 3, (32, 48), 100, SCATTERED, torch.float32, entropy=True, **options)
    assert_alike(replace(request, mass_rows=torch.tensor([0, 3, 5, 7])), num_splits)


def test_all_rows_is_causal_attention(request_of) -> None:
    request = request_of(1, 1, (64, 64), 129, list(range(129)), torch.float32)
    found = row_attention_triton(request)[0]
    expected = torch.nn.functional.scaled_dot_product_attention(
        request.query, request.key, request.value, is_causal=True
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_splits", [1, 2, 32])
def test_rows_in_any_order_and_repeated(request_of, num_splits) -> None:
    assert_alike(request_of(1, 3, (32, 32), 130, [128, 0, 64, 64, 7, 127], torch.float32, entropy=True), num_splits)


@pytest.mark.parametrize("num_splits", [1, 2])
def test_rows_without_keys(request_of, num_splits) -> None:
    """A position behind the buffer sees all of it; a row whose window has left the buffer sees nothing: zeros."""
    rows = [5, 49, 500, -1]
    request = request_of(1, 2, (32, 32), 50, rows, torch.float32, entropy=True, mass_rows=torch.arange(4))
    assert_alike(request, num_splits)
    windowed = replace(request, sliding_window=10, sinks=torch.tensor([0.3, -4.0]))
    assert_alike(windowed, num_splits)
    assert (row_attention_triton(windowed, num_splits)[0][:, :, 2:] == 0).all()


@pytest.mark.parametrize(("rows", "kv_len"), [([], 40), ([], 0), ([0, 3], 0), ([0], 1)])
def test_empty_inputs(request_of, rows, kv_len) -> None:
    request = request_of(2, 2, (32, 32), kv_len, rows, torch.float32, entropy=True)
    assert_alike(request)
    assert_alike(replace(request, mass_rows=torch.empty(0, dtype=torch.int64)))
    assert_alike(replace(request, mass_rows=torch.arange(len(rows))), num_splits=3)


def test_equal_inputs_give_equal_bits(request_of) -> None:
    request = request_of(2, 4, (64, 64), 97, SCATTERED, torch.float16, entropy=True, mass_rows=torch.arange(8))
    for first, second in zip(row_attention_triton(request, 3), row_attention_triton(request, 3), strict=True):
        assert torch.equal(first, second)


def test_mass_is_a_distribution(request_of) -> None:
    request = request_of(2, 3, (32, 32), 64, [63, 40], torch.float32, mass_rows=torch.tensor([1]))
    mass = row_attention_triton(request, 2)[1]
    assert mass is not None
    assert mass.sum().item() == pytest.approx(1.0, abs=1e-5)
    assert (mass[41:] == 0).all()


def test_nan_in_a_visible_key_is_not_hidden(request_of) -> None:
    request = request_of(1, 1, (32, 32), 20, [4, 19], torch.float32, entropy=True)
    request.key[0, 0, 10] = float("nan")
    request = replace(request, mass_rows=torch.tensor([1]))
    for num_splits in (1, 2):
        for attend in (row_attention_reference, lambda r, n=num_splits: row_attention_triton(r, n)):
            output, mass, entropy = attend(request)
            assert output[0, 0, 1].isnan().all()
            assert output[0, 0, 0].isfinite().all()
            assert mass[10].isnan()
            assert entropy.isnan().tolist() == [[False, True]]


def test_public_call(request_of) -> None:
    request = request_of(2, 2, (32, 48), 40, [39, 12], torch.float16)
    arguments = (request.query, request.key, request.value, request.rows)
    options = {"scaling": 0.2, "mass_rows": torch.tensor([0]), "return_entropy": True}
    found = row_attention(*arguments, **options, backend="triton")
    expected = row_attention(*arguments, **options)
    assert found.output.transpose(1, 2).is_contiguous()
    torch.testing.assert_close(found.output, expected.output, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(found.mass, expected.mass)
    torch.testing.assert_close(found.entropy, expected.entropy)


@pytest.mark.parametrize("axis", ["head", "token", "channel"])
def test_offsets_beyond_32_bits(axis) -> None:
    """Keys, values and queries whose last element lies more than 2**31 elements behind the first; memory untouched."""
    torch.use_deterministic_algorithms(False)  # filling the reserved memory would make it real
    heads, tokens, dim = 2, 20, 16
    far = {"head": 2**31 + 64, "token": 2**31 // 18, "channel": 2**31 // 14}
    small = {"head": 512, "token": 20, "channel": 1} | {axis: far[axis]}
    strides = (0, *(small[name] for name in ("head", "token", "channel")))
    extent = sum(step * (size - 1) for step, size in zip(strides, (1, heads, tokens, dim), strict=True)) + 1
    assert extent > 2**31
    wide = [torch.empty(extent, dtype=torch.float16).as_strided((1, heads, tokens, dim), strides) for _ in range(3)]
    for tensor in wide:
        tensor.copy_(torch.randn(tensor.shape))
    request = Request(*wide, torch.arange(tokens), 0.25, entropy=True, mass_rows=torch.tensor([19]))
    near = replace(request, query=wide[0].contiguous(), key=wide[1].contiguous(), value=wide[2].contiguous())
    for found, expected in zip(row_attention_triton(request), row_attention_triton(near), strict=True):
        assert torch.equal(found, expected)
