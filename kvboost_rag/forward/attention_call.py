"""What one layer's attention works on in a partial forward, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class AttentionCall:
    """What one layer's attention works on.

    Attributes:
        query: `[1, num_heads, num_rows, key_head_dim]`, rotated.
        key: `[1, num_kv_heads, kv_len, key_head_dim]`.
        value: `[1, num_kv_heads, kv_len, value_head_dim]`.
        mask: bool, `[1, 1, num_rows, kv_len]`; True = may attend.
        scaling: factor of the logits.
        softcap: logits are softcap · tanh(logits / softcap) where set (Gemma 2).
        sinks: one extra logit a head that takes mass and gives nothing (gpt-oss), `[num_heads]`.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor
    scaling: float
    softcap: float | None = None
    sinks: torch.Tensor | None = None

    @property
    def group(self) -> int:
        """Query heads a key head."""
        return self.query.shape[1] // self.key.shape[1]

    def logits(self, start: int = 0, end: int | None = None, key: torch.Tensor | None = None) -> torch.Tensor:
        """Masked logits of rows `[start, end)`, float32 `[num_kv_heads, group, num_rows, kv_len]`.

        `key` replaces the keys.
        """
        keys = (self.key if key is None else key)[0]
        query = self.query[0, :, start:end].unflatten(0, (keys.shape[0], -1))
        kv_heads, group, rows, dim = query.shape
        scores = query.reshape(kv_heads, group * rows, dim) @ keys.transpose(1, 2)
        scores = scores.float().mul_(self.scaling).view(kv_heads, group, rows, -1)
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        return scores.masked_fill_(~self.mask[0, :, start:end, : keys.shape[1]], float("-inf"))

    def weights(self, start: int = 0, end: int | None = None, key: torch.Tensor | None = None) -> torch.Tensor:
        """Attention weights of rows `[start, end)`, float32 `[num_kv_heads, group, num_rows, kv_len]`."""
        scores = self.logits(start, end, key)
        if self.sinks is None:
            return scores.softmax(-1)
        sinks = self.sinks.float().view(scores.shape[0], -1, 1, 1).expand(*scores.shape[:3], 1)
        return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]

    def mixed(self, start: int = 0, end: int | None = None, visible: int | None = None) -> torch.Tensor:
        """Attention output of rows `[start, end)`, `[1, num_heads, num_rows, value_head_dim]`.

        Works for soft caps and sinks too. Columns from `visible` on are known to be masked for these rows.
        """
        weights = self.weights(start, end, self.key[:, :, :visible]).to(self.value.dtype)
        kv_heads, group, rows, _ = weights.shape
        output = weights.view(kv_heads, group * rows, -1) @ self.value[0, :, :visible]
        return output.view(1, kv_heads * group, rows, -1)


@dataclass(frozen=True)
class AttentionResult:
    """What one layer's attention computed.

    Attributes:
        output: `[1, num_rows, num_heads, value_head_dim]`.
        log_sum_exp: of each row's visible logits, float32 `[num_kv_heads, group, num_rows]`; None where it could not be
            had.
        mass: given `start`, the attention that the rows from `start` on give each key: mean over heads, sum over rows,
            float32 `[kv_len]`. Computed when asked for.
    """

    output: torch.Tensor
    log_sum_exp: torch.Tensor | None
    mass: Callable[[int], torch.Tensor]


class AttentionObserver(Protocol):
    """Sees the attention of a partial forward."""

    def wants_attention(self, layer: int) -> bool:
        """Whether `on_attention` should be called for this layer."""

    def on_attention(self, layer: int, call: AttentionCall, result: AttentionResult) -> None:
        """Called when the layer's attention has been computed."""
