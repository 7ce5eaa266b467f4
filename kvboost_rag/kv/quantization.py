"""Codecs between chunk KV and the tensors that a store keeps.

Quantisation is asymmetric (a scale and a zero point, stored as the smallest value): keys, taken position-free, in 8
bits per channel over the chunk's tokens; values in 8 or 4 bits per token over groups of channels. That is KIVI's
division (Liu et al. 2024): a key channel has its own range, which rotation would smear over a pair of channels, and a
value's outliers belong to tokens. We differ in that the first and last tokens of a chunk stay in the model's dtype
(the first take much of the attention, so that an error in them is everybody's), in 8 bits for keys, and in that a
chunk whose error is too large is stored as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kvboost_rag.datamodels import ChunkKV

EDGE_TOKENS = 4
"""Tokens at each end of a chunk that are never quantised."""
GROUP_CHANNELS = 32
"""Channels of a value vector that share a scale."""
MIN_PSNR_DB = 35.0
MAX_PSNR_DB = 120.0

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Bits:
    """Bits a number, by kind of tensor."""

    keys: int
    values: int


SETTINGS: dict[str, Bits | None] = {"none": None, "k8v8": Bits(8, 8), "k8v4": Bits(8, 4)}
"""`none` keeps the model's dtype."""


def encode(kv: ChunkKV, setting: str = "none") -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tensors and meta strings for a `StoreEntry`.

    The meta strings are `codec`; where quantisation was asked for `psnr_db`, the smaller one of keys' and values'; and
    `refused` = the setting, where the chunk is stored unquantised because that was below `MIN_PSNR_DB` (or not a
    number). Chunks that consist of edges only are stored as they are.

    Raises:
        ValueError: unknown setting; the message lists the known ones.
    """
    check_setting(setting)
    bits = SETTINGS[setting]
    if bits is None or kv.seq_len <= 2 * EDGE_TOKENS:
        return _plain(kv), {"codec": "none"}
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor, per_channel in _named(kv):
        tensors |= _quantise(name, tensor, bits.keys if per_channel else bits.values, per_channel)
    meta = {"codec": setting, "dtype": str(kv.keys[0].dtype).removeprefix("torch.")}
    restored = decode(tensors, meta)
    both = psnr_db(kv.keys, restored.keys), psnr_db(kv.values, restored.values)
    psnr = float(torch.tensor(both).min())  # unlike the built-in `min`, NaN if either is
    if not psnr >= MIN_PSNR_DB:
        return _plain(kv), {"codec": "none", "psnr_db": f"{psnr:.2f}", "refused": setting}
    return tensors, {**meta, "psnr_db": f"{psnr:.2f}"}


def decode(tensors: Tensors, meta: Mapping[str, str]) -> ChunkKV:
    """Chunk KV from what `encode` returned, in the model's dtype; the tensors themselves where nothing was quantised.

    Raises:
        ValueError: the payload was written by a codec that this version does not know, or is incomplete.
    """
    bits = _bits_of(meta)
    if bits is None:
        return _from_plain(tensors)
    groups = range(sum(name.startswith("keys.") and name.endswith(".codes") for name in tensors))
    out = ChunkKV(
        keys=tuple(_empty(tensors, f"keys.{i}", meta) for i in groups),
        values=tuple(_empty(tensors, f"values.{i}", meta) for i in groups),
    )
    decode_into(tensors, meta, out)
    return out


def decode_into(tensors: Tensors, meta: Mapping[str, str], out: ChunkKV) -> None:
    """Write what `decode` would return into given tensors, which may be views of a larger buffer.

    Args:
        out: shapes as `decode` returns them; any dtype and device. Keys are written position-free.

    Raises:
        ValueError: as `decode`.
    """
    bits = _bits_of(meta)
    if bits is None:
        kv = _from_plain(tensors)
        for mine, theirs in zip((*out.keys, *out.values), (*kv.keys, *kv.values), strict=True):
            mine.copy_(theirs)
        return
    for name, view, per_channel in _named(out):
        _dequantise_into(tensors, name, bits.keys if per_channel else bits.values, view)


def psnr_db(original: tuple[torch.Tensor, ...], restored: tuple[torch.Tensor, ...]) -> float:
    """Peak signal-to-noise ratio over all layers: the mean over layers of 20·log₁₀(largest magnitude ÷ RMS error).

    The peak is each layer's own, so that one layer of large numbers cannot hide the error of the others. A layer
    counts for at most `MAX_PSNR_DB`; NaN where a number is not finite.
    """
    ratios = []
    for a, b in zip(original, restored, strict=True):
        a, b = a.to(torch.float32).flatten(1), b.to(torch.float32).flatten(1)
        peak, error = a.abs().amax(1), (a - b).square().mean(1).sqrt()
        decibels = torch.where(error == 0, MAX_PSNR_DB, 20 * torch.log10(peak / error))
        ratios.append(decibels.clamp(max=MAX_PSNR_DB))  # lets NaN through
    return float(torch.cat(ratios).mean())


def is_quantised(meta: Mapping[str, str]) -> bool:
    """Whether decoding takes arithmetic. Raises ValueError for a codec that this version does not know."""
    return _bits_of(meta) is not None


def check_setting(setting: str) -> None:
    """Raises ValueError, listing the known settings, if `setting` is not one of them."""
    if setting not in SETTINGS:
        raise ValueError(f"quantization={setting!r}: expected one of {', '.join(SETTINGS)}")


def _named(kv: ChunkKV) -> list[tuple[str, torch.Tensor, bool]]:
    """(name, tensor, whether it is quantised per channel)."""
    keys = [(f"keys.{i}", t, True) for i, t in enumerate(kv.keys)]
    return keys + [(f"values.{i}", t, False) for i, t in enumerate(kv.values)]


def _plain(kv: ChunkKV) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor, _ in _named(kv)}


def _from_plain(tensors: Tensors) -> ChunkKV:
    groups = range(sum(name.startswith("keys.") for name in tensors))
    return ChunkKV(
        keys=tuple(_part(tensors, f"keys.{i}") for i in groups),
        values=tuple(_part(tensors, f"values.{i}") for i in groups),
    )


def _part(tensors: Tensors, name: str) -> torch.Tensor:
    if name not in tensors:
        raise ValueError(f"the payload has no tensor {name!r}")
    return tensors[name]


def _bits_of(meta: Mapping[str, str]) -> Bits | None:
    codec = meta.get("codec")
    if codec not in SETTINGS:
        raise ValueError(f"unknown codec {codec!r}; this version reads {', '.join(SETTINGS)}")
    return SETTINGS[codec]


def _empty(tensors: Tensors, name: str, meta: Mapping[str, str]) -> torch.Tensor:
    edges, codes = _part(tensors, f"{name}.edges"), _part(tensors, f"{name}.codes")
    shape = (*codes.shape[:2], codes.shape[2] + edges.shape[2], edges.shape[3])
    return torch.empty(shape, dtype=getattr(torch, meta["dtype"]), device=codes.device)


def _quantise(name: str, tensor: torch.Tensor, bits: int, per_channel: bool) -> dict[str, torch.Tensor]:
    """Edges, codes, scales and zero points of one `[num_layers, num_kv_heads, seq_len, head_dim]` tensor.

    Per channel the scales are `[num_layers, num_kv_heads, 1, head_dim]` in float32, per token
    `[num_layers, num_kv_heads, seq_len - 2 · EDGE_TOKENS, num_groups]` in float16. Codes are computed with the scales
    as stored, so that their rounding adds no error of its own.
    """
    middle = tensor[:, :, EDGE_TOKENS:-EDGE_TOKENS].to(torch.float32)
    edges = torch.cat((tensor[:, :, :EDGE_TOKENS], tensor[:, :, -EDGE_TOKENS:]), dim=2)
    if per_channel:
        low, high = middle.aminmax(dim=2, keepdim=True)
        stored = torch.float32
    else:
        groups = _grouped(middle)
        low, high = groups.amin(-1), groups.amax(-1)
        stored = torch.float16
    levels = 2**bits - 1
    zero = low.to(stored)
    scale = ((high - zero.float()) / levels).to(stored)
    wide_zero, wide_scale = _widen(zero, scale, tensor.shape[3], per_channel)
    codes = ((middle - wide_zero) / wide_scale.clamp(min=torch.finfo(torch.float32).tiny)).round_().clamp_(0, levels)
    codes = codes.to(torch.uint8)
    return {
        f"{name}.edges": edges,
        f"{name}.codes": _pack(codes) if bits == 4 else codes,
        f"{name}.scale": scale,
        f"{name}.zero": zero,
    }


def _dequantise_into(tensors: Tensors, name: str, bits: int, out: torch.Tensor) -> None:
    parts = (_part(tensors, f"{name}.{part}") for part in ("edges", "codes", "scale", "zero"))
    # Small as they are, they go to the buffer's device first and are widened there.
    edges, codes, scale, zero = (part.to(out.device, non_blocking=True) for part in parts)
    head_dim = edges.shape[3]
    numbers = (_unpack(codes, head_dim) if bits == 4 else codes).to(torch.float32)
    wide_zero, wide_scale = _widen(zero, scale, head_dim, per_channel=name.startswith("keys"))
    out[:, :, EDGE_TOKENS:-EDGE_TOKENS].copy_(numbers.mul_(wide_scale).add_(wide_zero))
    out[:, :, :EDGE_TOKENS].copy_(edges[:, :, :EDGE_TOKENS])
    out[:, :, -EDGE_TOKENS:].copy_(edges[:, :, EDGE_TOKENS:])


def _grouped(middle: torch.Tensor) -> torch.Tensor:
    """`[…, head_dim]` as `[…, num_groups, GROUP_CHANNELS]`; a last group that is short repeats its last channel."""
    missing = -middle.shape[-1] % GROUP_CHANNELS
    if missing:
        middle = torch.cat((middle, middle[..., -1:].expand(*middle.shape[:-1], missing)), dim=-1)
    return middle.unflatten(-1, (-1, GROUP_CHANNELS))


def _widen(
    zero: torch.Tensor, scale: torch.Tensor, head_dim: int, per_channel: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Zero points and scales in float32, one a channel."""
    if per_channel:
        return zero.float(), scale.float()
    wide = (t.float().repeat_interleave(GROUP_CHANNELS, dim=-1)[..., :head_dim] for t in (zero, scale))
    return next(wide), next(wide)


def _pack(codes: torch.Tensor) -> torch.Tensor:
    """Two 4-bit codes a byte: the first half of the channels in the low bits, the second half in the high bits."""
    half = (codes.shape[-1] + 1) // 2
    packed = codes[..., :half].clone()
    packed[..., : codes.shape[-1] - half] |= codes[..., half:] << 4
    return packed


def _unpack(packed: torch.Tensor, head_dim: int) -> torch.Tensor:
    return torch.cat((packed & 15, packed >> 4), dim=-1)[..., :head_dim]
