"""From what a user writes (`store="./kv"`) to a store."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from kvboost_rag.stores.base import Store
from kvboost_rag.stores.budget import DEFAULT_RATIO
from kvboost_rag.stores.device import DeviceStore
from kvboost_rag.stores.disk.store import DiskStore
from kvboost_rag.stores.memory import MemoryStore
from kvboost_rag.stores.remote.shared import SharedStore
from kvboost_rag.stores.remote.store import RemoteStore
from kvboost_rag.stores.tiered import TieredStore
from kvboost_rag.stores.tiers import PREFIX, SHARED_VARIABLE, Tiers

MEMORY = "memory"


def open_store(
    spec: Store | Tiers | str | Path | None,
    *,
    memory_bytes: int | None = None,
    disk_bytes: int | None = None,
    kv_cache_size_ratio: float = DEFAULT_RATIO,
    policy: str = "importance",
    device: str | None = None,
) -> Store:
    """The store that `spec` names.

    Args:
        spec: a `Store` (returned as it is), `"memory"` or None, a folder (memory over disk, made if missing), `Tiers`,
            or their text: `"tiers: memory 4GB, disk /var/kv 100GB, redis+cluster://host"`. A folder is put over the
            shared store that the environment's `KVBOOST_SHARED_STORE` names, if it does.
        memory_bytes, disk_bytes: budgets; None: `kv_cache_size_ratio` of each tier's total. Those in `spec` beat them.
        policy: eviction policy of every tier, by name (`stores.eviction.make_policy`).
        device: a CUDA device adds a tier there, with `kv_cache_size_ratio` of its free memory; others add nothing.

    Raises:
        StoreError: the folder cannot be used.
        ValueError: an unusable budget, ratio, policy or list of tiers.
        TypeError: `spec` is none of the above.
        ImportError: a shared store is named, and its client is not installed. One that cannot be reached is no error.
    """
    if isinstance(spec, Store):
        return spec
    wanted = _tiers(spec)
    shares = {"kv_cache_size_ratio": kv_cache_size_ratio, "policy": policy}
    memory = MemoryStore(_first(wanted.memory_bytes, memory_bytes), **shares)  # type: ignore[arg-type]
    tiers: list[Store] = [memory]
    if device is not None and str(device).startswith("cuda"):
        tiers.insert(0, DeviceStore(device, **shares))  # type: ignore[arg-type]
    if wanted.folder is not None:
        disk = DiskStore(wanted.folder, _first(wanted.disk_bytes, disk_bytes), **shares)  # type: ignore[arg-type]
        tiers.append(disk if wanted.shared is None else SharedStore(disk, open_remote(wanted.shared)))
    store = TieredStore(*tiers) if len(tiers) > 1 else memory
    store.refresh()
    return store


def open_remote(url: str) -> RemoteStore:
    """The store that machines share, by its URL.

    Raises:
        ImportError: the client for it is not installed.
    """
    if url.startswith("redis"):
        from kvboost_rag.stores.remote.redis import RedisBackend

        return RemoteStore(RedisBackend(url))
    from kvboost_rag.stores.remote.objects import ObjectBackend

    return RemoteStore(ObjectBackend(url))


def _tiers(spec: Tiers | str | Path | None) -> Tiers:
    if isinstance(spec, Tiers):
        return spec
    if isinstance(spec, str) and spec.startswith(PREFIX):
        return Tiers.parse(spec)
    spec = MEMORY if spec is None else spec
    if not isinstance(spec, (str, os.PathLike)) or not str(spec):
        raise TypeError(f'store={spec!r}: expected a Store, a folder, "memory", or tiers')
    return Tiers() if spec == MEMORY else over_shared(Tiers(Path(spec).expanduser()))


def over_shared(tiers: Tiers) -> Tiers:
    """A folder's tiers, over the shared store that the environment names."""
    url = os.environ.get(SHARED_VARIABLE)
    return replace(tiers, shared=url) if url else tiers


def _first(given: int | None, otherwise: int | None) -> int | None:
    return otherwise if given is None else given
