"""Taking things out of a store by chunk, source, namespace or age: KV in every tier, text, and what depends on it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from kvboost_rag.datamodels import ChunkRecord
from kvboost_rag.stores.base import Store
from kvboost_rag.stores.catalog.database import StoreFullError
from kvboost_rag.stores.catalog.erasures import digest_of

DELETED = "deleted"
DELETED_ELSEWHERE = "deleted elsewhere"
REPLACED = "replaced"


@dataclass(frozen=True)
class Removed:
    """What a call took out.

    Attributes:
        num_chunks: chunks forgotten: text and KV.
        num_reset: chunks encoded after a forgotten one; their KV is removed and they continue without it.
        num_entries: stored entries removed (chunks' KV and exact blocks).
    """

    num_chunks: int = 0
    num_reset: int = 0
    num_entries: int = 0


def forget(
    store: Store,
    content_hashes: Iterable[str],
    sources: Iterable[tuple[str, str]] = (),
    namespaces: Iterable[str] = (),
) -> Removed:
    """Forget chunks: their text, their KV, and everything that was computed from them.

    Chunks encoded after a forgotten one lose their KV and get an encoding context without it. Exact blocks of the
    same namespace are removed too, and KV of documents that were given with a call: any of them may hold the chunk's
    tokens, and what is missing is computed again.
    Nothing of the chunk is left in any tier of this process; other processes that share the folder serve from their
    memory tiers until they evict.

    The catalog forgets in one transaction, which also says what has to be deleted; if this is interrupted, opening the
    store again, `verify.gc` or any other deletion finishes it.

    Args:
        sources: `(namespace, source_id)` to be forgotten in the same transaction.
        namespaces: whose exact blocks go in any case, for texts that may have stood in prompts without being known.

    Raises:
        StoreError: a file cannot be removed, or the catalog cannot be written to.
    """
    wanted = list(dict.fromkeys(content_hashes))
    namespaces = list(namespaces)
    store.announce(wanted, touched=namespaces)
    return _forget(store, wanted, list(sources), namespaces)


def _forget(
    store: Store,
    wanted: Sequence[str],
    sources: Sequence[tuple[str, str]] = (),
    touched: Iterable[str] = (),
    reason: str = DELETED,
) -> Removed:
    catalog = store.catalog
    before = catalog.erasures.pending() if reason != DELETED else ()
    known = catalog.get_many(wanted)
    blocks = _unknown(store, {*touched, *(record.namespace for record in known.values())})
    entries = [*blocks, *(key for key in wanted if key in store)]

    def note() -> tuple[str, ...]:
        return catalog.forget(wanted, sources, entries)

    dependents = _with_room(store, [*wanted, *blocks], note)
    removed = Removed(len(known), len(dependents), finish_erasures(store, reason, before))
    with suppress(KeyError):  # deleted by another process meanwhile
        set_contexts(store, catalog.get_many(dependents).values())  # other machines are to give them the same ones
    return removed


def carry_out(store: Store, digests: Container[str], touched: Sequence[str], whole: Sequence[str]) -> Removed:
    """Delete here what another machine deleted; what is shared it has deleted itself.

    Args:
        digests: of the chunks' content hashes.
        touched: namespaces whose exact blocks may hold tokens of these chunks.
        whole: namespaces deleted as a whole.

    Raises:
        StoreError: as `forget`.
    """
    removed = _delete_namespaces(store, whole, DELETED_ELSEWHERE) if whole else Removed()
    catalog = store.catalog
    here = [key for key in (*catalog.hashes(), *catalog.elsewhere()) if digest_of(key) in digests]
    return _forget(store, here, (), touched, DELETED_ELSEWHERE) if here or touched else removed


def delete_source(store: Store, namespace: str, source_id: str) -> Removed:
    """Forget a source, for every model, and the chunks that no other source has.

    Raises:
        KeyError: no such source.
        StoreError: as `forget`.
    """
    if (namespace, source_id) not in store.catalog.sources.all(namespace):
        raise KeyError(source_id)
    return delete_sources(store, namespace, [source_id], lambda keys, sources: forget(store, keys, sources))


def delete_sources(
    store: Store,
    namespace: str,
    source_ids: Iterable[str],
    forget_chunks: Callable[[Sequence[str], Sequence[tuple[str, str]]], Removed],
) -> Removed:
    """Forget those of the sources that are known, for every model, and the chunks that no other source has.

    Args:
        forget_chunks: `forget` of chunks and sources, and whatever else has to happen with it.

    Raises:
        StoreError: as `forget`.
    """
    links = store.catalog.sources
    known = {source for _, source in links.all(namespace)}
    chunks = {name: links.chunks_of(namespace, name) for name in dict.fromkeys(source_ids) if name in known}
    if not chunks:
        return Removed()
    return forget_chunks(links.only_of(chunks), [(namespace, name) for name in chunks])


def delete_namespace(store: Store, namespace: str) -> Removed:
    """Remove everything of a namespace: KV in every tier, text, vectors, sources.

    Raises:
        StoreError: as `forget`.
    """
    store.announce((), [namespace])
    return _delete_namespaces(store, [namespace])


def evict_all(store: Store) -> Removed:
    """Remove all KV and forget all chunks and sources of all namespaces.

    Raises:
        StoreError: as `forget`.
    """
    catalog = store.catalog
    held = {info.namespace for info in store.entries()}
    namespaces = sorted({*catalog.namespaces(), *held})
    store.announce((), namespaces)
    return _delete_namespaces(store, namespaces)


def set_contexts(store: Store, records: Iterable[ChunkRecord]) -> None:
    """Give known chunks other encoding contexts, in one transaction; KV stored with the old ones is removed.

    Where machines share the store, a chunk that another one has given contexts gets those.

    Raises:
        KeyError, ValueError: as `Catalog.replace`.
        StoreError: as `forget`.
    """
    agreed, elsewhere = store.agree(list(records))
    known = store.catalog.get_many(record.content_hash for record in agreed)
    changed = [record for record in agreed if record != known.get(record.content_hash)]
    if not changed:
        return
    before = store.catalog.erasures.pending()
    stale = [record.content_hash for record in changed if store.is_here(record.content_hash)]
    store.catalog.replace(*changed, stale=stale, elsewhere=elsewhere)
    if stale:
        finish_erasures(store, REPLACED, before)


def finish_erasures(store: Store, reason: str = DELETED, but: Collection[str] = ()) -> int:
    """Delete what the catalog has forgotten, here or in a process that was stopped in the middle of it.

    Args:
        reason: all but `DELETED` leave alone what machines share.
        but: keys that are to go for another reason.

    Returns:
        How many entries were removed.

    Raises:
        StoreError: a file cannot be removed. It stays noted.
    """
    others = set(but)
    pending = [key for key in store.catalog.erasures.pending() if key not in others]
    if not pending:
        return 0
    num_entries = sum(store.delete(key, reason) for key in pending)
    # A log that another process keeps from being emptied is emptied with the next deletion.
    if store.wipe():
        store.catalog.erasures.finish(pending)
        store.wipe()  # of the keys
    return num_entries


def evict_unused(store: Store, seconds: float, now: float | None = None) -> Removed:
    """Remove the KV that was not used for `seconds`. The catalog remembers the chunks: they come back bit-identical.

    Raises:
        ValueError: a negative time.
        StoreError: as `forget`.
    """
    if seconds < 0:
        raise ValueError(f"seconds={seconds!r}: expected 0 or more")
    now = time.time() if now is None else now
    # A last use that lies ahead is from a clock that was wrong then: it counts as just now.
    old = [info.key for info in store.entries() if now - min(info.last_used, now) >= seconds]
    return Removed(num_entries=sum(store.delete(key, "unused") for key in old))


def _delete_namespaces(store: Store, namespaces: Sequence[str], reason: str = DELETED) -> Removed:
    gone = set(namespaces)
    before = store.catalog.erasures.pending() if reason != DELETED else ()
    entries = [info.key for info in store.entries() if info.namespace in gone]
    chunks = _with_room(store, entries, lambda: store.catalog.forget_namespaces(namespaces, entries))
    return Removed(len(chunks), 0, finish_erasures(store, reason, before))


def _with_room(store: Store, keys: Iterable[str], note: Callable[[], tuple[str, ...]]) -> tuple[str, ...]:
    """Note a deletion in the catalog; on a full disk, drop what is to go before, which makes room for the note."""
    try:
        return note()
    except StoreFullError:
        store.free_room(keys)
        return note()


def _unknown(store: Store, namespaces: Container[str]) -> list[str]:
    """Entries that are no known chunks: exact blocks, KV of given documents, and KV left over from a crash."""
    held = [info.key for info in store.entries() if info.namespace in namespaces]
    known = store.catalog.known(held)
    return [key for key in held if key not in known]
