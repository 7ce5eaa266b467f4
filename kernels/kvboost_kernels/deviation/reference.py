"""`deviation` and `attention_kl` in plain torch."""

from __future__ import annotations

import torch

from kvboost_kernels.row_attention.reference import attention_logits, visible_keys
from kvboost_kernels.row_attention.request import Request


def deviation_reference(fresh: torch.Tensor, stored: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    """Relative L2 distance of each token, float32 `[num_layers, num_tokens]`."""
    base = (stored if rows is None else stored[:, :, rows]).float()
    distance = (fresh.float() - base).square().sum((1, 3)).sqrt()
    norm = base.square().sum((1, 3)).sqrt()
    return torch.where(distance == 0, distance, distance / norm)


def attention_kl_reference(request: Request) -> torch.Tensor:
    """The request's `key` is the fresh one, its `value` the stored one; float32 `[num_heads, num_rows]`."""
    fresh = attention_logits(request, request.key).log_softmax(-1)
    stored = attention_logits(request, request.value).log_softmax(-1)
    return torch.where(visible_keys(request), fresh.exp() * (fresh - stored), 0.0).sum(-1)
