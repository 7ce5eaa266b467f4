"""Repair strategies: one a file, one line here."""

from kvboost_rag.repair.base import RepairContext, RepairStrategy
from kvboost_rag.repair.cacheblend import CacheBlendRepair
from kvboost_rag.repair.full import FullRepair
from kvboost_rag.repair.none import NoRepair
from kvboost_rag.repair.query import QueryRepair
from kvboost_rag.repair.selective import SelectiveRepair
from kvboost_rag.repair.sensitivity import SensitivityRepair

STRATEGIES: dict[str, type[RepairStrategy]] = {
    strategy.name: strategy
    for strategy in (NoRepair, SelectiveRepair, CacheBlendRepair, QueryRepair, SensitivityRepair, FullRepair)
}

__all__ = [
    "STRATEGIES",
    "CacheBlendRepair",
    "FullRepair",
    "NoRepair",
    "QueryRepair",
    "RepairContext",
    "RepairStrategy",
    "SelectiveRepair",
    "SensitivityRepair",
]
