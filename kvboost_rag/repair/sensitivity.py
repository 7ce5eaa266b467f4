"""Rows that depended most on their context when the document was indexed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvboost_rag.forward.row_forward import RowPlan
from kvboost_rag.repair.base import RepairContext, RepairPlan, RepairStrategy, choose


@dataclass(frozen=True)
class SensitivityRepair(RepairStrategy):
    """The document tokens whose KV moved most between two encoding contexts (`encode.context_sensitivity`).

    Which rows these are is known before the question is, so that one forward is all there is: no probe as in
    CacheBlend (2025), no suffix pass as in `query`. Needs chunks warmed with `EncodingConfig(sensitivity=True)`; where
    that is missing, `plan` raises `ConfigError`.
    """

    name: ClassVar[str] = "sensitivity"

    def plan(self, context: RepairContext) -> RepairPlan:
        if context.num_document_tokens == 0 or context.config.max_recompute_ratio == 0:
            return RepairPlan(RowPlan(context.fresh_rows))
        chosen = choose(context.known_sensitivity, context)
        return RepairPlan(RowPlan(context.with_fresh(context.document_rows[chosen])))
