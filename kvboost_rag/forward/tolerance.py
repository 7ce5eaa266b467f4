"""How far apart two runs of one model may be and still count as the same."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

LARGEST = 0.15
"""More is never rounding: what differs by more depends on something else."""
MARGIN = 4.0
"""Noise of one run over that of another."""


@dataclass(frozen=True)
class Tolerance:
    """Largest relative L2 distances, per layer for values and keys.

    Attributes:
        floor: what rounding in the model's dtype explains.
        values, keys, logits: the model's own noise, where it was measured: how much it makes of a difference at its
            input as small as rounding makes at the positions compared. Quantised activations make a lot of it: a
            number that falls into another step moves by a whole one.
    """

    floor: float
    values: tuple[float, ...] = ()
    keys: tuple[float, ...] = ()
    logits: float = 0.0

    @classmethod
    def of(cls, dtype: torch.dtype) -> Tolerance:
        """Without any noise but rounding."""
        return cls(1e-3 if dtype in (torch.float32, torch.float64) else LARGEST)

    def with_noise(self, values: tuple[float, ...], keys: tuple[float, ...], logits: float) -> Tolerance:
        """With what was measured."""
        return replace(self, values=values, keys=keys, logits=logits)

    def for_values(self, layer: int) -> float:
        """Largest distance between a layer's values."""
        return self._limit(self.values[layer] if self.values else 0.0)

    def for_keys(self, layer: int) -> float:
        """Largest distance between a layer's keys."""
        return self._limit(self.keys[layer] if self.keys else 0.0)

    @property
    def for_logits(self) -> float:
        """Largest distance between logits."""
        return self._limit(self.logits)

    def _limit(self, noise: float) -> float:
        return max(self.floor, min(LARGEST, MARGIN * noise))
