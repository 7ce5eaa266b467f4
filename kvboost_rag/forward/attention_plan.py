"""Where blocks of rows begin, and which of their columns all of a block's rows see. Why: `attention_blocks`."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

ROW_STEP = 16
"""Blocks begin at multiples of this many rows."""
MAX_BLOCK_ROWS = 512
MIN_SHARED = 128
"""Columns visible to all rows of a block that make splitting worth its two calls."""


@dataclass(frozen=True)
class Costs:
    """What decides where blocks begin.

    Attributes:
        call_rows: what a call costs for each of its columns, in rows that attend to it: packing keys and values.
        block_pairs: what a block costs besides, in pairs of row and column: some twenty small operations.
        masked: what a masked pair of row and column costs, an unmasked one being 1.
    """

    call_rows: float
    block_pairs: float
    masked: float


FLASH = Costs(90, 25_000, 1.3)
"""torch's flash attention for CPUs."""
TWO_PRODUCTS = Costs(10, 80_000, 1.1)
"""`onednn.attention`: its products take any number of rows at nearly the same price."""


@dataclass(frozen=True)
class Part:
    """Columns `[start, end)` for the rows of a block.

    Attributes:
        bias: float32 `[1, 1, group · block_rows, end - start]`, 0 or -inf, for rows folded as `attend_blocks`
            folds them; None where all rows see all of the columns.
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


def plan_blocks(mask: torch.Tensor, group: int, costs: Costs = FLASH) -> tuple[Block, ...]:
    """Blocks of the rows of a mask.

    Args:
        mask: bool `[num_rows, kv_len]`, True = may attend.
        group: query heads a key head.
    """
    cuts = _cuts(mask, group, costs)
    return tuple(_plan_block(mask[start:end], start, group) for start, end in pairwise(cuts))


def _cuts(mask: torch.Tensor, group: int, costs: Costs) -> list[int]:
    """Where blocks begin, and the number of rows: the cheapest way to cut by the costs (dynamic programming)."""
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
            pairs = group * (end - start) * (shared + costs.masked * (width - shared))
            options.append((best[i][0] + costs.block_pairs + costs.call_rows * width + pairs, i))
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
