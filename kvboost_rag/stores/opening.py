"""From what a user writes (`store="./kv"`) to a store."""

from __future__ import annotations

import os
from pathlib import Path

from kvboost_rag.stores.base import Store
from kvboost_rag.stores.budget import DEFAULT_RATIO
from kvboost_rag.stores.device import DeviceStore
from kvboost_rag.stores.disk.store import DiskStore
from kvboost_rag.stores.memory import MemoryStore
from kvboost_rag.stores.tiered import TieredStore

MEMORY = "memory"


def open_store(
    spec: Store | str | Path | None,
    *,
    memory_bytes: int | None = None,
    disk_bytes: int | None = None,
    kv_cache_size_ratio: float = DEFAULT_RATIO,
    policy: str = "importance",
    device: str | None = None,
) -> Store:
    """The store that `spec` names.

    Args:
        spec: a `Store` (returned as it is), `"memory"` or None, or a folder: memory over disk, made if missing.
        memory_bytes, disk_bytes: budgets; None: `kv_cache_size_ratio` of each tier's total.
        policy: eviction policy of every tier, by name (`stores.eviction.make_policy`).
        device: a CUDA device adds a tier there, with `kv_cache_size_ratio` of its free memory; others add nothing.

    Raises:
        StoreError: the folder cannot be used.
        ValueError: an unusable budget, ratio or policy.
        TypeError: `spec` is none of the above.
    """
    if isinstance(spec, Store):
        return spec
    spec = MEMORY if spec is None else spec
    if not isinstance(spec, (str, os.PathLike)) or not str(spec):
        raise TypeError(f'store={spec!r}: expected a Store, a folder, or "memory"')
    memory = MemoryStore(memory_bytes, kv_cache_size_ratio=kv_cache_size_ratio, policy=policy)
    tiers: list[Store] = [memory]
    if device is not None and str(device).startswith("cuda"):
        tiers.insert(0, DeviceStore(device, kv_cache_size_ratio=kv_cache_size_ratio, policy=policy))
    if spec != MEMORY:
        folder = Path(spec).expanduser()
        tiers.append(DiskStore(folder, disk_bytes, kv_cache_size_ratio=kv_cache_size_ratio, policy=policy))
    return TieredStore(*tiers) if len(tiers) > 1 else memory
