"""CacheBlendRecompute: rows whose stored KV is furthest from fresh KV at an early layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from kvboost_rag.config import ConfigError
from kvboost_rag.forward.row_forward import RowPlan
from kvboost_rag.repair.base import RepairContext, RepairPlan, RepairStrategy, choose, top_mask
from kvboost_rag.repair.deviation import DeviationProbe


@dataclass(frozen=True)
class CacheBlendRepair(RepairStrategy):
    """All rows go through the layers up to `probe_layer`, the chosen ones through the rest.

    CacheBlend (Yao et al., EuroSys 2025) with two differences: layers 0 … probe_layer run whole on all rows (the
    paper stops inside the probe layer), and the rows chosen there are kept for all later layers (the paper narrows a
    little at each). At chunk level (KVBoost) a chunk with deviation below `tau_reuse` is reused as it is, one above
    `tau_recompute` is recomputed whole, most deviating first, within `max_recompute_ratio`.

    Attributes:
        probe_layer: layer whose keys and values are compared; layer 0 depends on nothing before a token.
        score: ranks rows by relative L2 distance of keys and values, or by the KL divergence of their attention.
    """

    name: ClassVar[str] = "cacheblend"
    probe_layer: int = 1
    score: Literal["l2", "kl"] = "l2"

    def __post_init__(self) -> None:
        if self.probe_layer < 1:
            raise ConfigError(f"probe_layer={self.probe_layer}: expected 1 or more; layer 0 never deviates")
        if self.score not in ("l2", "kl"):
            raise ConfigError(f"score={self.score!r}: expected l2 or kl")

    def plan(self, context: RepairContext) -> RepairPlan:
        rows = context.with_fresh(context.document_rows)
        last = context.buffer.layout.num_layers - 1
        keep = _KeepDeviating(min(self.probe_layer, last), self.score, context)
        return RepairPlan(RowPlan(rows, keep), deviations=lambda: keep.per_chunk)


class _KeepDeviating(DeviationProbe):
    """Narrows to fresh rows and the chosen document rows after the probe layer."""

    def __init__(self, layer: int, score: str, context: RepairContext) -> None:
        super().__init__(layer, score)
        self.before_layer = layer + 1
        self.context = context
        self.rows = context.with_fresh(context.document_rows)
        self.per_chunk: tuple[float, ...] | None = None

    def keep(self, rows: torch.Tensor) -> torch.Tensor:
        if self.deviation is None:
            raise RuntimeError(f"layer {self.layer} was not seen")
        is_document = torch.isin(rows, self.context.document_rows)
        deviation = self.context.ranks.mean("deviation", self.deviation.cpu()[is_document])
        scores = deviation if self.kl is None else self.kl.cpu()[is_document]
        keep = torch.isin(rows, self.context.fresh_rows)
        keep[is_document] |= self._chosen(deviation, scores)
        return keep

    def _chosen(self, deviation: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        context, config = self.context, self.context.config
        self.per_chunk = context.means(deviation)
        sizes = torch.tensor([end - start for start, end in context.documents])
        level = torch.tensor(self.per_chunk).repeat_interleave(sizes)
        wanted = choose(scores.masked_fill(level < config.tau_reuse, float("-inf")), context, deviation)
        wanted &= level >= config.tau_reuse
        whole = level > config.tau_recompute
        if not bool(whole.any()):
            return wanted
        # Whole chunks come first, the most deviating ahead; what is left of the bound goes to single rows.
        span = scores.max() + 1
        order = torch.where(whole, span * (2 + level), torch.where(wanted, scores, float("-inf")))
        return (whole | wanted) & top_mask(order, context.max_rows)
