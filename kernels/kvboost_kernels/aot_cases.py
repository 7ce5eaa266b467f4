"""Representative shapes for ahead-of-time compilation: the launches that real models cause, planned on tiny tensors."""

from __future__ import annotations

import torch

from kvboost_kernels.dispatch import Launch
from kvboost_kernels.place_chunk import Chunk, Quantised, Rotation
from kvboost_kernels.place_chunk.plan import plan as plan_place

_TOKENS = 64


def cases() -> dict[str, list[Launch]]:
    """Launches by a name that says op, dtype, head dimension and variant."""
    return _place_cases()


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
    scale = torch.ones(2, 2, -(-_TOKENS // token_group), head_dim // channel_group)
    codes = torch.zeros(2, 2, _TOKENS, head_dim * bits // 8, dtype=torch.uint8)
    return Quantised(codes, scale, torch.zeros_like(scale), 8 if bits == 8 else 4, token_group, channel_group)
