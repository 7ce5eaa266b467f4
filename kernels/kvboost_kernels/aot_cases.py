"""Representative shapes for ahead-of-time compilation: the launches that real models cause, planned on tiny tensors."""

from __future__ import annotations

from typing import Any

import torch

from kvboost_kernels.dispatch import Launch
from kvboost_kernels.place_chunk import Chunk, Quantised, Rotation
from kvboost_kernels.place_chunk.plan import plan as plan_place
from kvboost_kernels.row_attention.plan import plan as plan_attention
from kvboost_kernels.row_attention.request import Request

_TOKENS = 64
_EVERYTHING: dict[str, Any] = {"sliding_window": 48, "softcap": 50.0, "entropy": True}
_WINDOW: dict[str, Any] = {"sliding_window": 48}


def cases(hip: bool) -> dict[str, list[Launch]]:
    """Launches by a name that says op, dtype, head dimension and variant, as planned for an AMD or an NVIDIA card."""
    return {**_place_cases(), **_attention_cases(hip)}


def _attention_cases(hip: bool) -> dict[str, list[Launch]]:
    found = {}
    variants: tuple[tuple[str, torch.dtype, tuple[int, int], int, dict[str, Any], int], ...] = (
        ("bf16, 64, GQA 3", torch.bfloat16, (64, 64), 3, {}, 1),
        ("bf16, 128, GQA 4, mass, entropy, split keys", torch.bfloat16, (128, 128), 4, {"entropy": True}, 8),
        ("fp16, 80", torch.float16, (80, 80), 1, {}, 1),
        ("bf16, 256, GQA 4, window, softcap, mass", torch.bfloat16, (256, 256), 4, _WINDOW | {"softcap": 50.0}, 1),
        ("bf16, keys 192, values 128, split keys", torch.bfloat16, (192, 128), 1, {}, 4),
        ("bf16, 64, GQA 8, every option", torch.bfloat16, (64, 64), 8, _EVERYTHING, 1),
        ("bf16, 128, GQA 4, every option, split keys", torch.bfloat16, (128, 128), 4, _EVERYTHING, 2),
        ("fp32, 64, GQA 3, mass, entropy", torch.float32, (64, 64), 3, {"entropy": True}, 1),
        ("fp32, 256, GQA 4, mass", torch.float32, (256, 256), 4, {}, 2),
    )
    for name, dtype, dims, group, options, splits in variants:
        request = _request(dtype, dims, group, mass="mass" in name or "every" in name, sinks="every" in name, **options)
        found[f"row_attention {name}"] = plan_attention(request, splits, hip)[0]
    return found


def _request(
    dtype: torch.dtype, dims: tuple[int, int], group: int, mass: bool = False, sinks: bool = False, **options: Any
) -> Request:
    rows = torch.arange(_TOKENS)
    return Request(
        torch.zeros(1, 2 * group, _TOKENS, dims[0], dtype=dtype),
        torch.zeros(1, 2, _TOKENS, dims[0], dtype=dtype),
        torch.zeros(1, 2, _TOKENS, dims[1], dtype=dtype),
        rows,
        0.125,
        mass_rows=rows if mass else None,
        sinks=torch.zeros(2 * group) if sinks else None,
        **options,
    )


def _place_cases() -> dict[str, list[Launch]]:
    found = {}
    for name, dtype, head_dim, rotary, pairing, store in (
        ("bf16, 128, half", torch.bfloat16, 128, 128, "half", "none"),
        ("bf16, 64, half", torch.bfloat16, 64, 64, "half", "none"),
        ("fp16, 256, partial 64 interleaved", torch.float16, 256, 64, "interleaved", "none"),
        ("fp32, 96, partial 24 half", torch.float32, 96, 24, "half", "none"),
        ("bf16, 128, no rotation", torch.bfloat16, 128, 0, "half", "none"),
        ("keys int8, values int4, bf16, 128, half", torch.bfloat16, 128, 128, "half", "int8/int4"),
        ("int8, bf16, 64, half", torch.bfloat16, 64, 64, "half", "int8/int8"),
        ("int4, bf16, 128, interleaved", torch.bfloat16, 128, 128, "interleaved", "int4/int4"),
    ):
        buffers = torch.zeros(2, 2, 2, 2 * _TOKENS, head_dim, dtype=dtype)
        tables = torch.zeros(2, 2 * _TOKENS, rotary // 2)
        rotation = Rotation(tables[0], tables[1], pairing) if rotary else None  # type: ignore[arg-type]
        chunk = Chunk(_stored(store, 0, dtype, head_dim), _stored(store, 1, dtype, head_dim), 0)
        found[f"place_chunk {name}"] = plan_place([chunk], buffers[0], buffers[1], rotation)
    return found


def _stored(store: str, side: int, dtype: torch.dtype, head_dim: int) -> torch.Tensor | Quantised:
    """Keys (side 0) per channel, values (side 1) per token in groups of 32 channels."""
    kind = store.split("/")[side] if "/" in store else "none"
    if kind == "none":
        return torch.zeros(2, 2, _TOKENS, head_dim, dtype=dtype)
    bits = 8 if kind == "int8" else 4
    token_group, channel_group = ((_TOKENS, 1), (1, 32))[side]
    dtypes = (torch.float32, torch.float16)  # wide for the few scales of channels, narrow for those of tokens
    scale = torch.ones(2, 2, -(-_TOKENS // token_group), head_dim // channel_group, dtype=dtypes[side])
    codes = torch.zeros(2, 2, _TOKENS, head_dim * bits // 8, dtype=torch.uint8)
    return Quantised(codes, scale, torch.zeros_like(scale), 8 if bits == 8 else 4, token_group, channel_group)
