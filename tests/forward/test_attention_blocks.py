"""Attention in blocks against a plain softmax over the whole mask; attention mass against the sum of the weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvboost_rag.forward import attention_blocks
from kvboost_rag.forward.attention_blocks import attend_blocks
from kvboost_rag.forward.attention_call import AttentionCall
from kvboost_rag.forward.attention_mass import attention_mass, mass_by_weights
from kvboost_rag.forward.attention_plan import plan_blocks
from kvboost_rag.kv.buffer import BufferPool, KVLayout, LayerGroup

LENGTH = 701
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


def positions(kind: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    scattered = torch.randperm(LENGTH - 30, generator=generator)[:83].sort().values
    suffix = torch.arange(LENGTH - 29, LENGTH)
    return {
        "scattered": torch.cat([scattered, suffix]),
        "suffix": suffix,
        "all": torch.arange(LENGTH),
        "one": suffix[-1:],
    }[kind]


def visible(rows: torch.Tensor, window: int | None) -> torch.Tensor:
    """Bool `[num_rows, LENGTH]`."""
    columns = torch.arange(LENGTH)[None]
    mask = columns <= rows[:, None]
    return mask if window is None else mask & (columns > rows[:, None] - window)


def make_call(mask: torch.Tensor, heads: int, kv_heads: int, dtype: torch.dtype) -> AttentionCall:
    generator = torch.Generator().manual_seed(heads)
    query = torch.randn(1, heads, len(mask), 24, generator=generator).to(dtype)
    room = torch.randn(2, 1, kv_heads, LENGTH + 9, 24, generator=generator).to(dtype)  # views of a longer buffer
    key, value = room[0][:, :, :LENGTH], room[1][:, :, :LENGTH]
    return AttentionCall(query, key, value, mask[None, None], scaling=0.31)


def by_weights(call: AttentionCall) -> torch.Tensor:
    """The slow twin: softmax over everything in float32, `[1, num_rows, num_heads, head_dim]`."""
    wide = replace(call, query=call.query.float(), key=call.key.float())
    mixed = wide.weights() @ call.value[0].float()[:, None]
    return mixed.flatten(0, 1).transpose(0, 1)[None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (4, 1), (2, 2)])
@pytest.mark.parametrize("window", [None, 40, 300])
@pytest.mark.parametrize("kind", ["scattered", "suffix", "all", "one"])
def test_blocks_give_plain_softmax(kind: str, window: int | None, heads: int, kv_heads: int, dtype) -> None:
    mask = visible(positions(kind), window)
    call = make_call(mask, heads, kv_heads, dtype)
    blocks = plan_blocks(mask, heads // kv_heads)
    assert [b.start for b in blocks] == [0, *(b.end for b in blocks[:-1])]
    assert blocks[-1].end == len(mask)
    output, log_sum_exp = attend_blocks(call, blocks)
    torch.testing.assert_close(output.float(), by_weights(call), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert log_sum_exp is not None
    torch.testing.assert_close(log_sum_exp, call.logits().logsumexp(-1), atol=TOLERANCE[dtype], rtol=1e-2)


@pytest.mark.parametrize("window", [None, 300])
def test_masked_twin_gives_the_same(window: int | None, monkeypatch) -> None:
    mask = visible(positions("scattered"), window)
    call = make_call(mask, 6, 2, torch.float32)
    blocks = plan_blocks(mask, 3)
    fast, _ = attend_blocks(call, blocks)
    monkeypatch.setattr(attention_blocks, "_fused_with_log_sum_exp", lambda *_: False)
    slow, log_sum_exp = attend_blocks(call, blocks)
    assert log_sum_exp is None
    torch.testing.assert_close(fast, slow, atol=1e-5, rtol=1e-5)


def test_columns_that_all_rows_see_carry_no_mask() -> None:
    mask = visible(positions("suffix"), None)
    (block,) = plan_blocks(mask, 3)
    shared, rest = block.parts
    assert (shared.start, shared.end, shared.bias) == (0, LENGTH - 29, None)
    assert (rest.start, rest.end) == (LENGTH - 29, LENGTH)


def test_distant_rows_are_not_in_one_block() -> None:
    near, far = torch.arange(48), torch.arange(3952, 4000)
    rows = torch.cat([near, far])
    blocks = plan_blocks(torch.arange(4000)[None] <= rows[:, None], 3)
    assert [(b.start, b.end) for b in blocks] == [(0, 48), (48, 96)]
    assert blocks[0].high == 48


def test_a_row_that_sees_nothing_has_no_parts() -> None:
    mask = visible(positions("suffix"), None)
    mask[3] = False
    assert not plan_blocks(mask, 1)[0].parts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("kind", ["scattered", "suffix", "one"])
def test_mass_is_the_sum_of_the_weights(kind: str, window: int | None, dtype, monkeypatch) -> None:
    mask = visible(positions(kind), window)
    call = make_call(mask, 6, 2, dtype)
    start = max(0, len(mask) - 29)
    _, log_sum_exp = attend_blocks(call, plan_blocks(mask, 3))
    expected = attention_mass(call, None, start)  # without the log-sum-exp: by the weights
    monkeypatch.setattr("kvboost_rag.forward.attention_mass.mass_by_weights", None)
    mass = attention_mass(call, log_sum_exp, start)
    torch.testing.assert_close(mass, expected, atol=TOLERANCE[dtype] / 10, rtol=TOLERANCE[dtype])
    torch.testing.assert_close(mass.sum(), torch.tensor(float(len(mask) - start)), atol=0.05, rtol=1e-2)


def test_mass_of_logits_beyond_what_exp_can_hold() -> None:
    mask = visible(positions("suffix"), None)
    call = make_call(mask, 2, 1, torch.float32)
    call = replace(call, scaling=60.0)
    _, log_sum_exp = attend_blocks(call, plan_blocks(mask, 2))
    assert log_sum_exp is not None
    assert log_sum_exp.max() > 100
    mass = attention_mass(call, log_sum_exp, 0)
    torch.testing.assert_close(mass, mass_by_weights(call, 0))


def test_pool_keeps_one_buffer_of_fitting_length() -> None:
    layout = KVLayout((LayerGroup((0, 1), 1, 4, 4, torch.device("cpu"), None),), torch.float32)
    pool = BufferPool(layout)
    first = pool.take(300)
    first.length = 7
    pool.give_back(first)
    again = pool.take(200)
    assert again is first
    assert again.length == 0
    assert pool.take(200) is not first  # in use
    pool.give_back(first)
    assert pool.take(first.capacity + 1) is not first  # too short, and let go
    pool.give_back(first)
    assert pool.take(10) is not first  # far longer than needed
