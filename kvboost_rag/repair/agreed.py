"""One choice of rows for all ranks: each sees its own heads, the first one's choice counts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from kvboost_rag.forward.row_forward import Narrowing
from kvboost_rag.models.ranks import Ranks
from kvboost_rag.repair.base import RepairPlan


def agreed(plan: RepairPlan, ranks: Ranks) -> RepairPlan:
    """The plan with the rows that the first rank chose, now and where it narrows them on the way."""
    if ranks.size == 1:
        return plan
    own = plan.row_plan
    rows = ranks.first("rows", lambda: own.rows)
    narrowing: Any = None if own.narrowing is None else _AgreedNarrowing(own.narrowing, ranks)
    return replace(plan, row_plan=replace(own, rows=rows, narrowing=narrowing))


class _AgreedNarrowing:
    """A narrowing whose choice is the first rank's."""

    def __init__(self, own: Narrowing, ranks: Ranks) -> None:
        self._own = own
        self._ranks = ranks

    def keep(self, rows: torch.Tensor) -> torch.Tensor:
        mine = self._own.keep(rows)  # on every rank: it may look at what it saw, and remember
        return self._ranks.first("kept rows", lambda: mine)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)
