"""One step of several requests: one forward over one new token of each, attention per request in its own buffer.

The rows stand in one sequence with their own position ids, so nothing is padded: the matrices are read once for all
rows, and each row attends to its own request's keys. Registered under `kvboost_packed` with transformers'
`AttentionInterface` and `AttentionMaskInterface`. The slow twin is one forward a request (`same_as_alone`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from kvboost_rag.forward.attention_call import AttentionCall
from kvboost_rag.forward.row_attention import mask_at
from kvboost_rag.forward.row_forward import attention_implementation
from kvboost_rag.models.hf_cache import BufferCache, cache_argument
from kvboost_rag.models.packed_cache import PackedCache

IMPLEMENTATION = "kvboost_packed"
_ACTIVE: ContextVar[PackedCache | None] = ContextVar("kvboost_packed", default=None)
_TOLERANCE = {torch.float32: 1e-4}
_HALF_TOLERANCE = 0.05


def _active() -> PackedCache:
    active = _ACTIVE.get()
    if active is None:
        raise RuntimeError(f"the attention implementation {IMPLEMENTATION!r} only works inside a packed forward")
    return active


def packed_mask(
    batch_size: int, kv_length: int, mask_function: Any, device: torch.device, kv_offset: int = 0, **_: Any
) -> torch.Tensor:
    """The model's own mask rule at each request's position: bool `[1, 1, num_requests, longest kv_len]`."""
    return mask_at(_active().positions, kv_length, mask_function, device, kv_offset)


def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of each request's row to that request's keys.

    Args:
        query: `[1, num_heads, num_requests, head_dim]`.
        attention_mask: from `packed_mask`.
        options: `scaling`, `softcap` (Gemma 2), `s_aux` (sinks of gpt-oss).

    Returns:
        Output `[1, num_requests, num_heads, value_head_dim]` and no weights.
    """
    if attention_mask is None or attention_mask.dtype != torch.bool:
        raise RuntimeError("the model did not pass on the mask of the packed forward")
    scaling = options.get("scaling")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    softcap, sinks = options.get("softcap"), options.get("s_aux")
    outputs = []
    for row, (keys, values) in enumerate(_active().visible()):
        own = query[:, :, row : row + 1]
        mask = attention_mask[:, :, row : row + 1, : keys.shape[2]].to(own.device)
        if softcap is None and sinks is None:
            outputs.append(
                nn.functional.scaled_dot_product_attention(
                    own, keys, values, attn_mask=mask, scale=scale, enable_gqa=keys.shape[1] != own.shape[1]
                )
            )
        else:
            outputs.append(AttentionCall(own, keys, values, mask, scale, softcap, sinks).mixed())
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


@torch.no_grad()
def packed_forward(model: PreTrainedModel, tokens: torch.Tensor, caches: Sequence[BufferCache]) -> torch.Tensor:
    """Append one token to each request.

    Args:
        tokens: `[num_requests]`.
        caches: of the requests; each grows by one position.

    Returns:
        Logits `[num_requests, vocab_size]`.
    """
    _register()
    packed = PackedCache(caches)
    token = _ACTIVE.set(packed)
    kwargs: dict[str, Any] = {cache_argument(model): packed}
    try:
        with attention_implementation(model, IMPLEMENTATION):
            output = model(
                input_ids=tokens[None],
                position_ids=packed.positions.to(tokens.device)[None],
                attention_mask=None,
                use_cache=True,
                **kwargs,
            )
    finally:
        _ACTIVE.reset(token)
    logits: torch.Tensor = output.logits[0]
    return logits


def same_as_alone(
    alone: Sequence[Callable[[], torch.Tensor]], caches: Sequence[BufferCache], packed: torch.Tensor
) -> torch.Tensor | None:
    """Take the step that was just taken once more, each request by itself.

    Args:
        alone: runs one request's forward, giving logits `[vocab_size]`.
        packed: what `packed_forward` gave.

    Returns:
        The logits that single forwards gave if they differ from the packed ones by more than rounding; None if not.
    """
    single = []
    for cache_of, run in zip(caches, alone, strict=True):
        cache_of.buffer.length -= 1
        single.append(run())
    slow = torch.stack(single).float()
    tolerance = _TOLERANCE.get(packed.dtype, _HALF_TOLERANCE) * max(1.0, float(slow.abs().max()))
    return None if float((slow - packed.float()).abs().max()) <= tolerance else slow


@cache
def _register() -> None:
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, packed_attention)
    AttentionMaskInterface.register(IMPLEMENTATION, packed_mask)
