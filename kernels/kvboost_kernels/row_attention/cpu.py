"""`row_attention` for bfloat16 on a CPU with matrix tiles (AMX), in code that numba compiles.

FlashAttention's online softmax (arXiv 2205.14135) over blocks of keys, for rows that each see the keys up to their own
position. torch's flash attention for CPUs packs keys and values in every call and takes a mask as float32 numbers; here
positions are enough, keys are read as they lie and values are packed once a key head. What a row comes out as does not
depend on the rows beside it, nor on the number of threads.

Imported only where numba is installed (the extra `cpu`) and `kvboost_kernels.amx.available()`.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import numpy as np
import torch

from kvboost_kernels import amx, compiled
from kvboost_kernels.compiled import memory
from kvboost_kernels.lanes import LANE_BYTES, LANES
from kvboost_kernels.row_attention.request import fits_tiles
from kvboost_kernels.row_attention.tile_loops import entry
from kvboost_kernels.row_attention.tile_work import Heads, Work, scratch_bytes

PAIR = 2 * LANES
"""Rows that share each tile of keys: two tiles of query."""
MIN_COST_A_THREAD = 1 << 17
"""Pairs of row and key, over all heads, worth waking a thread for."""
NO_WINDOW = 1 << 30
SUMS_AS_CHANNELS = LANE_BYTES // 2
"""A vector of sums for each key takes as much memory as so many channels of values."""


class RowTiles:
    """Rows of a prompt, sixteen a tile, that each see the keys up to their own position, the last `window` (None: all).

    Made once a pass: every layer attends with the same rows.

    Args:
        rows: int64 `[num_rows]`, positions. Any order is right; ascending is fastest.

    Raises:
        ValueError: no rows, negative positions, or a window without keys.
    """

    def __init__(self, rows: torch.Tensor, window: int | None = None) -> None:
        if rows.dtype != torch.int64 or rows.dim() != 1 or not len(rows):
            raise ValueError(f"rows: expected int64 [num_rows] positions, got {rows.dtype} {tuple(rows.shape)}")
        if int(rows.min()) < 0 or int(rows.max()) >= NO_WINDOW:
            raise ValueError(f"rows: positions {int(rows.min())} to {int(rows.max())}, expected 0 to {NO_WINDOW - 1}")
        if window is not None and window < 1:
            raise ValueError(f"window={window}: expected 1 or more, or None")
        self.num_rows, self.end = len(rows), int(rows.max()) + 1
        self.window = NO_WINDOW if window is None else min(window, NO_WINDOW)
        self.begin = max(0, int(rows.min()) + 1 - self.window)
        missing = -self.num_rows % PAIR
        self.positions = torch.cat([rows, rows[-1:].expand(missing)]).to(torch.int32)
        by_tile = self.positions.view(-1, LANES).long()
        self.bounds = torch.stack(by_tile.aminmax(dim=1), dim=1)
        self.pairs_of_row_and_key = int((rows + 1).clamp(max=self.window).sum())


def attend_rows(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tiles: RowTiles, *, scaling: float, threads: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of rows against a whole buffer of keys and values.

    Args:
        query: bfloat16 `[1, num_heads, num_rows, head_dim]`, as all three tensors such that `fits_tiles` holds.
        key: `[1, num_kv_heads, kv_len, head_dim]`.
        value: `[1, num_kv_heads, kv_len, value_head_dim]`.
        tiles: the rows' positions, each of them below `kv_len`.
        threads: how many share the work; the caller is one of them.

    Returns:
        Output `[1, num_rows, num_heads, value_head_dim]`, contiguous, and the log-sum-exp of each row's scaled logits,
        float32 `[num_kv_heads, group, num_rows]`.

    Raises:
        ValueError: the tensors are not as said above.
    """
    call = _Call(query, key, value, tiles, scaling)
    heads, num_rows = query.shape[1:3]
    output = query.new_empty(1, num_rows, heads, value.shape[3])
    peaks, totals = torch.empty(2, heads, len(tiles.positions))
    call.run(threads, output=output, peaks=peaks, totals=totals)
    lse = torch.add(totals.log(), peaks, alpha=scaling)
    return output, lse[:, :num_rows].reshape(key.shape[1], -1, num_rows)


def attention_mass(
    query: torch.Tensor,
    key: torch.Tensor,
    tiles: RowTiles,
    log_sum_exp: torch.Tensor,
    *,
    scaling: float,
    threads: int = 1,
) -> torch.Tensor:
    """Attention that the rows give each key: mean over heads, sum over rows, float32 `[kv_len]`.

    Args:
        query, key, tiles, scaling: as of `attend_rows`.
        log_sum_exp: what it returned for these rows.

    Raises:
        ValueError: the tensors are not as said above.
    """
    call = _Call(query, key, key, tiles, scaling)
    heads, num_rows, kv_len = query.shape[1], query.shape[2], key.shape[2]
    if log_sum_exp.numel() != heads * num_rows:
        raise ValueError(f"log_sum_exp {tuple(log_sum_exp.shape)} is not of {heads} heads and {num_rows} rows")
    offsets = torch.full((heads, len(tiles.positions)), float("inf"))
    offsets[:, :num_rows] = log_sum_exp.reshape(heads, num_rows) / math.log(2)
    by_head = torch.empty(heads, -(-tiles.end // LANES) * LANES)
    call.run(threads, totals=offsets, mass=by_head)
    mass = torch.zeros(kv_len)
    mass[: tiles.end] = by_head[:, : tiles.end].mean(0)
    return mass


class _Call:
    """The tensors of one call, told to compiled code."""

    def __init__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tiles: RowTiles, scaling: float
    ) -> None:
        if (
            not fits_tiles(query, key, value, scaling)
            or query.shape[1] % key.shape[1]
            or key.shape[:3] != value.shape[:3]
        ):
            shapes = [tuple(t.shape) for t in (query, key, value)]
            raise ValueError(f"{query.dtype} {shapes}: not a query, keys and values that tiles can be made of")
        if tiles.num_rows != query.shape[2] or tiles.end > key.shape[2]:
            there = f"{query.shape[2]} rows of query and {key.shape[2]} keys"
            raise ValueError(f"{tiles.num_rows} positions up to {tiles.end - 1}, but {there}")
        self.query, self.key, self.value, self.tiles, self.scaling = query, key, value, tiles, scaling

    def run(self, threads: int, *, totals: torch.Tensor, **results: torch.Tensor) -> None:
        """Fill `results`, tensors named like addresses of `Work`."""
        query, key, value, tiles = self.query, self.key, self.value, self.tiles
        heads, mass, output = query.shape[1], results.get("mass"), results.get("output")
        parts = int(max(1, min(threads, tiles.pairs_of_row_and_key * heads // MIN_COST_A_THREAD)))
        value_channels = SUMS_AS_CHANNELS if mass is not None else value.shape[3]
        size = scratch_bytes(query.shape[3], value_channels, tiles.end)
        settings = self.settings
        work = Work(
            query=_heads(query),
            keys=_heads(key),
            values=_heads(value),
            output=Heads(0, 0, 0) if output is None else _heads(output.transpose(1, 2)),
            positions=tiles.positions.data_ptr(),
            bounds=tiles.bounds.data_ptr(),
            peaks=results["peaks"].data_ptr() if "peaks" in results else 0,
            totals=totals.data_ptr(),
            mass=0 if mass is None else mass.data_ptr(),
            mass_bytes=0 if mass is None else 4 * mass.stride(0),
            settings=settings.ctypes.data,
            scratch=memory(parts * size),
            scratch_bytes=size,
            rows=tiles.num_rows,
            group=heads // key.shape[1],
            kv_len=key.shape[2],
            begin=tiles.begin,
            end=tiles.end,
            window=tiles.window,
            channels=query.shape[3],
            value_channels=value_channels,
            items=heads * (1 if mass is not None else len(tiles.positions) // PAIR),
        )
        compiled.run(entry(), work.numbers(), parts)

    @cached_property
    def settings(self) -> np.ndarray[Any, Any]:
        """What compiled code reads by address: the tiles' configuration, and the scaling of logits to powers of two."""
        scale = np.full(LANES, self.scaling / math.log(2), np.float32)
        return np.concatenate([amx.configuration(), scale.view(np.uint8)])


def _heads(tensor: torch.Tensor) -> Heads:
    """`[1, H, T, D]`, bfloat16."""
    return Heads(tensor.data_ptr(), 2 * tensor.stride(1), 2 * tensor.stride(2))
