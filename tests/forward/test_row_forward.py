"""A partial forward gives the plain forward's logits and computes the rows it says, layer by layer."""

from __future__ import annotations

import copy
from typing import Any

import architectures
import pytest
import torch
from kv_helpers import kv_at, plain_forward

from kvboost_rag.forward.probe import probe
from kvboost_rag.forward.row_arguments import RowArguments, recall
from kvboost_rag.forward.row_forward import RowPlan, decoder_layers, row_forward
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

    def on_attention(self, layer: int, call: object, result: object) -> None:
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


def test_the_probe_learns_what_counts_rows(tiny_model) -> None:
    model = tiny_model("gemma3_text", num_hidden_layers=7, sliding_window=5).model
    assert probe(model).reusable
    arguments = recall(decoder_layers(model))
    found = {path[1:]: dims for layer in arguments.dims for path, dims in layer.items()}
    assert found[(0,)] == (1,)
    assert found["attention_mask",] == (2,)
    assert found["position_embeddings", 0] == (1,)


def _spoilt(model: Any, layer: int, change: Any) -> Any:
    """A hook that changes what one layer is given, before the partial forward narrows it."""

    def hook(module: Any, args: Any, kwargs: Any) -> Any:
        return args, {**kwargs, **change(kwargs)}

    return decoder_layers(model)[layer].register_forward_pre_hook(hook, with_kwargs=True, prepend=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda k: {"attention_mask": k["attention_mask"][:, :, 1:]}, r"'attention_mask' of shape .*expected 61 rows"),
        (lambda k: {"new": torch.ones(61, 61)}, r"'new' of shape \(61, 61\), of which the probe did not learn"),
        (lambda k: {"position_ids": torch.zeros(())}, "'position_ids' of shape"),
    ],
    ids=["other size", "unknown", "other dimensions"],
)
def test_an_argument_that_is_not_as_the_probe_saw_it_is_an_error(tiny_model, change: Any, message: str) -> None:
    model, ids = tiny_model("llama").model, _ids()
    buffer = _buffer(model, ids, exact=True)
    handle = _spoilt(model, 2, change)
    with pytest.raises(RuntimeError, match=message):
        row_forward(model, buffer, ids, RowPlan(torch.arange(LENGTH), _KeepEveryThird()))
    handle.remove()
    row_forward(model, buffer, ids, RowPlan(torch.arange(LENGTH), _KeepEveryThird()))


def test_rows_in_two_dimensions_are_an_error_when_they_would_be_narrowed() -> None:
    arguments = RowArguments.of([{(0, 0): (1, 9, 9)}], [{(0, 0): (1, 5, 5)}])
    with pytest.raises(RuntimeError, match="argument 0 of shape"):
        arguments.row_dim(0, (0, 0), torch.zeros(1, 9, 9))


def test_only_a_probed_model_drops_rows(tiny_model) -> None:
    model, other = tiny_model("llama").model, tiny_model("llama").model
    buffer, ids = _buffer(model, _ids(), exact=True), _ids()
    with pytest.raises(RuntimeError, match="has been probed"):
        row_forward(copy.deepcopy(other), buffer, ids, RowPlan(torch.arange(LENGTH), _KeepEveryThird()))


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
