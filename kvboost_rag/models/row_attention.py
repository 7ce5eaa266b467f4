"""Attention of selected rows, offered to transformers as an attention implementation of its own.

Registered under `kvboost_rows` with transformers' `AttentionInterface` and `AttentionMaskInterface` (their documented
extension points) when a partial forward first needs it. The model's own code calls both: the mask function gets the
model's own index rule (causal, sliding window, chunked) and evaluates it at the rows of the pass.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

IMPLEMENTATION = "kvboost_rows"
BLOCK_ROWS = 64
"""Rows attended at once: keys beyond the last row of a block cannot matter to it and are not read."""


@dataclass(frozen=True)
class AttentionCall:
    """What one layer's attention works on.

    Attributes:
        query: `[1, num_heads, num_rows, key_head_dim]`, rotated.
        key: `[1, num_kv_heads, kv_len, key_head_dim]`.
        mask: bool, `[1, 1, num_rows, kv_len]`; True = may attend.
        scaling: factor of the logits.
        softcap: logits are softcap · tanh(logits / softcap) where set (Gemma 2).
        sinks: one extra logit a head that takes mass and gives nothing (gpt-oss), `[num_heads]`.
    """

    query: torch.Tensor
    key: torch.Tensor
    mask: torch.Tensor
    scaling: float
    softcap: float | None = None
    sinks: torch.Tensor | None = None

    def logits(self, start: int = 0, end: int | None = None, key: torch.Tensor | None = None) -> torch.Tensor:
        """Masked logits of rows `[start, end)`, float32 `[num_kv_heads, group, num_rows, kv_len]`.

        `key` replaces the keys.
        """
        keys = (self.key if key is None else key)[0]
        query = self.query[0, :, start:end].unflatten(0, (keys.shape[0], -1))
        kv_heads, group, rows, dim = query.shape
        scores = query.reshape(kv_heads, group * rows, dim) @ keys.transpose(1, 2)
        scores = scores.float().mul_(self.scaling).view(kv_heads, group, rows, -1)
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        return scores.masked_fill_(~self.mask[0, :, start:end, : keys.shape[1]], float("-inf"))

    def weights(self, start: int = 0, end: int | None = None, key: torch.Tensor | None = None) -> torch.Tensor:
        """Attention weights of rows `[start, end)`, float32 `[num_kv_heads, group, num_rows, kv_len]`."""
        scores = self.logits(start, end, key)
        if self.sinks is None:
            return scores.softmax(-1)
        sinks = self.sinks.float().view(scores.shape[0], -1, 1, 1).expand(*scores.shape[:3], 1)
        return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]


class AttentionObserver(Protocol):
    """Sees the attention of a partial forward."""

    def wants_attention(self, layer: int) -> bool:
        """Whether `on_attention` should be called for this layer."""

    def on_attention(self, layer: int, call: AttentionCall) -> None:
        """Called before the layer's attention is computed."""


@dataclass
class ActiveRows:
    """The partial forward under way: positions of its rows now, `[num_rows]`, and who watches."""

    rows: torch.Tensor
    observer: AttentionObserver | None = None


ACTIVE: ContextVar[ActiveRows | None] = ContextVar("kvboost_active_rows", default=None)


def _active() -> ActiveRows:
    active = ACTIVE.get()
    if active is None:
        raise RuntimeError(f"the attention implementation {IMPLEMENTATION!r} only works inside a partial forward")
    return active


def row_mask(
    batch_size: int, kv_length: int, mask_function: Any, device: torch.device, kv_offset: int = 0, **_: Any
) -> torch.Tensor:
    """The model's own mask rule at the rows of the pass: bool `[1, 1, num_rows, kv_len]`."""
    rows = _active().rows.to(device)[:, None]
    columns = torch.arange(kv_offset, kv_offset + int(kv_length), device=device)[None]
    zero = torch.zeros((), dtype=torch.long, device=device)
    mask: torch.Tensor = mask_function(zero, zero, rows, columns)
    return mask.expand(len(rows), int(kv_length))[None, None].expand(batch_size, -1, -1, -1)


def row_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of the rows of the pass against the whole prompt.

    Args:
        module: the attention module, for its layer index.
        query: `[1, num_heads, num_rows, head_dim]`.
        key, value: `[1, num_kv_heads, kv_len, head_dim]`.
        attention_mask: bool `[1, 1, num_rows, kv_len]`, from `row_mask`.

    Returns:
        Output `[1, num_rows, num_heads, value_head_dim]` and no weights.
    """
    active = _active()
    if attention_mask is None or attention_mask.dtype != torch.bool:
        raise RuntimeError("the model did not pass on the mask of the partial forward")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    call = AttentionCall(query, key, attention_mask, scale, softcap, s_aux)
    layer = int(getattr(module, "layer_idx", -1))
    if active.observer is not None and active.observer.wants_attention(layer):
        active.observer.on_attention(layer, call)
    attend = _attend_fused if softcap is None and s_aux is None else _attend_explicit
    rows = active.rows.tolist()
    outputs = []
    for start in range(0, len(rows), BLOCK_ROWS):
        end = min(start + BLOCK_ROWS, len(rows))
        outputs.append(attend(call, value, start, end, rows[end - 1] + 1))
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


def _attend_fused(call: AttentionCall, value: torch.Tensor, start: int, end: int, visible: int) -> torch.Tensor:
    return scaled_dot_product_attention(
        call.query[:, :, start:end],
        call.key[:, :, :visible],
        value[:, :, :visible],
        attn_mask=call.mask[:, :, start:end, :visible],
        scale=call.scaling,
        enable_gqa=call.query.shape[1] != call.key.shape[1],
    )


def _attend_explicit(call: AttentionCall, value: torch.Tensor, start: int, end: int, visible: int) -> torch.Tensor:
    """What SDPA has no argument for: soft caps and attention sinks."""
    weights = call.weights(start, end, call.key[:, :, :visible]).to(value.dtype)
    kv_heads, group, rows, _ = weights.shape
    mixed = weights.view(kv_heads, group * rows, -1) @ value[0, :, :visible]
    return mixed.view(1, kv_heads * group, rows, -1)


@cache
def register() -> None:
    """Make the implementation known to transformers. Called by the first partial forward, not at import."""
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, row_attention)
    AttentionMaskInterface.register(IMPLEMENTATION, row_mask)
