"""What tells models and settings apart in LangChain's LLM cache and in traces."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from kvboost_rag.adapters.registry import EngineSpec

_FINGERPRINTS: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


class HeldName(str):
    """The name of a model that was given as an object or an engine, which remembers what it names.

    LangChain makes objects anew from their public fields (`configurable_fields`); whoever is made from this name has
    the same model again.
    """

    __slots__ = ("is_engine", "spec")
    spec: EngineSpec
    is_engine: bool

    def __new__(cls, name: str, spec: EngineSpec, is_engine: bool) -> HeldName:
        """`is_engine`: an engine was given, whose store and tokenizer count; else only the model is taken again."""
        made = super().__new__(cls, name)
        made.spec, made.is_engine = spec, is_engine
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as specs are; copies are made the same way, and a spec's copy is the spec itself."""
        return HeldName, (str(self), self.spec, self.is_engine)


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
        from kvboost_rag.models.fingerprint import weights_fingerprint

        _FINGERPRINTS[model] = weights_fingerprint(model)
    return _FINGERPRINTS[model]


def plain(value: Any) -> Any:
    """Settings as text and numbers; objects by what they say of themselves."""
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value if value is None or isinstance(value, (str, int, float, bool)) else str(value)
