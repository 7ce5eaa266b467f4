"""What any choice of rows is held against: chance, and what a choice could know at best."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvboost_rag.forward.attention_call import AttentionCall, AttentionResult
from kvboost_rag.forward.row_forward import RowPlan, observe_rows
from kvboost_rag.models.hf_cache import LayerKV
from kvboost_rag.repair import RepairContext, RepairPlan, RepairStrategy
from kvboost_rag.repair.base import choose
from kvboost_rag.repair.deviation import relative_deviation


@dataclass(frozen=True)
class RandomRepair(RepairStrategy):
    """Rows by chance: what any choice has to beat."""

    name: ClassVar[str] = "random"
    seed: int = 0

    def plan(self, context: RepairContext) -> RepairPlan:
        generator = torch.Generator().manual_seed(self.seed)
        scores = torch.rand(context.num_document_tokens, generator=generator)
        return RepairPlan(RowPlan(context.with_fresh(context.document_rows[choose(scores, context)])))


@dataclass(frozen=True)
class OracleRepair(RepairStrategy):
    """Rows by their true deviation times the attention that the question truly pays them, summed over layers.

    What a choice could know at best: it computes the whole prompt to find out. Not the best set of rows, which depends
    on what the others among them mend.
    """

    name: ClassVar[str] = "oracle"

    def plan(self, context: RepairContext) -> RepairPlan:
        stored = context.buffer.read(0, len(context.token_ids))
        rows = context.with_fresh(context.document_rows)
        seen = _Truth(rows, len(context.question_rows))
        observe_rows(context.model, context.buffer, context.token_ids, RowPlan(rows, observer=seen))
        context.buffer.place(stored, 0)
        scores = seen.total.cpu()[context.document_rows]
        return RepairPlan(RowPlan(context.with_fresh(context.document_rows[choose(scores, context)])), len(rows))


class _Truth:
    """Observer: deviation times the attention of the last `num_question` rows, `[prompt_len]`, over all layers."""

    def __init__(self, rows: torch.Tensor, num_question: int) -> None:
        self.rows = rows
        self.num_question = num_question
        self.deviation = torch.zeros(0)
        self.total = torch.zeros(int(rows[-1]) + 1)

    def on_kv(self, layer: int, fresh: LayerKV, stored: LayerKV) -> None:
        self.deviation = relative_deviation(fresh, stored).cpu()

    def wants_attention(self, layer: int) -> bool:
        return True

    def on_attention(self, layer: int, call: AttentionCall, result: AttentionResult) -> None:
        mass = result.mass(call.query.shape[2] - self.num_question).cpu()
        self.total[self.rows] += mass[self.rows] * self.deviation
