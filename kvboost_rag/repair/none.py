"""Reuse document KV as it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvboost_rag.forward.row_forward import RowPlan
from kvboost_rag.repair.base import RepairContext, RepairPlan, RepairStrategy


@dataclass(frozen=True)
class NoRepair(RepairStrategy):
    """Forwards only text and suffix."""

    name: ClassVar[str] = "none"

    def plan(self, context: RepairContext) -> RepairPlan:
        return RepairPlan(RowPlan(context.fresh_rows))
