"""Tile sizes, splits and launches of `row_attention`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton

from kvboost_kernels.dispatch import Launch
from kvboost_kernels.row_attention.request import Request
from kvboost_kernels.row_attention.triton import attend_kernel, mass_kernel, merge_kernel
from kvboost_kernels.tiles import dot_constants

MAX_SPLITS = 32
_TILES_PER_SPLIT = 4
"""A split over fewer key tiles spends more on merging than it gains in parallelism."""
IS_HIP = torch.version.hip is not None


@dataclass(frozen=True)
class Tiles:
    """Rows and keys of a tile, and compile options."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    hip: bool


@dataclass(frozen=True)
class Buffers:
    """What the kernels write: `lse` and `mean` `[num_heads, num_rows]` in units of log 2, `mass` for each key head."""

    out: torch.Tensor
    lse: torch.Tensor
    mean: torch.Tensor | None
    mass: torch.Tensor | None


def row_attention_triton(
    request: Request, num_splits: int | None = None
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Output, mass, entropy; see `row_attention`. `num_splits` overrides `choose_splits`."""
    launches, found = plan(request, num_splits)
    for launch in launches:
        launch.run()
    mass = entropy = None
    if found.mass is not None and request.mass_rows is not None:
        mass = found.mass.sum(0) / max(1, request.query.shape[1] * request.mass_rows.numel())
    if found.mean is not None:  # a row without keys has lse = -inf
        entropy = torch.where(found.lse == float("-inf"), 0.0, (found.lse - found.mean) * math.log(2.0))
    return found.out, mass, entropy


def plan(request: Request, num_splits: int | None = None, hip: bool = IS_HIP) -> tuple[list[Launch], Buffers]:
    """The launches, in order, and the buffers they fill."""
    key_dim, value_dim = request.key.shape[3], request.value.shape[3]
    tiles = choose_tiles(key_dim, value_dim, request.query.dtype, hip)
    row_tiles = triton.cdiv(request.query.shape[2] * request.group, tiles.block_m)
    if num_splits is None:
        num_splits = choose_splits(request, row_tiles, tiles.block_n)
    found = _allocate(request)
    launches = _plan_attention(request, found, tiles, row_tiles, num_splits)
    if found.mass is not None:
        launches.append(_plan_mass(request, found.lse, found.mass, tiles))
    return launches, found


def choose_tiles(key_dim: int, value_dim: int, dtype: torch.dtype, hip: bool) -> Tiles:
    """By the wider head dimension: within 99 KiB of shared memory (64 KiB on AMD), no spills (`docs/kernels.md`)."""
    width = triton.next_power_of_2(max(key_dim, value_dim, 16))
    stages = 1 if hip else 2
    if dtype == torch.float32:
        return Tiles(32, 64, 8, 1, hip) if width <= 128 else Tiles(32, 16, 4, 1, hip)
    if hip:
        return Tiles(64, 32, 4 if width <= 128 else 8, stages, hip)
    return Tiles(64, 64, 4, stages, hip) if width <= 128 else Tiles(64, 32, 8, stages, hip)


def choose_splits(request: Request, row_tiles: int, block_n: int) -> int:
    """Ranges of keys that run in parallel: enough programs for two a multiprocessor, none shorter than four tiles.

    Depends on shapes and the device only, so that equal calls give equal bits.
    """
    programs = max(1, row_tiles * request.key.shape[1])
    visible = request.key.shape[2]
    if request.sliding_window is not None:
        visible = min(visible, request.sliding_window + int(request.rows.shape[0]))
    wanted = triton.cdiv(2 * _num_multiprocessors(request.query.device), programs)
    return max(1, min(MAX_SPLITS, wanted, triton.cdiv(visible, block_n) // _TILES_PER_SPLIT))


@lru_cache(maxsize=16)
def _num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _allocate(request: Request) -> Buffers:
    query, key, value = request.query, request.key, request.value
    _, heads, num_rows, _ = query.shape
    out = query.new_empty(1, num_rows, heads, value.shape[3]).transpose(1, 2)
    lse = query.new_empty(heads, num_rows, dtype=torch.float32)
    mean = torch.empty_like(lse) if request.entropy else None
    mass = None if request.mass_rows is None else key.new_empty(key.shape[1], key.shape[2], dtype=torch.float32)
    return Buffers(out, lse, mean, mass)


def _plan_attention(request: Request, found: Buffers, tiles: Tiles, row_tiles: int, num_splits: int) -> list[Launch]:
    parts, lse, mean = found.out, found.lse, found.mean
    if num_splits > 1:
        parts = found.out.new_empty(num_splits, *found.out.shape[1:], dtype=torch.float32)
        lse = found.lse.new_empty(num_splits, *found.lse.shape)
        mean = None if mean is None else torch.empty_like(lse)
    args = {
        **shared_args(request, tiles),
        "value": request.value,
        **_strides("v", request.value, "hnd"),
        "sinks": request.sinks if num_splits == 1 else None,
        "out": parts,
        "lse": lse,
        "mean": mean,
        **dict(zip(("o_s", "o_h", "o_r"), parts.stride(), strict=False)),
        "num_splits": num_splits,
        "VALUE_DIM": request.value.shape[3],
        "BLOCK_V": _block(request.value.shape[3]),
    }
    grid = (row_tiles, request.key.shape[1], num_splits)
    attend = Launch(attend_kernel, grid, args, tiles.num_warps, tiles.num_stages)
    return [attend] if num_splits == 1 else [attend, _plan_merge(request, Buffers(parts, lse, mean, None), found)]


def _plan_merge(request: Request, parts: Buffers, found: Buffers) -> Launch:
    args = {
        "parts": parts.out,
        "part_lse": parts.lse,
        "part_mean": parts.mean,
        "sinks": request.sinks,
        "out": found.out,
        "lse": found.lse,
        "mean": found.mean,
        **dict(zip(("p_s", "p_h", "p_r"), parts.out.stride(), strict=False)),
        **dict(zip(("o_h", "o_r"), found.out.stride()[1:], strict=False)),
        "num_rows": request.query.shape[2],
        "num_splits": parts.out.shape[0],
        "VALUE_DIM": request.value.shape[3],
        "BLOCK_V": _block(request.value.shape[3]),
        "BLOCK_S": triton.next_power_of_2(parts.out.shape[0]),
    }
    return Launch(merge_kernel, (request.query.shape[2], request.query.shape[1]), args)


def _plan_mass(request: Request, lse: torch.Tensor, mass: torch.Tensor, tiles: Tiles) -> Launch:
    assert request.mass_rows is not None
    args = {
        **shared_args(request, tiles),
        "mass_rows": request.mass_rows.contiguous(),
        "num_mass_rows": request.mass_rows.numel(),
        "sinks": request.sinks,
        "lse": lse,
        "mass": mass,
    }
    grid = (triton.cdiv(request.key.shape[2], tiles.block_n), request.key.shape[1])
    return Launch(mass_kernel, grid, args, tiles.num_warps, tiles.num_stages)


def shared_args(request: Request, tiles: Tiles) -> dict[str, Any]:
    """Arguments that every kernel over rows and keys takes."""
    return {
        "query": request.query,
        "key": request.key,
        "rows": request.rows.contiguous(),
        **_strides("q", request.query, "hrd"),
        **_strides("k", request.key, "hnd"),
        "num_rows": request.query.shape[2],
        "kv_len": request.key.shape[2],
        "scaling": float(request.scaling),
        "softcap": None if request.softcap is None else float(request.softcap),
        "window": request.sliding_window,
        "GROUP": request.group,
        "KEY_DIM": request.key.shape[3],
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "BLOCK_K": _block(request.key.shape[3]),
        **dot_constants(request.query.dtype, _block(request.key.shape[3]), tiles.hip),
    }


def _strides(prefix: str, tensor: torch.Tensor, axes: str) -> dict[str, int]:
    """Strides of `[1, heads, length, dim]` without the first, as `prefix_axis`."""
    return {f"{prefix}_{axis}": step for axis, step in zip(axes, tensor.stride()[1:], strict=True)}


def _block(dim: int) -> int:
    return max(16, triton.next_power_of_2(dim))
