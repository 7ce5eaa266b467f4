"""Engines shared by everything in a process that asks for the same model, loaded when first used."""

from __future__ import annotations

import pickle
import threading
import uuid
import weakref
from dataclasses import dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvboost_rag.engine import KVBoost

_ENGINES: dict[Any, KVBoost] = {}
_LOADING: dict[Any, threading.Lock] = {}
_LOCK = threading.Lock()
_PICKLED: weakref.WeakValueDictionary[str, EngineSpec] = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class EngineSpec:
    """What to load. Making one costs nothing and imports no torch; equal specs share one engine.

    Copies are the spec itself. Pickled and unpickled in one process it is itself again, whatever objects it holds;
    in another process objects cannot follow, and what was held as an object is looked for by its name.

    Attributes:
        model: as in `models.load.load_model`; model objects are compared by identity.
        store: a folder, None (memory) or a `Store` object (compared by identity).
        load: keyword arguments for loading (`dtype`, `device_map`, `tokenizer`, …).
        engine: keyword arguments for `KVBoost` (`anchor`, `block_tokens`, …).

    Raises:
        ValueError, TypeError: no model, or a store that is none; everything else is found out when it is loaded.
    """

    model: Any
    store: Any = None
    load: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    _ticket: str = field(default_factory=lambda: uuid.uuid4().hex, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.model is None or self.model == "":
            raise ValueError("no model: expected a hub id, a folder, a .gguf file, bundled:… or a transformers model")
        is_place = self.store is None or isinstance(self.store, str) or hasattr(self.store, "__fspath__")
        if not is_place and not hasattr(self.store, "catalog"):
            raise TypeError(f'store={self.store!r}: expected a Store, a folder, or "memory"')

    @property
    def key(self) -> Any:
        """Hashable identity."""
        parts = {
            "model": self.model,
            "store": self.store,
            **self.load,
            **{f"engine.{k}": v for k, v in self.engine.items()},
        }
        return tuple(sorted((name, _identity(value)) for name, value in parts.items()))

    @property
    def name(self) -> str:
        """The model's name, without loading it."""
        return str(_by_name(self.model))

    def get(self) -> KVBoost:
        """The shared engine; the first caller loads it, others wait for it."""
        key = self.key
        with _LOCK:
            if key in _ENGINES:
                return _ENGINES[key]
            loading = _LOADING.setdefault(key, threading.Lock())
        with loading:
            if key not in _ENGINES:
                from kvboost_rag.engine import KVBoost

                _ENGINES[key] = KVBoost.from_pretrained(self.model, store=self.store, **self.load, **self.engine)
            return _ENGINES[key]

    def peek(self) -> KVBoost | None:
        """The shared engine if it is loaded already."""
        return _ENGINES.get(self.key)

    def __copy__(self) -> EngineSpec:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> EngineSpec:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        _PICKLED[self._ticket] = self
        plain = (_by_name(self.model), _by_name(self.store), _plain(self.load), _plain(self.engine))
        return _unpickled, (self._ticket, *plain)


def _unpickled(ticket: str, model: str, store: str | None, load: dict[str, Any], engine: dict[str, Any]) -> EngineSpec:
    return _PICKLED.get(ticket) or EngineSpec(model, store, load, engine)


def adopt(engine: KVBoost) -> EngineSpec:
    """A spec that stands for an engine the caller made."""
    spec = EngineSpec(engine.model, engine.store)
    with _LOCK:
        _ENGINES[spec.key] = engine
    return spec


def close_all() -> None:
    """Close every shared engine and forget it (for tests and orderly shutdowns)."""
    with _LOCK:
        engines = list(_ENGINES.values())
        _ENGINES.clear()
        _LOADING.clear()
    for engine in engines:
        engine.close()


def _identity(value: Any) -> str:
    """Plain values by what they say, objects by who they are."""
    if value is None or isinstance(value, (str, int, float, bool)):
        return f"{type(value).__name__}:{value}"
    if hasattr(value, "__fspath__"):
        return f"path:{value.__fspath__()}"
    if isinstance(value, dict):
        return repr(sorted((str(k), _identity(v)) for k, v in value.items()))
    if type(value).__module__ == "torch":  # dtypes and devices are values
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):  # settings
        return f"{type(value).__qualname__}:{[_identity(getattr(value, f.name)) for f in fields(value)]}"
    return f"{type(value).__qualname__}@{id(value)}"


def _by_name(value: Any) -> Any:
    """What finds a model or a store again in another process; None for a store in memory."""
    if value is None or isinstance(value, str):
        return value
    if hasattr(value, "__fspath__"):
        return value.__fspath__()
    if hasattr(value, "config"):
        return str(getattr(value.config, "_name_or_path", "") or type(value).__name__)
    return None


def _plain(options: dict[str, Any]) -> dict[str, Any]:
    """Options that can be pickled."""
    kept = {}
    for name, value in options.items():
        try:
            pickle.dumps(value)
        except Exception:  # objects raise what they like
            continue
        kept[name] = value
    return kept
