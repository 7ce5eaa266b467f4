"""Recompute everything: the slow twin of all other strategies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvboost_rag.forward.row_forward import RowPlan
from kvboost_rag.repair.base import RepairContext, RepairPlan, RepairStrategy


@dataclass(frozen=True)
class FullRepair(RepairStrategy):
    """All document rows; gives full prefill's logits. Not bounded by `max_recompute_ratio`."""

    name: ClassVar[str] = "full"

    def plan(self, context: RepairContext) -> RepairPlan:
        return RepairPlan(RowPlan(context.with_fresh(context.document_rows)))
