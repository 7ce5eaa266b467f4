"""Stores of chunk KV: memory, disk, tiers. Importing this package does not import torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvboost_rag.stores.base import EntryInfo, Store, StoreError, StoreStats
from kvboost_rag.stores.catalog.catalog import Catalog, CatalogVersion

if TYPE_CHECKING:
    from kvboost_rag.stores.device import DeviceStore
    from kvboost_rag.stores.disk.store import DiskStore
    from kvboost_rag.stores.memory import MemoryStore
    from kvboost_rag.stores.opening import open_store
    from kvboost_rag.stores.tiered import TieredStore

_LAZY = {
    "DeviceStore": "device",
    "DiskStore": "disk.store",
    "MemoryStore": "memory",
    "TieredStore": "tiered",
    "open_store": "opening",
}

__all__ = [
    "Catalog",
    "CatalogVersion",
    "DeviceStore",
    "DiskStore",
    "EntryInfo",
    "MemoryStore",
    "Store",
    "StoreError",
    "StoreStats",
    "TieredStore",
    "open_store",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
