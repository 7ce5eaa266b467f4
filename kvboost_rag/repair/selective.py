"""SelectiveRecompute: the seams between chunks, where attention is spread out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvboost_rag.config import ConfigError
from kvboost_rag.forward.attention_call import AttentionCall, AttentionResult
from kvboost_rag.forward.row_forward import RowPlan
from kvboost_rag.models.hf_cache import LayerKV
from kvboost_rag.repair.base import RepairContext, RepairPlan, RepairStrategy


@dataclass(frozen=True)
class SelectiveRepair(RepairStrategy):
    """Re-encodes the first and last tokens of each document whose boundary has high attention entropy (KVBoost).

    Boundary rows run through layers 0 … probe_layer; a boundary goes on if the entropy of its rows' attention at
    that layer, divided by the log of the number of visible tokens (so 0…1) and averaged, exceeds `tau_entropy` (τ₁).

    Attributes:
        boundary_tokens: rows at each end of a document.
        tau_entropy: 0 recomputes every boundary.
        probe_layer: where entropy is measured.
    """

    name: ClassVar[str] = "selective"
    boundary_tokens: int = 8
    tau_entropy: float = 0.5
    probe_layer: int = 1

    def __post_init__(self) -> None:
        if self.boundary_tokens < 1:
            raise ConfigError(f"boundary_tokens={self.boundary_tokens}: expected 1 or more")
        if not 0 <= self.tau_entropy <= 1:
            raise ConfigError(f"tau_entropy={self.tau_entropy}: expected a number from 0 to 1")
        if self.probe_layer < 0:
            raise ConfigError(f"probe_layer={self.probe_layer}: expected 0 or more")

    def boundaries(self, context: RepairContext) -> list[torch.Tensor]:
        """Positions of each boundary; the two of a short document do not overlap."""
        result = []
        for start, end in context.documents:
            first = min(start + self.boundary_tokens, end)
            result += [torch.arange(start, first), torch.arange(max(first, end - self.boundary_tokens), end)]
        return [rows for rows in result if len(rows)]

    def plan(self, context: RepairContext) -> RepairPlan:
        boundaries = self.boundaries(context)
        if not boundaries or context.max_rows == 0:
            return RepairPlan(RowPlan(context.fresh_rows))
        rows = context.with_fresh(torch.cat(boundaries))
        layer = min(self.probe_layer, context.buffer.layout.num_layers - 2)
        return RepairPlan(RowPlan(rows, _KeepUncertain(layer, boundaries, self.tau_entropy, context)))


class _KeepUncertain:
    """Narrows to fresh rows and boundaries with high entropy after the probe layer."""

    def __init__(self, layer: int, boundaries: list[torch.Tensor], tau: float, context: RepairContext) -> None:
        self.layer = layer
        self.before_layer = layer + 1
        self.boundaries, self.tau, self.context = boundaries, tau, context
        self.entropy: torch.Tensor | None = None

    def on_kv(self, layer: int, fresh: LayerKV, stored: LayerKV) -> None:
        """Only attention is of interest."""

    def wants_attention(self, layer: int) -> bool:
        return layer == self.layer

    def on_attention(self, layer: int, call: AttentionCall, result: AttentionResult) -> None:
        self.entropy = normalised_entropy(call).cpu()

    def keep(self, rows: torch.Tensor) -> torch.Tensor:
        if self.entropy is None:
            raise RuntimeError(f"layer {self.layer} was not seen")
        per_boundary = torch.stack([self.entropy[torch.isin(rows, b)].mean() for b in self.boundaries])
        keep = torch.isin(rows, self.context.fresh_rows)
        left = self.context.max_rows
        for index in per_boundary.argsort(descending=True).tolist():
            boundary = self.boundaries[index]
            if per_boundary[index] <= self.tau or len(boundary) > left:
                break
            keep |= torch.isin(rows, boundary)
            left -= len(boundary)
        return keep


def normalised_entropy(call: AttentionCall, block_rows: int = 64) -> torch.Tensor:
    """Entropy of each row's attention over log(visible tokens), mean over heads: `[num_rows]`, 0…1."""
    result = []
    for start in range(0, call.query.shape[2], block_rows):
        end = min(start + block_rows, call.query.shape[2])
        weights = call.weights(start, end)
        entropy = -(weights * weights.clamp_min(1e-30).log()).sum(-1).mean((0, 1))
        visible = call.mask[0, 0, start:end].sum(-1).clamp_min(2).float()
        result.append(entropy / visible.log())
    return torch.cat(result)
