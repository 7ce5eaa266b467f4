"""Settings of reuse that a user gave by name, checked before a model is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvboost_rag.config import ReuseConfig

if TYPE_CHECKING:
    from kvboost_rag.engine import KVBoost


def check_reuse(settings: Mapping[str, Any]) -> None:
    """Refuse what no request could use.

    Args:
        settings: fields of `ReuseConfig`; None: not given.

    Raises:
        ConfigError: a field, a value or a strategy that there is not.
    """
    config = ReuseConfig().override(**settings)
    if config.repair is not None:
        from kvboost_rag.repair import strategy_named

        strategy_named(config.repair)


def settles(engine: KVBoost, own: bool | None) -> bool:
    """Whether a chat's turns are settled: as the call or the class says, else the engine, else yes."""
    return engine.config.settle is not False if own is None else own
