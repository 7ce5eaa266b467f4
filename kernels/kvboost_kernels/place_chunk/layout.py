"""What `place_chunk` reads: chunks, their quantised form, and rotation tables; and the checks on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from kvboost_kernels.dispatch import FLOAT_DTYPES

Pairing = Literal["half", "interleaved"]


@dataclass(frozen=True)
class Quantised:
    """Asymmetric codes for a tensor `[num_layers, num_kv_heads, seq_len, head_dim]`: `x = code * scale + offset`.

    One `scale` and one `offset` (the value of code 0) serve `token_group` x `channel_group` elements, so that one
    class covers "per channel" (`token_group=seq_len, channel_group=1`), "per channel in groups of 32 tokens"
    (`32, 1`) and "per token in groups of 32 channels" (`1, 32`).

    Attributes:
        codes: uint8. 8 bits: `[num_layers, num_kv_heads, seq_len, head_dim]`. 4 bits: `[…, seq_len, head_dim // 2]`,
            channel `c` of the first half of the head in the low nibble of byte `c`, channel `c + head_dim // 2` in
            its high nibble, so that unpacking writes two contiguous halves.
        scale, offset: float32 or float16 (both alike),
            `[num_layers, num_kv_heads, num_token_groups, num_channel_groups]`; an axis' last group may be short.
        bits: 4 or 8.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor
    bits: Literal[4, 8]
    token_group: int
    channel_group: int

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of the tensor that the codes stand for."""
        layers, heads, tokens, width = self.codes.shape
        return layers, heads, tokens, width * 8 // self.bits

    def __post_init__(self) -> None:
        if self.bits not in (4, 8) or self.codes.dtype != torch.uint8 or self.codes.dim() != 4:
            raise ValueError(
                f"expected 4 or 8 bit codes as a 4-D uint8 tensor, got {self.bits} bits, {_describe(self.codes)}"
            )
        if self.token_group < 1 or self.channel_group < 1:
            raise ValueError(f"groups of {self.token_group} tokens x {self.channel_group} channels: expected 1 or more")
        layers, heads, tokens, width = self.shape
        wanted = (layers, heads, -(-tokens // self.token_group), -(-width // self.channel_group))
        for name, tensor in (("scale", self.scale), ("offset", self.offset)):
            if tensor.dtype not in (torch.float32, torch.float16) or tensor.dtype != self.scale.dtype:
                raise ValueError(f"{name}: expected float32 or float16, like scale, got {_describe(tensor)}")
            if tuple(tensor.shape) != wanted:
                raise ValueError(f"{name}: expected shape {wanted}, got {_describe(tensor)}")
        if self.scale.stride() != self.offset.stride():  # the kernel addresses both with one set of strides
            object.__setattr__(self, "scale", self.scale.contiguous())
            object.__setattr__(self, "offset", self.offset.contiguous())


@dataclass(frozen=True)
class Chunk:
    """Stored keys and values of consecutive tokens, and the column of the buffers where the first one goes.

    `keys` `[num_layers, num_kv_heads, seq_len, key_head_dim]` are position-free; `values`
    `[num_layers, num_kv_heads, seq_len, value_head_dim]`. Each is a float tensor of any strides, or `Quantised`.
    """

    keys: torch.Tensor | Quantised
    values: torch.Tensor | Quantised
    start: int

    @property
    def num_tokens(self) -> int:
        return int(self.keys.shape[2])

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor of the chunk by name."""
        found: dict[str, torch.Tensor] = {}
        for side, source in (("keys", self.keys), ("values", self.values)):
            if isinstance(source, Quantised):
                parts = {"codes": source.codes, "scale": source.scale, "offset": source.offset}
                found |= {f"{side} {name}": part for name, part in parts.items()}
            else:
                found[side] = source
        return found


@dataclass(frozen=True)
class Rotation:
    """Rotary tables, one row a position, and the channels they turn.

    Attributes:
        cos, sin: float32 `[num_positions, rotary_dim // 2]`, with any attention scaling (YaRN) already in them.
        pairing: `half` turns channel `i` with `i + rotary_dim // 2` (Llama), `interleaved` `2 i` with `2 i + 1`
            (GPT-J).
        offset: first rotated channel of a head: 0, or after channels without rotation (DeepSeek).
    """

    cos: torch.Tensor
    sin: torch.Tensor
    pairing: Pairing = "half"
    offset: int = 0

    @property
    def rotary_dim(self) -> int:
        return 2 * int(self.cos.shape[1])

    def __post_init__(self) -> None:
        if self.pairing not in ("half", "interleaved"):
            raise ValueError(f"pairing={self.pairing!r}: expected half or interleaved")
        for name, table in (("cos", self.cos), ("sin", self.sin)):
            if table.dtype != torch.float32 or table.dim() != 2 or table.shape != self.cos.shape:
                raise ValueError(f"{name}: expected float32 [num_positions, rotary_dim // 2], got {_describe(table)}")


def fits_loop(out: torch.Tensor, keys: torch.Tensor) -> bool:
    """Whether the loop for processors (`cpu.py`) can address these: see `rotate_into` there. Needs no numba."""
    heads, dim = keys.shape[1], keys.shape[3]
    strides = (heads * out.stride(1), out.stride(1), dim, 1)
    return (
        out.device.type == keys.device.type == "cpu"
        and out.dtype == keys.dtype
        and keys.dtype in (torch.bfloat16, torch.float32)
        and out.shape == keys.shape
        and keys.is_contiguous()
        and all(size < 2 or mine == wanted for size, mine, wanted in zip(out.shape, out.stride(), strides, strict=True))
    )


def check(chunks: Sequence[Chunk], keys: torch.Tensor, values: torch.Tensor, rotation: Rotation | None) -> None:
    """Raise `ValueError` unless every chunk fits the buffers, the tables and the other chunks."""
    for name, buffer in (("keys", keys), ("values", values)):
        if buffer.dim() != 4 or buffer.dtype not in FLOAT_DTYPES:
            raise ValueError(
                f"{name}: expected float [num_layers, num_kv_heads, capacity, dim], got {_describe(buffer)}"
            )
    if keys.shape[:3] != values.shape[:3]:
        raise ValueError(
            f"keys {tuple(keys.shape)} and values {tuple(values.shape)} differ in layers, heads or capacity"
        )
    if rotation is not None and not 0 <= rotation.offset <= keys.shape[3] - rotation.rotary_dim:
        end = rotation.offset + rotation.rotary_dim
        raise ValueError(f"the tables rotate channels [{rotation.offset}, {end}), but keys have {keys.shape[3]}")
    limit = keys.shape[2] if rotation is None else min(keys.shape[2], rotation.cos.shape[0])
    end_of_last = 0
    for chunk in sorted((c for c in chunks if c.num_tokens), key=lambda c: c.start):
        if chunk.start < 0 or chunk.start + chunk.num_tokens > limit:
            raise ValueError(
                f"chunk [{chunk.start}, {chunk.start + chunk.num_tokens}) does not fit {keys.shape[2]} columns"
                + ("" if rotation is None else f" with rotation tables for {rotation.cos.shape[0]} positions")
            )
        if chunk.start < end_of_last:
            raise ValueError(f"chunks overlap: one starts at {chunk.start}, another ends at {end_of_last}")
        end_of_last = chunk.start + chunk.num_tokens
    for chunk in chunks:
        _check_source("keys", chunk.keys, keys, chunk.num_tokens)
        _check_source("values", chunk.values, values, chunk.num_tokens)


def _check_source(name: str, source: torch.Tensor | Quantised, buffer: torch.Tensor, num_tokens: int) -> None:
    wanted = (buffer.shape[0], buffer.shape[1], num_tokens, buffer.shape[3])
    if tuple(source.shape) != wanted:
        raise ValueError(f"a chunk's {name} have shape {tuple(source.shape)}, the buffers ask for {wanted}")
    if isinstance(source, torch.Tensor) and source.dtype not in FLOAT_DTYPES:
        raise ValueError(f"a chunk's {name} have dtype {source.dtype}: expected a float dtype or Quantised")


def _describe(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
