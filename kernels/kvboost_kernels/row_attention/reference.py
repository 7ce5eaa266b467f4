"""`row_attention` in plain torch: all logits at once, float32."""

from __future__ import annotations

import torch

from kvboost_kernels.row_attention.request import Request


def row_attention_reference(request: Request) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Output, mass, entropy; see `row_attention`."""
    query, key, value = request.query, request.key, request.value
    heads, num_rows = query.shape[1:3]
    logits = attention_logits(request, key)
    denominator = torch.logsumexp(logits, dim=-1, keepdim=True)
    if request.sinks is not None:
        denominator = torch.logaddexp(denominator, request.sinks.float()[:, None, None])
    visible = visible_keys(request)
    weights = torch.where(visible, torch.exp(logits - denominator), 0.0)
    # Columns that no row sees may be uninitialised memory, and 0 * NaN is NaN.
    value = value[0].float().masked_fill(~visible.any(0)[:, None], 0.0)
    grouped = weights.view(key.shape[1], request.group * num_rows, key.shape[2])
    output = (grouped @ value).view(heads, num_rows, value.shape[-1])
    laid_out = output.to(query.dtype).transpose(0, 1).contiguous().transpose(0, 1)[None]
    mass = None
    if request.mass_rows is not None:
        mass = weights[:, request.mass_rows].sum((0, 1)) / max(1, heads * request.mass_rows.numel())
    return laid_out, mass, _entropy(logits, visible) if request.entropy else None


def attention_logits(request: Request, key: torch.Tensor) -> torch.Tensor:
    """Scaled and capped logits of the rows against `key`, float32 `[num_heads, num_rows, kv_len]`.

    `-inf` where a row does not see a key.
    """
    heads, num_rows, head_dim = request.query.shape[1:]
    kv_heads, kv_len = key.shape[1:3]
    grouped = request.query[0].float().reshape(kv_heads, request.group * num_rows, head_dim)
    logits = (grouped @ key[0].float().transpose(1, 2)).view(heads, num_rows, kv_len) * request.scaling
    if request.softcap is not None:
        logits = request.softcap * torch.tanh(logits / request.softcap)
    return logits.masked_fill(~visible_keys(request), float("-inf"))


def visible_keys(request: Request) -> torch.Tensor:
    """Which keys each row sees, bool `[num_rows, kv_len]`."""
    column = torch.arange(request.key.shape[2], device=request.key.device)
    visible = column <= request.rows[:, None]
    if request.sliding_window is not None:
        visible &= column > request.rows[:, None] - request.sliding_window
    return visible


def _entropy(logits: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    log_weights = logits.log_softmax(-1)
    return -torch.where(visible, log_weights.exp() * log_weights, 0.0).sum(-1)
