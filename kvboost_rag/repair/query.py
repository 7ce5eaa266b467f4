"""Rows that the question attends to most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from kvboost_rag.config import ConfigError
from kvboost_rag.forward.attention_call import AttentionCall, AttentionResult
from kvboost_rag.forward.row_forward import RowPlan, observe_rows
from kvboost_rag.repair.base import RepairContext, RepairPlan, RepairStrategy, choose
from kvboost_rag.repair.deviation import DeviationProbe


@dataclass(frozen=True)
class QueryRepair(RepairStrategy):
    """A suffix pass over the assembled cache measures where the question looks; the top rows are recomputed.

    Score of a document token: attention it gets from the question's rows, mean over heads and the upper two thirds
    of the layers; optionally times √deviation at layer `probe_layer` (costs the first layers on all rows). FusionRAG
    (2025) guides by the query as well; the score and the weighting are ours.

    Attributes:
        weight: None or `deviation` (measured in the same pass) or `sensitivity` (known at index time).
        probe_layer: where deviation is measured.
    """

    name: ClassVar[str] = "query"
    weight: Literal["deviation", "sensitivity"] | None = None
    probe_layer: int = 1

    def __post_init__(self) -> None:
        if self.weight not in (None, "deviation", "sensitivity"):
            raise ConfigError(f"weight={self.weight!r}: expected None, deviation or sensitivity")
        if self.probe_layer < 1:
            raise ConfigError(f"probe_layer={self.probe_layer}: expected 1 or more; layer 0 never deviates")

    def plan(self, context: RepairContext) -> RepairPlan:
        if context.num_document_tokens == 0 or context.config.max_recompute_ratio == 0:
            return RepairPlan(RowPlan(context.fresh_rows))
        mass, deviation = self._measure(context)
        scores = mass.cpu()[context.document_rows]
        if deviation is not None:
            scores = scores * deviation.sqrt()
        elif self.weight == "sensitivity":
            scores = scores * context.known_sensitivity.sqrt()
        chosen = choose(scores, context, deviation)
        per_chunk = None if deviation is None else context.means(deviation)
        rows = context.with_fresh(context.document_rows[chosen])
        probe_rows = len(context.fresh_rows) + (0 if deviation is None else context.num_document_tokens)
        return RepairPlan(RowPlan(rows), probe_rows, lambda: per_chunk)

    def _measure(self, context: RepairContext) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention mass per position, `[prompt_len]`, and deviation per document token where asked for."""
        layers = context.buffer.layout.num_layers
        mass = AttentionMass(layers // 3, len(context.question_rows), len(context.token_ids))
        if self.weight != "deviation":
            observe_rows(context.model, context.buffer, context.token_ids, RowPlan(context.fresh_rows, observer=mass))
            return mass.total, None
        probe = _ProbeThenMass(min(self.probe_layer, layers - 2), context, mass)
        rows = context.with_fresh(context.document_rows)
        observe_rows(context.model, context.buffer, context.token_ids, RowPlan(rows, probe))
        if probe.deviation is None:
            raise RuntimeError(f"layer {probe.layer} was not seen")
        return mass.total, probe.deviation.cpu()[torch.isin(rows, context.document_rows)]


class AttentionMass:
    """Observer: attention of the last `num_question` rows on every position, summed over layers `≥ first_layer`."""

    def __init__(self, first_layer: int, num_question: int, prompt_length: int) -> None:
        self.first_layer = first_layer
        self.num_question = num_question
        self.total = torch.zeros(prompt_length)

    def on_kv(self, layer: int, fresh: object, stored: object) -> None:
        """Only attention is of interest."""

    def wants_attention(self, layer: int) -> bool:
        return layer >= self.first_layer

    def on_attention(self, layer: int, call: AttentionCall, result: AttentionResult) -> None:
        self.total += result.mass(call.query.shape[2] - self.num_question).cpu()


class _ProbeThenMass(DeviationProbe):
    """All rows up to the probe layer, then only the fresh rows, whose attention is summed."""

    def __init__(self, layer: int, context: RepairContext, mass: AttentionMass) -> None:
        super().__init__(layer)
        self.before_layer = layer + 1
        self.context = context
        self.mass = mass
        self.mass.first_layer = max(mass.first_layer, self.before_layer)

    def keep(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.isin(rows, self.context.fresh_rows)

    def wants_attention(self, layer: int) -> bool:
        return self.mass.wants_attention(layer)

    def on_attention(self, layer: int, call: AttentionCall, result: AttentionResult) -> None:
        self.mass.on_attention(layer, call, result)
