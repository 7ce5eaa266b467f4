"""Rotary position embedding: cos and sin from the model's own rotary module, and rotation in float32.

RoPE: Su et al., "RoFormer", 2021. Nothing is re-derived from the config: whatever a model does to its frequencies
(linear, llama3, YaRN, per-layer-type bases, attention scaling) is in what its module returns.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import nn

Pairing = Literal["half", "interleaved"]


@dataclass(frozen=True, eq=False)
class RotarySource:
    """A rotary module and the arguments the model calls it with besides input and positions.

    Attributes:
        input_name: the module's parameter that takes the hidden states (for their dtype and device).
        kwargs: the other arguments by name, for example a layer type.
        backwards: the layers turn keys the other way round (NanoChat): the sine has the other sign.
    """

    module: nn.Module
    input_name: str = "x"
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    backwards: bool = False

    @classmethod
    def from_call(cls, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> RotarySource:
        """From the arguments of a call that the model made.

        Raises:
            TypeError: the module takes no `position_ids`.
        """
        signature = inspect.signature(module.forward)
        names = list(signature.parameters)
        if "position_ids" not in names:
            raise TypeError(f"{type(module).__name__} takes no position_ids")
        given = dict(signature.bind(*args, **kwargs).arguments)
        extra = {k: v for k, v in given.items() if k not in (names[0], "position_ids", "kwargs")}
        return cls(module, names[0], extra | given.get("kwargs", {}))

    @cached_property
    def _sin_first(self) -> bool:
        """GPT-J and its kin return (sin, cos). At position 0 the sine is 0 and the cosine is not."""
        out = self._call(torch.zeros(1, dtype=torch.long))
        return isinstance(out, tuple) and not out[0].any() and bool(out[1].all())

    def _call(self, positions: torch.Tensor) -> Any:
        # Where the module lies: a model may be spread over devices.
        device = next((b.device for b in self.module.buffers()), positions.device)
        reference = torch.empty(1, dtype=torch.float32, device=device)
        return self.module(**{self.input_name: reference, "position_ids": positions[None].to(device)}, **self.kwargs)

    def tables(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of `positions` (`[num_positions]`), each `[num_positions, rotary_dim // 2]`, float32.

        One column per rotated pair, whatever layout the module uses, on the device of `positions`. Attention scaling is
        included.

        Raises:
            ValueError: the module returns something that is not cos and sin of one angle per pair.
        """
        out, sign = self._call(positions), -1 if self.backwards else 1
        if isinstance(out, torch.Tensor) and out.is_complex():
            angles = out.reshape(len(positions), -1).to(positions.device)
            return angles.real.float(), sign * angles.imag.float()
        if not (isinstance(out, tuple) and len(out) == 2 and all(isinstance(t, torch.Tensor) for t in out)):
            raise ValueError(f"{type(self.module).__name__} does not return cos and sin")
        cos, sin = (t.reshape(-1, t.shape[-1]).float() for t in (out[::-1] if self._sin_first else out))
        if cos.shape[0] != len(positions):
            raise ValueError(f"{type(self.module).__name__} returns {cos.shape[0]} rows for {len(positions)} positions")
        columns = _pair_columns(cos, sin)
        cos, sin = cos[:, columns].contiguous(), (sign * sin[:, columns]).contiguous()
        return cos.to(positions.device), sin.to(positions.device)


def _pair_columns(cos: torch.Tensor, sin: torch.Tensor) -> slice:
    """Which columns hold each pair's angle once: modules repeat them by halves, repeat each twice, or not at all."""
    half = cos.shape[-1] // 2
    if cos.shape[-1] % 2 == 0:
        if torch.equal(cos[:, :half], cos[:, half:]) and torch.equal(sin[:, :half], sin[:, half:]):
            return slice(0, half)
        if torch.equal(cos[:, 0::2], cos[:, 1::2]) and torch.equal(sin[:, 0::2], sin[:, 1::2]):
            return slice(0, None, 2)
    return slice(0, None)


@dataclass(frozen=True, eq=False)
class Rotation:
    """How one layer rotates its keys.

    Attributes:
        source: where cos and sin come from.
        pairing: `half` pairs dimension i with i + rotary_dim / 2, `interleaved` pairs 2i with 2i + 1.
        offset: first rotated dimension of a head (0, or after the unrotated part).
        rotary_dim: number of rotated dimensions; smaller than the head for partial rotary models.
    """

    source: RotarySource
    pairing: Pairing
    offset: int
    rotary_dim: int

    def same_as(self, other: Rotation) -> bool:
        return (self.source is other.source) and (self.pairing, self.offset, self.rotary_dim) == (
            other.pairing,
            other.offset,
            other.rotary_dim,
        )

    def _pairs(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the first and second member of every pair, `[..., rotary_dim // 2]` each."""
        rotated = x[..., self.offset : self.offset + self.rotary_dim]
        if self.pairing == "half":
            return rotated[..., : self.rotary_dim // 2], rotated[..., self.rotary_dim // 2 :]
        return rotated[..., 0::2], rotated[..., 1::2]

    def rotate_into(self, out: torch.Tensor, keys: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Write `keys` rotated by `tables` into `out`; float32 arithmetic, one rounding to `out`'s dtype.

        Args:
            out, keys: `[..., seq_len, key_head_dim]`, position-free keys in `keys`. Must not overlap.
            tables: cos and sin, `[seq_len, rotary_dim // 2]`, float32.
        """
        cos, sin = tables
        first, second = (part.float() for part in self._pairs(keys))
        out_first, out_second = self._pairs(out)
        out_first.copy_(torch.mul(first, cos).addcmul_(second, sin, value=-1))
        out_second.copy_(second.mul(cos).addcmul_(first, sin))
        self._copy_rest(out, keys)

    def undo(self, keys: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Position-free keys from keys rotated by `tables`; float32 arithmetic, rounded to the keys' dtype.

        Dividing by cos² + sin² also takes out the attention scaling of YaRN and its kind.
        """
        cos, sin = tables
        norm = cos.square().addcmul(sin, sin)
        first, second = (part.float() for part in self._pairs(keys))
        out = torch.empty_like(keys)
        out_first, out_second = self._pairs(out)
        out_first.copy_((first * cos + second * sin) / norm)
        out_second.copy_((second * cos - first * sin) / norm)
        self._copy_rest(out, keys)
        return out

    def _copy_rest(self, out: torch.Tensor, keys: torch.Tensor) -> None:
        end = self.offset + self.rotary_dim
        if self.offset:
            out[..., : self.offset].copy_(keys[..., : self.offset])
        if end < keys.shape[-1]:
            out[..., end:].copy_(keys[..., end:])
