"""Reuse of document KV caches for RAG on local Hugging Face models. Importing this package does not import torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from kvboost_rag.config import GenerationParams, ReuseConfig
    from kvboost_rag.datamodels import GenerationResult
    from kvboost_rag.engine import KVBoost

_EXPORTS = {
    "GenerationParams": "kvboost_rag.config",
    "GenerationResult": "kvboost_rag.datamodels",
    "KVBoost": "kvboost_rag.engine",
    "ReuseConfig": "kvboost_rag.config",
}

__all__ = ["GenerationParams", "GenerationResult", "KVBoost", "ReuseConfig", "__version__"]


if not TYPE_CHECKING:  # a type checker would take any name for there

    def __getattr__(name: str) -> Any:
        if name in _EXPORTS:
            return getattr(import_module(_EXPORTS[name]), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
