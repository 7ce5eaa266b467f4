"""Launches of `deviation` and `attention_kl`."""

from __future__ import annotations

from typing import Any

import torch
import triton

from kvboost_kernels.deviation.triton import deviation_kernel, kl_kernel
from kvboost_kernels.dispatch import Launch
from kvboost_kernels.row_attention.plan import IS_HIP, choose_tiles, shared_args
from kvboost_kernels.row_attention.request import Request

_TILE_ELEMENTS = 4096


def plan_deviation(
    fresh_keys: torch.Tensor,
    fresh_values: torch.Tensor,
    stored_keys: torch.Tensor,
    stored_values: torch.Tensor,
    rows: torch.Tensor | None,
) -> tuple[Launch, torch.Tensor, torch.Tensor]:
    """The launch and the two tensors it fills, float32 `[num_layers, num_tokens]`."""
    layers, heads, tokens, key_dim = fresh_keys.shape
    value_dim = fresh_values.shape[3]
    keys, values = (torch.empty(layers, tokens, dtype=torch.float32, device=fresh_keys.device) for _ in range(2))
    widest = triton.next_power_of_2(max(key_dim, value_dim))
    block_t = max(8, min(32, _TILE_ELEMENTS // widest))
    args: dict[str, Any] = {
        "fresh_keys": fresh_keys,
        "fresh_values": fresh_values,
        "stored_keys": stored_keys,
        "stored_values": stored_values,
        "rows": None if rows is None else rows.contiguous(),
        "keys": keys,
        "values": values,
        **_strides("fk", fresh_keys),
        **_strides("sk", stored_keys),
        **_strides("fv", fresh_values),
        **_strides("sv", stored_values),
        "num_heads": heads,
        "num_tokens": tokens,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "BLOCK_T": block_t,
        "BLOCK_K": triton.next_power_of_2(key_dim),
        "BLOCK_V": triton.next_power_of_2(value_dim),
    }
    return Launch(deviation_kernel, (triton.cdiv(tokens, block_t), layers, 2), args), keys, values


def plan_attention_kl(request: Request, hip: bool = IS_HIP) -> tuple[Launch, torch.Tensor]:
    """The launch and the tensor it fills. The request's `key` is the fresh one, its `value` the stored one."""
    heads, num_rows, dim = request.query.shape[1:]
    out = torch.empty(heads, num_rows, dtype=torch.float32, device=request.query.device)
    tiles = choose_tiles(dim, dim, request.query.dtype, hip)
    args = shared_args(request, tiles)
    stored = dict(zip(("s_h", "s_n", "s_d"), request.value.stride()[1:], strict=True))
    fresh = {f"f_{axis}": args.pop(f"k_{axis}") for axis in "hnd"}
    args |= {"fresh": args.pop("key"), "stored": request.value, **fresh, **stored}
    args |= {"out": out, "DIM": args.pop("KEY_DIM")}
    grid = (triton.cdiv(num_rows * request.group, tiles.block_m), request.key.shape[1])
    return Launch(kl_kernel, grid, args, tiles.num_warps, tiles.num_stages), out


def _strides(prefix: str, tensor: torch.Tensor) -> dict[str, int]:
    return {f"{prefix}_{axis}": step for axis, step in zip("lhtd", tensor.stride(), strict=True)}
