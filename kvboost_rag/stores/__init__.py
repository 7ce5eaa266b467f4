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
    from kvboost_rag.stores.remote.shared import SharedStore
    from kvboost_rag.stores.remote.store import RemoteStore
    from kvboost_rag.stores.tiered import TieredStore
    from kvboost_rag.stores.tiers import Tiers

_LAZY = {
    "DeviceStore": "device",
    "DiskStore": "disk.store",
    "MemoryStore": "memory",
    "RemoteStore": "remote.store",
    "SharedStore": "remote.shared",
    "TieredStore": "tiered",
    "Tiers": "tiers",
    "open_store": "opening",
}

__all__ = [
    "Catalog",
    "CatalogVersion",
    "DeviceStore",
    "DiskStore",
    "EntryInfo",
    "MemoryStore",
    "RemoteStore",
    "SharedStore",
    "Store",
    "StoreError",
    "StoreStats",
    "TieredStore",
    "Tiers",
    "open_store",
]


if not TYPE_CHECKING:  # a type checker would take any name for there

    def __getattr__(name: str) -> Any:
        if name in _LAZY:
            return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
