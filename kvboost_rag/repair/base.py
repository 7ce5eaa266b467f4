"""What a repair strategy is given, what it returns, and how rows are chosen from scores."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import torch
from transformers import PreTrainedModel

from kvboost_rag.config import ConfigError, ResolvedConfig
from kvboost_rag.forward.row_forward import RowPlan
from kvboost_rag.kv.buffer import KVBuffer
from kvboost_rag.models.ranks import Ranks


@dataclass(frozen=True)
class RepairContext:
    """One prompt, assembled, and what may be spent on it.

    Attributes:
        buffer: the assembled KV; document rows are realigned stored KV, fresh rows hold nothing yet.
        token_ids: the whole prompt, `[prompt_len]`.
        documents: `(start, end)` of each document segment, ascending.
        fresh_rows: positions that are computed whatever the strategy (text and suffix), `[num_fresh]`, ascending.
        question_rows: positions of the suffix, `[num_question]`, the last of `fresh_rows`.
        sensitivity: per document token, `[num_document_tokens]`, how much it depended on its context at index time;
            None where some document has no such estimate.
        ranks: who shares the model's heads: rows are chosen by the mean of what they see.
    """

    model: PreTrainedModel
    buffer: KVBuffer
    token_ids: torch.Tensor
    documents: tuple[tuple[int, int], ...]
    fresh_rows: torch.Tensor
    question_rows: torch.Tensor
    config: ResolvedConfig
    sensitivity: torch.Tensor | None = None
    ranks: Ranks = field(default_factory=Ranks)

    @cached_property
    def document_rows(self) -> torch.Tensor:
        """Positions of all document tokens, `[num_document_tokens]`, ascending."""
        spans = [torch.arange(start, end) for start, end in self.documents]
        return torch.cat(spans) if spans else torch.empty(0, dtype=torch.long)

    @property
    def num_document_tokens(self) -> int:
        return sum(end - start for start, end in self.documents)

    @property
    def least_ratio(self) -> float:
        """Share of the document tokens that is recomputed at least, since the documents are short."""
        return least_ratio(self.config, self.num_document_tokens)

    @property
    def max_rows(self) -> int:
        """Document rows that may be recomputed at most."""
        least = round(self.least_ratio * self.num_document_tokens)
        return max(least, int(self.config.max_recompute_ratio * self.num_document_tokens))

    @property
    def known_sensitivity(self) -> torch.Tensor:
        """`sensitivity`, float32 `[num_document_tokens]`.

        Raises:
            ConfigError: some document has none.
        """
        if self.sensitivity is None:
            if self.num_document_tokens == 0:
                return torch.empty(0)
            raise ConfigError(
                "this repair needs each document's context sensitivity, which is not stored for all of them: make the "
                "engine with EncodingConfig(sensitivity=True) and warm the documents, or choose another strategy"
            )
        return self.sensitivity.cpu().float()

    def with_fresh(self, rows: torch.Tensor) -> torch.Tensor:
        """`rows` and the fresh rows, ascending, each once."""
        return torch.unique(torch.cat([rows, self.fresh_rows]))

    def per_chunk(self, per_token: torch.Tensor) -> list[torch.Tensor]:
        """`[num_document_tokens]` split by document."""
        return list(per_token.split([end - start for start, end in self.documents]))

    def means(self, per_token: torch.Tensor) -> tuple[float, ...]:
        """`[num_document_tokens]` averaged over each document."""
        return tuple(float(part.mean()) for part in self.per_chunk(per_token))


def least_ratio(config: ResolvedConfig, num_document_tokens: int) -> float:
    """All of short documents, and less the longer they are (`ReuseConfig.full_below`)."""
    if num_document_tokens <= config.full_below:
        return 1.0
    return (config.full_below / num_document_tokens) ** 2


def not_measured() -> None:
    """Deviations of a strategy that measures none."""


@dataclass(frozen=True)
class RepairPlan:
    """What a strategy wants done.

    Attributes:
        row_plan: rows of the final pass.
        probe_rows: rows that were forwarded to choose them, in passes of their own.
        deviations: asked after the final pass; mean deviation of each document at the probe layer, or None.
    """

    row_plan: RowPlan
    probe_rows: int = 0
    deviations: Callable[[], tuple[float, ...] | None] = not_measured


class RepairStrategy(ABC):
    """Chooses the document rows to recompute. Stateless; parameters are dataclass fields of the strategy."""

    name: ClassVar[str]

    @abstractmethod
    def plan(self, context: RepairContext) -> RepairPlan:
        """Rows of the final pass: the chosen document rows and all fresh rows.

        May run passes of its own over `context.buffer`; it must leave document rows usable.
        """


def choose(scores: torch.Tensor, context: RepairContext, deviation: torch.Tensor | None = None) -> torch.Tensor:
    """Which document tokens to recompute: bool `[num_document_tokens]`.

    By `deviation_threshold` (all above it) where deviation is known, else by `top_k` per chunk, else the top
    `recompute_ratio`; highest scores first and never more than `max_recompute_ratio` of all document tokens.
    """
    config = context.config
    scores = context.ranks.mean("scores", scores)
    if config.deviation_threshold is not None and deviation is not None:
        wanted = deviation > config.deviation_threshold
    elif config.top_k is not None:
        wanted = torch.cat([top_mask(part, config.top_k) for part in context.per_chunk(scores)])
    else:
        ratio = max(config.recompute_ratio, context.least_ratio)
        wanted = top_mask(scores, round(ratio * len(scores)))
    return wanted & top_mask(scores.masked_fill(~wanted, float("-inf")), context.max_rows)


def top_mask(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Bool mask of the `count` highest scores (all, if there are fewer)."""
    mask = torch.zeros(len(scores), dtype=torch.bool, device=scores.device)
    mask[scores.topk(min(count, len(scores))).indices] = True
    return mask
