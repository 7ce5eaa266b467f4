"""Repair strategies: one a file, one line here."""

from collections.abc import Mapping
from typing import Any

from kvboost_rag.config import ConfigError
from kvboost_rag.repair.base import RepairContext, RepairPlan, RepairStrategy
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


def strategy_named(name: str, options: Mapping[str, Any] | None = None) -> RepairStrategy:
    """The strategy of that name with these parameters.

    Raises:
        ConfigError: there is none, or it has no such parameter; the message names what there is.
    """
    if name not in STRATEGIES:
        raise ConfigError(f"repair={name!r} is not available; known: {', '.join(STRATEGIES)}")
    try:
        return STRATEGIES[name](**(options or {}))
    except TypeError as error:
        raise ConfigError(f"repair={name!r}: {error}") from None


__all__ = [
    "STRATEGIES",
    "CacheBlendRepair",
    "FullRepair",
    "NoRepair",
    "QueryRepair",
    "RepairContext",
    "RepairPlan",
    "RepairStrategy",
    "SelectiveRepair",
    "SensitivityRepair",
    "strategy_named",
]
