"""`place_chunk` in plain torch: the slow, obvious twin, and the path on machines without a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvboost_kernels.place_chunk.layout import Chunk, Quantised, Rotation


def place_chunk_reference(
    chunks: Sequence[Chunk], keys: torch.Tensor, values: torch.Tensor, rotation: Rotation | None
) -> None:
    """See `place_chunk`; arguments are taken as checked."""
    for chunk in chunks:
        span = slice(chunk.start, chunk.start + chunk.num_tokens)
        unrotated = dequantise(chunk.keys)
        keys[:, :, span] = (unrotated if rotation is None else rotate(unrotated, rotation, span)).to(keys.dtype)
        values[:, :, span] = dequantise(chunk.values).to(values.dtype)


def dequantise(source: torch.Tensor | Quantised) -> torch.Tensor:
    """The values that the codes stand for, float32 `[num_layers, num_kv_heads, seq_len, head_dim]`.

    A tensor is returned as it is.
    """
    if isinstance(source, torch.Tensor):
        return source
    codes = source.codes
    if source.bits == 4:
        codes = torch.cat([codes & 15, codes >> 4], dim=-1)
    _, _, tokens, channels = source.shape
    token = torch.arange(tokens, device=codes.device) // source.token_group
    channel = torch.arange(channels, device=codes.device) // source.channel_group
    scale, offset = (t[:, :, token][..., channel].float() for t in (source.scale, source.offset))
    return codes.float() * scale + offset


def rotate(keys: torch.Tensor, rotation: Rotation, positions: slice) -> torch.Tensor:
    """Turn `keys` `[…, seq_len, head_dim]` by the angles of `positions`; float32, a new tensor."""
    turned = keys.float().clone()
    dim = rotation.rotary_dim
    part = turned[..., rotation.offset : rotation.offset + dim]
    if rotation.pairing == "half":
        first, second = part[..., : dim // 2], part[..., dim // 2 :]
    else:
        first, second = part[..., 0::2], part[..., 1::2]
    cos, sin = rotation.cos[positions], rotation.sin[positions]
    new_first, new_second = first * cos - second * sin, second * cos + first * sin
    first.copy_(new_first)
    second.copy_(new_second)
    return turned
