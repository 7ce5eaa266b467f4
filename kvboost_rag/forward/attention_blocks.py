"""Row attention in blocks of rows, without a mask wherever a block's rows agree about a column.

Rows that repair chose lie scattered, each seeing another part of the prompt. A mask over all of it costs a CPU as much
as the attention itself (measured: `benchmarks/row_attention.py`). Within a block of ascending rows nearly all columns
are visible to every row; only the stretch between the block's first and last row differs. Both parts are attended
separately and merged by their log-sum-exp, as FlashDecoding merges splits of the keys. The query heads of one key head
are folded into one batch of rows, so that keys and values are read once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvboost_rag.forward.attention_call import AttentionCall

ROW_STEP = 16
"""Blocks begin at multiples of this many rows."""
MAX_BLOCK_ROWS = 512
MIN_SHARED = 128
"""Columns visible to all rows of a block that make splitting worth its two calls."""
CALL_ROWS = 90
"""What a call costs for each of its columns, in rows that attend to it: packing keys and values."""
BLOCK_PAIRS = 25_000
"""What a block costs besides, in pairs of row and column: some twenty small operations."""
MASKED_COST = 1.3
"""What a masked pair of row and column costs, an unmasked one being 1."""


@dataclass(frozen=True)
class Part:
    """Columns `[start, end)` for the rows of a block.

    Attributes:
        bias: float32 `[1, 1, group · block_rows, end - start]`, 0 or -inf, for rows folded as `_attend_parts` folds
            them; None where all rows see all of the columns.
    """

    start: int
    end: int
    bias: torch.Tensor | None = None


@dataclass(frozen=True)
class Block:
    """Rows `[start, end)` of a pass; columns outside `[low, high)` are visible to none of them.

    Attributes:
        parts: one or two parts that can be attended separately, each with a visible column for every row; empty where
            some row sees nothing.
    """

    start: int
    end: int
    low: int
    high: int
    parts: tuple[Part, ...]


def plan_blocks(mask: torch.Tensor, group: int) -> tuple[Block, ...]:
    """Blocks of the rows of a mask.

    Args:
        mask: bool `[num_rows, kv_len]`, True = may attend.
        group: query heads a key head.
    """
    cuts = _cuts(mask, group)
    return tuple(_plan_block(mask[start:end], start, group) for start, end in pairwise(cuts))


def _cuts(mask: torch.Tensor, group: int) -> list[int]:
    """Where blocks begin, and the number of rows: the cheapest way to cut by the costs above (dynamic programming)."""
    rows, columns = mask.shape
    bits = mask.view(torch.uint8)
    first = bits.argmax(1).tolist()
    last = (columns - bits.flip(1).argmax(1)).tolist()
    edges = [*range(0, rows, ROW_STEP), rows]
    best: list[tuple[float, int]] = [(0.0, 0)]
    for j, end in enumerate(edges[1:], start=1):
        options = []
        for i in range(j - 1, -1, -1):
            start = edges[i]
            if end - start > MAX_BLOCK_ROWS:
                break
            width = max(last[end - 1], last[start]) - min(first[start], first[end - 1])
            shared = max(0, min(last[start], last[end - 1]) - max(first[start], first[end - 1]))
            pairs = shared + MASKED_COST * (width - shared)
            options.append((best[i][0] + BLOCK_PAIRS + CALL_ROWS * width + group * (end - start) * pairs, i))
        best.append(min(options))
    cuts, j = [rows], len(edges) - 1
    while j:
        j = best[j][1]
        cuts.append(edges[j])
    return cuts[::-1]


def _plan_block(mask: torch.Tensor, start: int, group: int) -> Block:
    end = start + len(mask)
    visible = torch.nonzero(mask.any(0)).flatten()
    if not len(visible):
        return Block(start, end, 0, mask.shape[1], ())
    low, high = int(visible[0]), int(visible[-1]) + 1
    if not bool(mask.any(1).all()):
        return Block(start, end, low, high, ())
    shared = torch.nonzero(mask.all(0)).flatten()
    if len(shared) == high - low:
        return Block(start, end, low, high, (Part(low, high),))
    if len(shared) > MIN_SHARED and int(shared[0]) == low and int(shared[-1]) - low + 1 == len(shared):
        # One shared column goes with the rest: each row then sees at least one column of either part.
        middle = int(shared[-1])
        return Block(start, end, low, high, (Part(low, middle), _masked(mask, middle, high, group)))
    return Block(start, end, low, high, (_masked(mask, low, high, group),))


def _masked(mask: torch.Tensor, start: int, end: int, group: int) -> Part:
    bias = torch.zeros(len(mask), end - start, device=mask.device)
    bias.masked_fill_(~mask[:, start:end], float("-inf"))
    return Part(start, end, bias.repeat(group, 1)[None, None])


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
    output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, call.key[:, :, columns], call.value[:, :, columns], 0.0, False, attn_mask=part.bias, scale=call.scaling
    )
    return output, lse.float()
