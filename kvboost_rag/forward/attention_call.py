"""What one layer's attention works on in a partial forward, and what can be read off it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

SAFE_EXPONENT = 80.0
"""exp(±80) is a normal number in float32 and bfloat16, with room for sums."""
MASS_BLOCK_ROWS = 64


@dataclass(frozen=True)
class AttentionCall:
    """What one layer's attention works on.

    Attributes:
        query: `[1, num_heads, num_rows, key_head_dim]`, rotated.
        key: `[1, num_kv_heads, kv_len, key_head_dim]`.
        mask: bool, `[1, 1, num_rows, kv_len]`; True = may attend.
        scaling: factor of the logits.
        softcap: logits are softcap · tanh(logits / softcap) where set (Gemma 2).
        sinks: one extra logit a head that takes mass and gives nothing (gpt-oss), `[num_heads]`.
        log_sum_exp: of each row's visible logits, float32 `[num_kv_heads, group, num_rows]`, where computing the
            attention yielded it.
        mass_from: `mass` by the kernel that computed the attention, where one did.
    """

    query: torch.Tensor
    key: torch.Tensor
    mask: torch.Tensor
    scaling: float
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    log_sum_exp: torch.Tensor | None = None
    mass_from: Callable[[int], torch.Tensor] | None = None

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

    def mixed(
        self, value: torch.Tensor, start: int = 0, end: int | None = None, visible: int | None = None
    ) -> torch.Tensor:
        """Attention output of rows `[start, end)`, `[1, num_heads, num_rows, value_head_dim]`.

        Works for soft caps and sinks too. Columns from `visible` on are known to be masked for these rows.
        """
        weights = self.weights(start, end, self.key[:, :, :visible]).to(value.dtype)
        kv_heads, group, rows, _ = weights.shape
        output = weights.view(kv_heads, group * rows, -1) @ value[0, :, :visible]
        return output.view(1, kv_heads * group, rows, -1)

    def mass(self, start: int) -> torch.Tensor:
        """Attention that the rows from `start` on give each key: mean over heads, sum over rows, float32 `[kv_len]`.

        Where the log-sum-exp is known, Σ exp(logit - lse) takes one product with the keys and one with exp(-lse); the
        logits are rounded to the model's dtype on the way.
        """
        if self.mass_from is not None:
            return self.mass_from(start)
        lse = None if self.log_sum_exp is None else self.log_sum_exp[:, :, start:]
        wide = self.query.dtype in (torch.float32, torch.bfloat16)
        if lse is not None and wide and lse.numel() and bool(lse.abs().amax() < SAFE_EXPONENT):
            return self._mass_by_log_sum_exp(start, lse)
        return self.mass_by_weights(start)

    def mass_by_weights(self, start: int) -> torch.Tensor:
        """`mass` by way of every single weight."""
        rows = self.query.shape[2]
        total = torch.zeros(self.key.shape[2], device=self.key.device)
        for first in range(start, rows, MASS_BLOCK_ROWS):
            total += self.weights(first, min(first + MASS_BLOCK_ROWS, rows)).mean((0, 1)).sum(0)
        return total

    def _mass_by_log_sum_exp(self, start: int, lse: torch.Tensor) -> torch.Tensor:
        kv_heads, group, rows = lse.shape
        query = (self.query[0, :, start:] * self.scaling).reshape(kv_heads, group * rows, -1)
        weights = (-lse).exp().to(query.dtype).view(kv_heads, 1, -1)
        mask = self.mask[0, 0, start:]
        hidden = torch.nonzero(~mask.all(0)).flatten()  # behind a row of a causal mask, in front of a sliding window
        total = torch.zeros(self.key.shape[2], device=self.key.device)
        for head in range(kv_heads):  # one at a time: the batched product would copy the keys first
            exponentials = torch.mm(query[head], self.key[0, head].T).exp_()
            if len(hidden):
                first, last = int(hidden[0]), int(hidden[-1]) + 1
                part = exponentials.view(group, rows, -1)[..., first:last]
                part.masked_fill_(~mask[:, first:last], 0)
            total += torch.mm(weights[head], exponentials)[0]
        return total / (kv_heads * group)


class AttentionObserver(Protocol):
    """Sees the attention of a partial forward."""

    def wants_attention(self, layer: int) -> bool:
        """Whether `on_attention` should be called for this layer."""

    def on_attention(self, layer: int, call: AttentionCall) -> None:
        """Called when the layer's attention has been computed."""
