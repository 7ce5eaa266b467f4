"""Whether partial forwards give the plain forward's logits; on the way it is learnt which arguments hold rows."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from kvboost_rag.forward.attention_call import AttentionCall, AttentionResult
from kvboost_rag.forward.not_reusable import NotReusable
from kvboost_rag.forward.row_arguments import RowArguments, remember, seen_shapes
from kvboost_rag.forward.row_forward import RowPlan, decoder_layers, row_forward
from kvboost_rag.kv.buffer import KVBuffer, KVLayout
from kvboost_rag.models import hf_cache

FAR = 1 << 20
"""A position after those at which models begin to scale queries."""


def partial_forward_error(
    model: PreTrainedModel,
    layout: KVLayout,
    ids: torch.Tensor,
    reference: tuple[torch.Tensor, list[hf_cache.LayerKV]],
) -> float:
    """Largest relative L2 distance of the logits of three partial forwards from exact KV to the plain forward's.

    They compute every third row and the last; the last rows; and all rows, of which only every third goes on after the
    first layer. The first two show which arguments of the decoder layers hold rows; by that the third is narrowed.

    Args:
        ids: the prompt, `[prompt_len]`.
        reference: the plain forward's logits of the last row, and keys and values.
    """
    logits, base = reference
    layers, end = decoder_layers(model), len(ids) - 1
    buffer = KVBuffer(layout, len(ids))
    keys, values = hf_cache.split_batch(base, 0, 0, len(ids))
    buffer.place(layout.stack(keys, values), 0)

    def error_of(plan: RowPlan) -> float:
        buffer.length = FAR  # a partial forward's positions are those of its rows, whatever length the cache states
        return relative_l2(row_forward(model, buffer, ids, plan).logits, logits)

    attention = _Counting()
    with seen_shapes(layers) as many:
        some = torch.tensor(sorted({*range(0, end, 3), end}), device=ids.device)
        errors = [error_of(RowPlan(some, observer=attention))]
    if not attention.calls:
        raise NotReusable("its attention does not go through transformers' interface for it, which rows are given by")
    with seen_shapes(layers) as few:
        errors.append(error_of(RowPlan(torch.arange(end - 4, end + 1, device=ids.device))))
    remember(layers, RowArguments.of(many, few))
    if len(layers) > 1:
        errors.append(error_of(RowPlan(torch.arange(end + 1, device=ids.device), _EveryThird(end))))
    return float(torch.tensor(errors).max())  # unlike the built-in `max`, NaN if any is


class _Counting:
    """Counts calls of attention."""

    def __init__(self) -> None:
        self.calls = 0

    def on_kv(self, layer: int, fresh: hf_cache.LayerKV, stored: hf_cache.LayerKV) -> None:
        """Not of interest."""

    def wants_attention(self, layer: int) -> bool:
        self.calls += 1
        return False

    def on_attention(self, layer: int, call: AttentionCall, result: AttentionResult) -> None:
        """Not asked for."""


class _EveryThird(_Counting):
    """Narrows after the first layer."""

    before_layer = 1

    def __init__(self, last: int) -> None:
        super().__init__()
        self.last = last

    def keep(self, rows: torch.Tensor) -> torch.Tensor:
        return (rows % 3 == 0) | (rows == self.last)


def relative_l2(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """‖actual − expected‖₂ / ‖expected‖₂."""
    expected = expected.float()
    return float((actual.float() - expected).norm() / expected.norm().clamp_min(1e-30))
