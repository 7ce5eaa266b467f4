"""Encode at 0 and realign to p equals encode at p, for every kind of rotary embedding."""

from __future__ import annotations

import architectures
import pytest
import torch
from kv_helpers import kv_at

from kvboost_rag.forward.probe import probe
from kvboost_rag.kv.buffer import KVBuffer
from kvboost_rag.kv.realign import PositionTables, position_free, realign_into

LENGTH = 37


def _largest_difference(loaded, start: int) -> tuple[float, float]:
    """Max |realigned − encoded at p|, absolute and relative to the largest key."""
    layout = probe(loaded.model).require_layout
    ids = torch.randint(3, 380, (LENGTH,), generator=torch.Generator().manual_seed(3))
    tables = PositionTables.of(layout, start + LENGTH)
    free = position_free(kv_at(loaded.model, layout, ids, 0), layout, 0, tables)
    buffer = KVBuffer(layout, start + LENGTH)
    realign_into(buffer, free, start, tables)
    ours, expected = buffer.read(start, start + LENGTH), kv_at(loaded.model, layout, ids, start)
    keys = list(zip(ours.keys, expected.keys, strict=True))
    values = list(zip(ours.values, expected.values, strict=True))
    worst = max(float((a.float() - b.float()).abs().max()) for a, b in (*keys, *values))
    return worst, worst / max(float(b.float().abs().max()) for _, b in (*keys, *values))


@pytest.mark.parametrize("name", architectures.REUSABLE)
def test_realigned_keys_are_those_of_the_position(tiny_model, name: str) -> None:
    model_type, fields = architectures.REUSABLE[name]
    absolute, _ = _largest_difference(tiny_model(model_type, **fields), start=531)
    assert absolute < 1e-4


def test_bfloat16_realignment_is_off_by_no_more_than_rounding(tiny_model) -> None:
    """One layer, so that nothing but the rotation differs: no further from float32 than the model's own bf16."""
    model = tiny_model("llama", num_hidden_layers=2, dtype=torch.bfloat16)
    _, relative = _largest_difference(model, start=531)
    assert relative < 2**-6


def test_undo_takes_out_attention_scaling(tiny_model) -> None:
    """YaRN multiplies cos and sin by a factor: position-free keys must not depend on it twice."""
    loaded = tiny_model("llama", rope_parameters=architectures.YARN)
    rotation = probe(loaded.model).require_layout.groups[0].rotation
    assert rotation is not None
    tables = rotation.source.tables(torch.arange(5))
    assert float(tables[0][0, 0]) > 1.01  # the factor is there
    keys = torch.randn(2, 3, 5, 16)
    rotated = torch.empty_like(keys)
    rotation.rotate_into(rotated, keys, tables)
    torch.testing.assert_close(rotation.undo(rotated, tables), keys, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["llama", "phi-partial", "glm4-interleaved", "gptj-interleaved"])
def test_rotation_equals_complex_multiplication(tiny_model, name: str) -> None:
    """The slow twin: every pair is a complex number times e^{iθ}."""
    model_type, fields = architectures.REUSABLE[name]
    rotation = probe(tiny_model(model_type, **fields).model).require_layout.groups[0].rotation
    assert rotation is not None
    cos, sin = rotation.source.tables(torch.arange(11, 18))
    keys = torch.randn(3, 2, 7, 16)
    out = torch.full_like(keys, float("nan"))
    rotation.rotate_into(out, keys, (cos, sin))
    expected = keys.clone()
    half = rotation.rotary_dim // 2
    for pair in range(half):
        a, b = (pair, pair + half) if rotation.pairing == "half" else (2 * pair, 2 * pair + 1)
        turned = torch.complex(keys[..., a], keys[..., b]) * torch.complex(cos[:, pair], sin[:, pair])
        expected[..., a], expected[..., b] = turned.real, turned.imag
    torch.testing.assert_close(out, expected)
