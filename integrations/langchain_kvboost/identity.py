"""What tells models and settings apart in LangChain's LLM cache and in traces."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

_FINGERPRINTS: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


def name_of(model: Any) -> str:
    """What a model or tokenizer is called: a hub id or folder as given, an object by its own name."""
    if isinstance(model, str):
        return model
    if hasattr(model, "__fspath__"):
        return str(model.__fspath__())
    if hasattr(model, "config") and not hasattr(model, "name"):
        return str(getattr(model.config, "_name_or_path", "") or type(model).__name__)
    return str(getattr(model, "name", None) or getattr(model, "name_or_path", None) or type(model).__name__)


def is_held(model: Any) -> bool:
    """Whether it is a loaded model and not the name of one."""
    return not isinstance(model, str) and not hasattr(model, "__fspath__")


def fingerprint_of(model: Any) -> str:
    """Tells loaded models of one name apart; read from the weights once an object, without an engine."""
    if model not in _FINGERPRINTS:
        from kvboost_rag.chunk_keys import weights_fingerprint

        _FINGERPRINTS[model] = weights_fingerprint(model)
    return _FINGERPRINTS[model]


def plain(value: Any) -> Any:
    """Settings as text and numbers; objects by what they say of themselves."""
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value if value is None or isinstance(value, (str, int, float, bool)) else str(value)
