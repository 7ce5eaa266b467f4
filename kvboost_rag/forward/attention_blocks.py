"""Row attention in blocks of rows, without a mask wherever a block's rows agree about a column.

Rows that repair chose lie scattered, each seeing another part of the prompt. A mask over all of it costs a CPU as much
as the attention itself (measured: `benchmarks/row_attention.py`). Within a block of ascending rows nearly all columns
are visible to every row; only the stretch between the block's first and last row differs. Both parts are attended
separately and merged by their log-sum-exp, as FlashDecoding merges splits of the keys. The query heads of one key head
are folded into one batch of rows, so that keys and values are read once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvboost_rag.forward import onednn
from kvboost_rag.forward.attention_call import AttentionCall
from kvboost_rag.forward.attention_plan import Block, Part


def attend_blocks(call: AttentionCall, blocks: Sequence[Block]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of all rows.

    Args:
        call: without soft cap and sinks.
        blocks: from `plan_blocks`.

    Returns:
        Output `[1, num_rows, num_heads, value_head_dim]`, and log-sum-exp as in `AttentionResult`
        where it can be had.
    """
    rows, heads, kv_heads = call.query.shape[2], call.query.shape[1], call.key.shape[1]
    output = call.query.new_empty(1, rows, heads, call.value.shape[-1])
    if not _fused_with_log_sum_exp(call) or not all(block.parts for block in blocks):
        for block in blocks:
            output[:, block.start : block.end] = attend_masked(call, block).transpose(1, 2)
        return output, None
    lse = torch.empty(kv_heads, heads // kv_heads, rows)
    for block in blocks:
        mixed, lse[:, :, block.start : block.end] = _attend_parts(call, block)
        output[:, block.start : block.end] = mixed.transpose(1, 2)
    return output, lse


def attend_masked(call: AttentionCall, block: Block) -> torch.Tensor:
    """Attention of one block with its mask, `[1, num_heads, block_rows, value_head_dim]`: the twin of the parts."""
    columns = slice(block.low, block.high)
    return scaled_dot_product_attention(
        call.query[:, :, block.start : block.end],
        call.key[:, :, columns],
        call.value[:, :, columns],
        attn_mask=call.mask[:, :, block.start : block.end, columns],
        scale=call.scaling,
        enable_gqa=call.query.shape[1] != call.key.shape[1],
    )


def _fused_with_log_sum_exp(call: AttentionCall) -> bool:
    """Whether torch's CPU flash attention, which SDPA takes for such tensors, can be asked for its log-sum-exp."""
    return (
        call.query.device.type == "cpu"
        and call.query.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and call.query.shape[-1] == call.value.shape[-1]
        and call.key.stride(-1) == 1 == call.value.stride(-1)
        and hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")
    )


def _attend_parts(call: AttentionCall, block: Block) -> tuple[torch.Tensor, torch.Tensor]:
    """Output `[1, num_heads, block_rows, head_dim]` and log-sum-exp `[num_kv_heads, group, block_rows]`."""
    kv_heads = call.key.shape[1]
    rows, dim = block.end - block.start, call.query.shape[-1]
    group = call.query.shape[1] // kv_heads
    query = call.query[:, :, block.start : block.end].reshape(1, kv_heads, group * rows, dim)
    output, lse = _attend_part(query, call, block.parts[0])
    for part in block.parts[1:]:
        other, other_lse = _attend_part(query, call, part)
        share = torch.sigmoid(other_lse - lse)[..., None]
        output = torch.lerp(output.float(), other.float(), share).to(output.dtype)
        lse = torch.logaddexp(lse, other_lse)
    return output.view(1, -1, rows, dim), lse.reshape(kv_heads, group, rows)


def _attend_part(query: torch.Tensor, call: AttentionCall, part: Part) -> tuple[torch.Tensor, torch.Tensor]:
    columns = slice(part.start, part.end)
    key, value = call.key[:, :, columns], call.value[:, :, columns]
    if onednn.attends(query):
        done = onednn.KERNEL.run(
            ("attention", query.shape[1], query.shape[3], part.bias is None),
            lambda: onednn.attention(query, key, value, part.bias, call.scaling),
            lambda done: zip(done, _flash(query, key, value, part.bias, call.scaling), strict=True),
        )
        if done is not None:
            return done
    return _flash(query, key, value, part.bias, call.scaling)


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, False, attn_mask=bias, scale=scaling
    )
    return output, lse.float()
