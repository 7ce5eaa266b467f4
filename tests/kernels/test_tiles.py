"""Row attention on a CPU's matrix tiles, beside float32 references; where there are none, on emulated ones."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvboost_kernels.row_attention.reference import attention_logits, row_attention_reference
from kvboost_kernels.row_attention.request import Request

pytest.importorskip("numba")

from emulated_tiles import tiles_or_emulation

from kvboost_kernels import amx, compiled
from kvboost_kernels.row_attention import cpu as attention
from kvboost_kernels.row_attention.cpu import RowTiles, attend_rows, attention_mass

needs_tiles = pytest.mark.skipif(not amx.available(), reason="no matrix tiles on this machine")


@pytest.fixture(autouse=True)
def _tiles() -> Iterator[None]:
    with tiles_or_emulation():
        yield


SPARE = 21
"""Positions of the buffer behind the prompt."""


def _inputs(
    num_rows: int, kv_len: int, heads: int, kv_heads: int, dim: int, value_dim: int, window: int | None = None
) -> tuple[Request, RowTiles]:
    """Query and views of a longer buffer, NaN wherever no row sees it; rows at random positions."""
    draw = torch.Generator().manual_seed(num_rows * kv_len)
    query = torch.randn(1, num_rows, heads, dim, generator=draw).bfloat16().transpose(1, 2)
    rows = torch.randperm(kv_len, generator=draw)[:num_rows].sort().values
    seen = slice(0 if window is None else max(0, int(rows[0]) - window + 1), int(rows[-1]) + 1)
    buffers = []
    for size in (dim, value_dim):
        buffer = torch.full((1, kv_heads, kv_len + SPARE, size), float("nan"), dtype=torch.bfloat16)
        buffer[:, :, seen] = 2 * torch.randn(buffer[:, :, seen].shape, generator=draw).bfloat16()
        buffers.append(buffer[:, :, :kv_len])
    key, value = buffers
    request = Request(query, key, value, rows, dim**-0.5, window, mass_rows=torch.arange(num_rows))
    return request, RowTiles(rows, window)


def _attend(request: Request, tiles: RowTiles, threads: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    return attend_rows(request.query, request.key, request.value, tiles, scaling=request.scaling, threads=threads)


SIZES = {
    "one of everything": (1, 1, 1, 1, 32, 16, None),
    "odd": (5, 17, 4, 1, 64, 64, None),
    "as smollm2": (54, 301, 9, 3, 64, 64, None),
    "several blocks, a tile and a row": (33, 1027, 8, 1, 96, 48, None),
    "narrow window": (31, 1000, 6, 2, 128, 128, 33),
    "window of one": (20, 150, 2, 2, 32, 32, 1),
    "wide heads, window": (100, 700, 4, 4, 256, 256, 100),
    "window longer than the prompt": (16, 48, 3, 3, 32, 32, 99),
    "keys wider than values": (40, 280, 4, 2, 192, 128, None),
}


@pytest.fixture
def every_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """However little there is to do."""
    monkeypatch.setattr(attention, "MIN_COST_A_THREAD", 1)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
@pytest.mark.parametrize("threads", [1, 3])
def test_attention_is_the_references(every_thread: None, sizes: tuple[Any, ...], threads: int) -> None:
    request, tiles = _inputs(*sizes)
    output, lse = _attend(request, tiles, threads)
    expected, mass, _ = row_attention_reference(request)
    assert output.is_contiguous()
    torch.testing.assert_close(output.transpose(1, 2), expected, atol=2e-2, rtol=1e-2)
    logits = attention_logits(request, request.key)
    torch.testing.assert_close(lse.flatten(0, 1), logits.logsumexp(-1), atol=1e-4, rtol=1e-5)
    measured = attention_mass(request.query, request.key, tiles, lse, scaling=request.scaling, threads=threads)
    assert mass is not None
    torch.testing.assert_close(measured / len(request.rows), mass, atol=1e-6, rtol=1e-3)


@pytest.mark.parametrize("window", [None, 150])
def test_a_row_comes_out_the_same_beside_any_others(every_thread: None, window: int | None) -> None:
    request, tiles = _inputs(70, 900, 6, 2, 64, 64, window)
    whole, lse = _attend(request, tiles)
    for chosen in (torch.tensor([3]), torch.tensor([2, 9, 40, 69]), torch.arange(33, 70), torch.arange(69, -1, -1)):
        part = Request(request.query[:, :, chosen], request.key, request.value, request.rows[chosen], request.scaling)
        for threads in (1, 2):
            output, part_lse = _attend(part, RowTiles(part.rows, window), threads)
            assert torch.equal(output, whole[:, chosen])
            torch.testing.assert_close(part_lse, lse[:, :, chosen])


def test_the_same_after_many_blocks_and_with_large_channels(every_thread: None) -> None:
    """The peak moves in the first block only, the pair's other rows go on for several."""
    for seed in range(6) if amx.available() else (0, 5):  # emulated tiles are slow
        request, tiles = _inputs(45 + seed, 497 + 300 * seed, 7, 1, 224, 176)
        whole, _ = _attend(request, tiles)
        chosen = torch.tensor([0, 1, 7, 20, 44])
        part = Request(request.query[:, :, chosen], request.key, request.value, request.rows[chosen], request.scaling)
        assert torch.equal(_attend(part, RowTiles(part.rows))[0], whole[:, chosen])


def test_keys_that_no_row_sees_get_nothing() -> None:
    request, tiles = _inputs(20, 400, 2, 2, 64, 64, 9)
    _, lse = _attend(request, tiles)
    mass = attention_mass(request.query, request.key, tiles, lse, scaling=request.scaling)
    seen = (torch.arange(400) <= request.rows[:, None]) & (torch.arange(400) > request.rows[:, None] - 9)
    assert not mass[~seen.any(0)].any()


@pytest.mark.parametrize("scaling", [1e-3, 2.5, 40.0])
def test_any_scaling(scaling: float) -> None:
    request, tiles = _inputs(40, 300, 2, 1, 64, 64, 70)
    output, _ = attend_rows(request.query, request.key, request.value, tiles, scaling=scaling)
    other = Request(request.query, request.key, request.value, request.rows, scaling, 70)
    torch.testing.assert_close(output.transpose(1, 2), row_attention_reference(other)[0], atol=3e-2, rtol=1e-2)


def test_nan_where_a_row_sees_nan() -> None:
    request, tiles = _inputs(18, 300, 2, 1, 64, 64)
    position = int(request.rows[9])
    for tensor in (request.key, request.value):
        spoilt = tensor.clone()
        spoilt[:, :, position, 7] = float("nan")
        pair = (spoilt, request.value) if tensor is request.key else (request.key, spoilt)
        output, _ = attend_rows(request.query, *pair, tiles, scaling=request.scaling)
        assert bool(output[:, 9:].isnan().any(-1).all())
    output, _ = _attend(request, tiles)
    assert not output.isnan().any()


def test_very_unequal_logits() -> None:
    request, tiles = _inputs(18, 300, 2, 1, 64, 64)
    request.key[:, :, : int(request.rows[-1]) + 1] *= 40
    output, lse = _attend(request, tiles)
    expected, _, _ = row_attention_reference(request)
    torch.testing.assert_close(output.transpose(1, 2), expected, atol=2e-2, rtol=1e-2)
    torch.testing.assert_close(lse.flatten(0, 1), attention_logits(request, request.key).logsumexp(-1))


def test_attention_refuses_what_it_cannot_do() -> None:
    request, tiles = _inputs(18, 100, 2, 1, 64, 64)
    query, key, value = request.query, request.key, request.value
    wrong = {
        "float32": (query.float(), key.float(), value.float(), tiles, 1.0),
        "head dim": (query[..., :40], key[..., :40], value, tiles, 1.0),
        "channels apart": (query, key.transpose(2, 3).contiguous().transpose(2, 3), value, tiles, 1.0),
        "scaling": (query, key, value, tiles, 0.0),
        "heads": (query.repeat(1, 2, 1, 1)[:, :3], key.repeat(1, 2, 1, 1), value.repeat(1, 2, 1, 1), tiles, 1.0),
        "lengths": (query, key, value[:, :, :50], tiles, 1.0),
        "rows": (query[:, :, :4], key, value, tiles, 1.0),
        "key size": (query, key[..., :32], value, tiles, 1.0),
        "two sequences": (*(t.repeat(2, 1, 1, 1) for t in (query, key, value)), tiles, 1.0),
        "no key heads": (query, key[:, :0], value[:, :0], tiles, 1.0),
        "three dimensions": (query[0], key[0], value[0], tiles, 1.0),
        "positions": (query, key[:, :, :50], value[:, :, :50], tiles, 1.0),
    }
    for *tensors, scaling in wrong.values():
        with pytest.raises(ValueError, match=r"tiles can be made of|positions up to"):
            attend_rows(*tensors, scaling=scaling)
    nothing, far = torch.tensor([], dtype=torch.long), torch.tensor([1 << 31])
    for rows in (nothing, far, torch.tensor([-1]), torch.tensor([1.0]), torch.ones(2, 2).long()):
        with pytest.raises(ValueError, match="rows"):
            RowTiles(rows)
    with pytest.raises(ValueError, match="window"):
        RowTiles(torch.tensor([1]), 0)
    with pytest.raises(ValueError, match="log_sum_exp"):
        attention_mass(query, key, tiles, torch.zeros(2, 1, 9), scaling=1.0)


@needs_tiles
def test_asks_the_system_for_the_tiles_itself() -> None:
    """Instructions on tiles end a process that has not asked."""
    code = """
import torch
from kvboost_kernels.row_attention.cpu import RowTiles, attend_rows
ones = torch.ones(1, 1, 4, 32).bfloat16()
output, _ = attend_rows(ones, ones, ones, RowTiles(torch.arange(4)), scaling=1.0)
print(bool((output == 1).all()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True"]


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_writes_to_no_memory_but_its_own(
    every_thread: None, monkeypatch: pytest.MonkeyPatch, sizes: tuple[Any, ...]
) -> None:
    held: list[tuple[torch.Tensor, int]] = []

    def memory(size: int) -> int:
        tensor = torch.full((size + 4096,), 77, dtype=torch.uint8)
        start = -(-tensor.data_ptr() // 64) * 64
        held.append((tensor, start - tensor.data_ptr() + size))
        return start

    monkeypatch.setattr(attention, "memory", memory)
    request, tiles = _inputs(*sizes)
    _, lse = _attend(request, tiles)
    attention_mass(request.query, request.key, tiles, lse, scaling=request.scaling, threads=2)
    assert len(held) == 2
    for tensor, end in held:
        assert bool((tensor[end:] == 77).all())


def test_mass_is_the_same_every_time(every_thread: None) -> None:
    """Whichever thread took which head: rows are chosen by it, and an answer must not depend on a race."""
    request, tiles = _inputs(54, 1301, 9, 3, 64, 64)
    _, lse = _attend(request, tiles)
    first = attention_mass(request.query, request.key, tiles, lse, scaling=request.scaling)
    for _ in range(20 if amx.available() else 4):
        again = attention_mass(request.query, request.key, tiles, lse, scaling=request.scaling, threads=3)
        assert torch.equal(again, first)


def test_same_bits_without_an_openmp_runtime(every_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    request, tiles = _inputs(54, 301, 9, 3, 64, 64)
    output, lse = _attend(request, tiles)
    monkeypatch.setattr(compiled, "_team", lambda: None)
    for _ in range(3):
        again, again_lse = _attend(request, tiles)
        assert torch.equal(again, output)
        assert torch.equal(again_lse, lse)


def test_between_torchs_own_products_and_attention(every_thread: None) -> None:
    """oneDNN sets up the same tiles in its own way; whoever comes next must not notice."""
    request, tiles = _inputs(54, 301, 9, 3, 64, 64)
    draw = torch.Generator().manual_seed(1)
    left, right = (torch.randn(40, 96, generator=draw).bfloat16() for _ in range(2))
    attended = (request.query, request.query, request.query)
    product, whole = left @ right.T, torch.nn.functional.scaled_dot_product_attention(*attended)
    ours = _attend(request, tiles)[0]
    for _ in range(3):
        assert torch.equal(_attend(request, tiles)[0], ours)
        assert torch.equal(left @ right.T, product)
        assert torch.equal(torch.nn.functional.scaled_dot_product_attention(*attended), whole)


@needs_tiles
def test_compiles_where_nothing_can_be_kept(nothing_can_be_kept: None) -> None:
    from kvboost_kernels.row_attention import tile_loops

    tile_loops.entry.cache_clear()
    ones = torch.ones(1, 1, 4, 32).bfloat16()
    output, _ = attend_rows(ones, ones, ones, RowTiles(torch.arange(4)), scaling=1.0)
    assert torch.equal(output, torch.ones_like(output))
