"""Settings of reuse that a user gave by name, checked before a model is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvboost_rag.config import ReuseConfig


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
