"""A partial forward gives the plain forward's logits and computes the rows it says, layer by layer."""

from __future__ import annotations

from typing import Any

import architectures
import pytest
import torch
from kv_helpers import kv_at, plain_forward

from kvboost_rag.forward.probe import probe
from kvboost_rag.forward.row_forward import RowPlan, _narrow, decoder_layers, row_forward
from kvboost_rag.kv.buffer import KVBuffer

LENGTH = 61


def _ids() -> torch.Tensor:
    return torch.randint(3, 380, (LENGTH,), generator=torch.Generator().manual_seed(11))


def _buffer(model: Any, ids: torch.Tensor, exact: bool) -> KVBuffer:
    layout = probe(model).require_layout
    buffer = KVBuffer(layout, LENGTH + 7)
    for tensor in (*buffer.keys, *buffer.values):
        tensor.fill_(float("nan"))  # an element that is read without having been written shows
    if exact:
        buffer.place(kv_at(model, layout, ids, 0), 0)
    return buffer


class _KeepEveryThird:
    """Narrows in the middle of the model."""

    before_layer = 2

    def on_kv(self, layer: int, fresh: object, stored: object) -> None:
        """Not needed."""

    def wants_attention(self, layer: int) -> bool:
        return False

    def on_attention(self, layer: int, call: object) -> None:
        raise AssertionError("not asked for")

    def keep(self, rows: torch.Tensor) -> torch.Tensor:
        return (rows % 3 == 0) | (rows == LENGTH - 1)


def _count_rows(model: Any) -> tuple[list[int], list[Any]]:
    """Rows that really pass each decoder layer, counted independently of the cache."""
    counts = [0] * len(decoder_layers(model))

    def hook(index: int) -> Any:
        def count(module: Any, args: Any, kwargs: Any) -> None:
            counts[index] += (args[0] if args else kwargs["hidden_states"]).shape[1]

        return count

    handles = [
        layer.register_forward_pre_hook(hook(i), with_kwargs=True) for i, layer in enumerate(decoder_layers(model))
    ]
    return counts, handles


@pytest.mark.parametrize("name", architectures.REUSABLE)
def test_all_rows_give_full_prefill(tiny_model, name: str) -> None:
    model_type, fields = architectures.REUSABLE[name]
    model, ids = tiny_model(model_type, **fields).model, _ids()
    expected = plain_forward(model, ids)[0][-1]
    output = row_forward(model, _buffer(model, ids, exact=False), ids, RowPlan(torch.arange(LENGTH)))
    torch.testing.assert_close(output.logits, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", architectures.REUSABLE)
def test_narrowed_rows_give_full_prefill_from_exact_kv(tiny_model, name: str) -> None:
    model_type, fields = architectures.REUSABLE[name]
    model, ids = tiny_model(model_type, **fields).model, _ids()
    expected = plain_forward(model, ids)[0][-1]
    buffer = _buffer(model, ids, exact=True)
    output = row_forward(model, buffer, ids, RowPlan(torch.arange(LENGTH), _KeepEveryThird()))
    torch.testing.assert_close(output.logits, expected, atol=2e-5, rtol=1e-4)
    layers = fields.get("num_hidden_layers", 5)
    assert output.rows_per_layer == (61, 61, *(21,) * (layers - 2))
    assert output.rows.tolist() == [*range(0, 61, 3)]


@pytest.mark.parametrize("narrowing", [None, _KeepEveryThird()])
def test_layers_that_count_positions_themselves(tiny_model, narrowing: Any) -> None:
    """Llama 4 scales queries behind 8192 tokens by positions that it counts from the cache's length; here at once."""
    model, ids = tiny_model("llama4_text", num_local_experts=2).model, _ids()
    assert probe(model).reusable
    for layer in decoder_layers(model):
        layer.self_attn.floor_scale, layer.self_attn.attn_scale = 4, 2.0
    expected = plain_forward(model, ids)[0][-1]
    rows = torch.arange(LENGTH) if narrowing else torch.arange(0, LENGTH, 3)
    output = row_forward(model, _buffer(model, ids, exact=True), ids, RowPlan(rows, narrowing))
    torch.testing.assert_close(output.logits, expected, atol=2e-5, rtol=1e-4)


def test_what_is_narrowed_follows_from_its_shape() -> None:
    kept = torch.tensor([0, 2, 4])
    shapes = {
        "hidden_states": ((1, 5, 8), (1, 3, 8)),
        "position_ids": ((3, 1, 5), (3, 1, 3)),
        "attention_mask": ((1, 1, 5, 9), (1, 1, 3, 9)),
        "attention_scaling": ((1, 1, 5, 1), (1, 1, 3, 1)),  # Beam's, of queries
        "per_head": ((1, 5, 4, 8), (1, 3, 4, 8)),
        "other": ((1, 4, 5), (1, 4, 5)),
    }
    for name, (before, after) in shapes.items():
        assert _narrow(name, torch.zeros(before), kept, 5).shape == after, name


def test_rows_per_layer_are_what_passes_the_layers(tiny_model) -> None:
    model, ids = tiny_model("llama").model, _ids()
    buffer = _buffer(model, ids, exact=True)
    counts, handles = _count_rows(model)
    output = row_forward(model, buffer, ids, RowPlan(torch.arange(LENGTH), _KeepEveryThird()))
    for handle in handles:
        handle.remove()
    # These hooks came first, so they see the hidden states before layer 2 narrows them.
    assert counts == [61, 61, 61, 21, 21]
    assert output.rows_per_layer == (61, 61, 21, 21, 21)


def test_fresh_rows_are_written_and_others_left_alone(tiny_model) -> None:
    model, ids = tiny_model("llama").model, _ids()
    layout = probe(model).require_layout
    buffer = _buffer(model, ids, exact=True)
    before = buffer.read(0, LENGTH)
    rows = torch.tensor([3, 17, 18, 60])
    row_forward(model, buffer, ids.index_fill(0, rows, 5), RowPlan(rows))
    after = buffer.read(0, LENGTH)
    others = torch.ones(LENGTH, dtype=torch.bool).index_fill(0, rows, False)
    assert torch.equal(before.keys[0][:, :, others], after.keys[0][:, :, others])
    assert not torch.equal(before.keys[0][:, :, rows], after.keys[0][:, :, rows])
    assert layout.num_layers == 5


def test_nothing_is_left_behind(tiny_model) -> None:
    """Hooks, attention implementation and cache mode are restored, also when the forward raises."""
    model, ids = tiny_model("llama").model, _ids()
    implementation = model.config._attn_implementation
    row_forward(model, _buffer(model, ids, exact=True), ids, RowPlan(torch.tensor([60]), _KeepEveryThird()))
    original = model.model.layers[3].mlp.forward
    model.model.layers[3].mlp.forward = lambda x: 1 / 0
    with pytest.raises(ZeroDivisionError):
        row_forward(model, _buffer(model, ids, exact=True), ids, RowPlan(torch.tensor([60]), _KeepEveryThird()))
    model.model.layers[3].mlp.forward = original
    assert model.config._attn_implementation == implementation
    modules = list(model.modules())
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in modules)
    torch.testing.assert_close(plain_forward(model, ids)[0], plain_forward(model, ids)[0])
