"""Attention of selected rows, offered to transformers as an attention implementation of its own.

Registered under `kvboost_rows` with transformers' `AttentionInterface` and `AttentionMaskInterface` (their documented
extension points) when a partial forward first needs it. The model's own code calls both: the mask function gets the
model's own index rule (causal, sliding window, chunked) and evaluates it at the rows of the pass.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from kvboost_rag.forward import amx_attention, onednn, triton_attention
from kvboost_rag.forward.attention_blocks import attend_blocks
from kvboost_rag.forward.attention_call import AttentionCall, AttentionObserver, AttentionResult
from kvboost_rag.forward.attention_mass import attention_mass
from kvboost_rag.forward.attention_plan import FLASH, TWO_PRODUCTS, Block, plan_blocks
from kvboost_rag.forward.causal_rows import CausalRows, causal_rows
from kvboost_rag.forward.not_reusable import NotReusable

IMPLEMENTATION = "kvboost_rows"


@dataclass
class ActiveRows:
    """The partial forward under way: positions of its rows now, `[num_rows]`, and who watches."""

    rows: torch.Tensor
    observer: AttentionObserver | None = None
    _plans: dict[int, tuple[torch.Tensor, tuple[Block, ...]]] = field(default_factory=dict, repr=False)
    _causal: dict[int, tuple[torch.Tensor, CausalRows | None]] = field(default_factory=dict, repr=False)

    def blocks(self, call: AttentionCall) -> tuple[Block, ...]:
        """Plan of the call's mask, made once: layers of one kind are given the same tensor."""
        mask = call.mask
        known = self._plans.get(id(mask))
        if known is None:  # the mask is kept with its plan, so that its id stays its own
            costs = TWO_PRODUCTS if onednn.attends(call.query) else FLASH
            known = self._plans[id(mask)] = mask, plan_blocks(mask[0, 0], call.group, costs)
        return known[1]

    def causal(self, mask: torch.Tensor) -> CausalRows | None:
        """The same mask in the kernels' terms, found out once."""
        known = self._causal.get(id(mask))
        if known is None:
            known = self._causal[id(mask)] = mask, causal_rows(mask[0, 0], self.rows)
        return known[1]


ACTIVE: ContextVar[ActiveRows | None] = ContextVar("kvboost_active_rows", default=None)


def _active() -> ActiveRows:
    active = ACTIVE.get()
    if active is None:
        raise RuntimeError(f"the attention implementation {IMPLEMENTATION!r} only works inside a partial forward")
    return active


def mask_at(
    positions: torch.Tensor, kv_length: int, mask_function: Any, device: torch.device, kv_offset: int
) -> torch.Tensor:
    """The model's own mask rule at the positions of queries: bool `[1, 1, num_rows, kv_len]`."""
    rows = positions.to(device)[:, None]
    columns = torch.arange(kv_offset, kv_offset + int(kv_length), device=device)[None]
    zero = torch.zeros((), dtype=torch.long, device=device)
    mask: torch.Tensor = mask_function(zero, zero, rows, columns)
    return mask.expand(len(rows), int(kv_length))[None, None]


def row_mask(
    batch_size: int, kv_length: int, mask_function: Any, device: torch.device, kv_offset: int = 0, **_: Any
) -> torch.Tensor:
    """The model's own mask rule at the rows of the pass: bool `[1, 1, num_rows, kv_len]`."""
    return mask_at(_active().rows, kv_length, mask_function, device, kv_offset).expand(batch_size, -1, -1, -1)


@torch.compiler.disable  # compiled loops are given addresses, which a tracer cannot follow
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
        raise NotReusable("its attention uses a mask of its own making, not the one of the partial forward")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    call = AttentionCall(query, key, value, attention_mask, scale, softcap, s_aux)
    result = _by_kernel(call, active) or _by_torch(call, active)
    layer = int(getattr(module, "layer_idx", -1))
    if active.observer is not None and active.observer.wants_attention(layer):
        active.observer.on_attention(layer, call, result)
    return result.output.contiguous(), None


def _by_kernel(call: AttentionCall, active: ActiveRows) -> AttentionResult | None:
    for kernel in (triton_attention, amx_attention):
        causal = active.causal(call.mask) if kernel.takes(call) else None
        result = None if causal is None else kernel.attend(call, causal)
        if result is not None:
            return result
    return None


def _by_torch(call: AttentionCall, active: ActiveRows) -> AttentionResult:
    blocks, lse = active.blocks(call), None
    if call.softcap is None and call.sinks is None:
        output, lse = attend_blocks(call, blocks)
    else:  # SDPA has no argument for these
        parts = [call.mixed(block.start, block.end, block.high) for block in blocks]
        output = torch.cat(parts, dim=2).transpose(1, 2)
    return AttentionResult(output, lse, partial(attention_mass, call, lse))


@cache
def register() -> None:
    """Make the implementation known to transformers. Called by the first partial forward, not at import."""
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, row_attention)
    AttentionMaskInterface.register(IMPLEMENTATION, row_mask)
