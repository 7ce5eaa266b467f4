"""Masks in the terms of kernels: rows that see the keys up to their own position."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from kvboost_kernels.row_attention.cpu import RowTiles


@dataclass(frozen=True)
class CausalRows:
    """Row `i` sees keys `j ≤ rows[i]`, of them the last `window` (None: all)."""

    rows: torch.Tensor
    window: int | None
    _tiles: dict[int, RowTiles] = field(default_factory=dict, repr=False, compare=False)

    def tiles(self, start: int) -> RowTiles:
        """Rows from index `start` on as the loops for matrix tiles take them, made once."""
        if start not in self._tiles:
            from kvboost_kernels.row_attention.cpu import RowTiles

            self._tiles[start] = RowTiles(self.rows[start:], self.window)
        return self._tiles[start]


def causal_rows(mask: torch.Tensor, rows: torch.Tensor) -> CausalRows | None:
    """What a mask `[num_rows, kv_len]` amounts to at these positions, or None for any other rule."""
    rows = rows.to(mask.device)
    columns = torch.arange(mask.shape[1], device=mask.device)[None]
    causal = columns <= rows[:, None]
    if torch.equal(mask, causal):
        return CausalRows(rows, None)
    window = int(mask.sum(1).amax()) if len(mask) else 0
    if window and torch.equal(mask, causal & (columns > rows[:, None] - window)):
        return CausalRows(rows, window)
    return None
