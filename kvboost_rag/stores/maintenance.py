"""Taking things out of a store by chunk, source, namespace or age: KV in every tier, text, and what depends on it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from kvboost_rag.stores.base import Store


@dataclass(frozen=True)
class Removed:
    """What a call took out.

    Attributes:
        num_chunks: chunks forgotten: text and KV.
        num_reset: chunks encoded behind a forgotten one; their KV is removed and they continue without it.
        num_entries: stored entries removed (chunks' KV and exact blocks).
    """

    num_chunks: int = 0
    num_reset: int = 0
    num_entries: int = 0


def forget(store: Store, content_hashes: Iterable[str]) -> Removed:
    """Forget chunks: their text, their KV, and everything that was computed from them.

    Chunks encoded behind a forgotten one lose their KV and get an encoding context without it. Exact blocks of the
    same namespace are removed too: any of them may hold the chunk's tokens, and what is missing is computed again.
    Nothing of the chunk is left in any tier of this process; other processes that share the folder serve from their
    memory tiers until they evict.

    Raises:
        StoreError: a file cannot be removed, or the catalog cannot be written to. What is done stays done; call again.
    """
    catalog = store.catalog
    wanted = list(dict.fromkeys(content_hashes))
    known = catalog.get_many(wanted)
    gone = set(wanted)
    dependents: set[str] = set()
    num_entries = sum(store.delete(key) for key in wanted)
    for key in wanted:
        dependents.update(catalog.delete(key))
    dependents -= gone
    for record in catalog.get_many(dependents).values():
        left = tuple(n for n in record.neighbours if n not in gone)
        catalog.replace(replace(record, neighbours=left, forward_tokens=0))
        num_entries += store.delete(record.content_hash)
    for namespace in {record.namespace for record in known.values()}:
        num_entries += _delete_unknown(store, namespace)
    if known:
        catalog.database.wipe_log()
    return Removed(len(known), len(dependents), num_entries)


def delete_source(store: Store, namespace: str, source_id: str) -> Removed:
    """Forget a source, for every model, and the chunks that no other source has.

    Raises:
        KeyError: no such source.
        StoreError: as `forget`.
    """
    if (namespace, source_id) not in store.catalog.sources.all(namespace):
        raise KeyError(source_id)
    return delete_sources(store, namespace, [source_id], lambda keys: forget(store, keys))


def delete_sources(
    store: Store, namespace: str, source_ids: Iterable[str], forget_chunks: Callable[[Sequence[str]], Removed]
) -> Removed:
    """Forget those of the sources that are known, for every model, and the chunks that no other source has.

    Args:
        forget_chunks: `forget`, and whatever else has to happen with it.

    Raises:
        StoreError: as `forget`.
    """
    catalog = store.catalog
    sources = [name for name in dict.fromkeys(source_ids) if (namespace, name) in catalog.sources.all(namespace)]
    if not sources:
        return Removed()
    # The chunks first: if this stops in the middle, the sources are still there and can be deleted again.
    removed = forget_chunks(
        catalog.sources.only_of({name: catalog.sources.chunks_of(namespace, name) for name in sources})
    )
    for name in sources:
        catalog.sources.unlink(namespace, name)
    catalog.database.wipe_log()
    return removed


def delete_namespace(store: Store, namespace: str) -> Removed:
    """Remove everything of a namespace: KV in every tier, text, sources.

    Raises:
        StoreError: as `forget`.
    """
    num_entries = sum(store.delete(info.key) for info in list(store.entries()) if info.namespace == namespace)
    num_chunks = len(store.catalog.delete_namespace(namespace))
    return Removed(num_chunks, 0, num_entries)


def evict_unused(store: Store, seconds: float, now: float | None = None) -> Removed:
    """Remove the KV that was not used for `seconds`. The catalog remembers the chunks: they come back bit-identical.

    Raises:
        ValueError: a negative time.
        StoreError: as `forget`.
    """
    if seconds < 0:
        raise ValueError(f"seconds={seconds!r}: expected 0 or more")
    limit = (time.time() if now is None else now) - seconds
    old = [info.key for info in store.entries() if info.last_used <= limit]
    return Removed(num_entries=sum(store.delete(key) for key in old))


def evict_all(store: Store) -> Removed:
    """Remove all KV and forget all chunks and sources of all namespaces.

    Raises:
        StoreError: as `forget`.
    """
    num_entries = sum(store.delete(info.key) for info in list(store.entries()))
    namespaces = {*store.catalog.namespaces(), *(namespace for namespace, _ in store.catalog.sources.all())}
    num_chunks = sum(len(store.catalog.delete_namespace(namespace)) for namespace in namespaces)
    return Removed(num_chunks, 0, num_entries)


def _delete_unknown(store: Store, namespace: str) -> int:
    """Delete the namespace's entries that are no known chunks: exact blocks, and KV left over from a crash."""
    held = [info.key for info in store.entries() if info.namespace == namespace]
    known = store.catalog.known(held)
    return sum(store.delete(key) for key in held if key not in known)
