"""A machine's own store over one that many machines share."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

from kvboost_rag.datamodels import ChunkRecord, EntryCheck, StoreEntry
from kvboost_rag.stores.base import EntryInfo, Store, StoreError, StoreStats
from kvboost_rag.stores.catalog.erasures import digest_of
from kvboost_rag.stores.copies import Copies, Copy
from kvboost_rag.stores.maintenance import DELETED, carry_out
from kvboost_rag.stores.remote.agreements import Claim, Deletion
from kvboost_rag.stores.remote.backend import RemoteError
from kvboost_rag.stores.remote.store import RemoteStore

logger = logging.getLogger(__name__)

QUEUE_BYTES = 1 << 30
REFRESH_S = 5.0
"""Between two looks, while requests come, at what other machines deleted."""


class SharedStore(Store):
    """Reads from the local store, then from the shared one, and copies what it finds into the local one.

    `put` writes to the local store and leaves the shared one to a thread. What does not fit into the queue is not
    shared (`put_failures["queue_full"]`): another machine computes it. The catalog, eviction and pins are the local
    store's; deleting reaches both, and is noted as unfinished while the shared one cannot be reached. It reaches the
    other machines too: they look (`refresh`) when they open their store, before they make chunks known, and every
    `REFRESH_S` seconds while they are asked. Encoding contexts are the first machine's that chose them (`agree`).

    Args:
        local: a `DiskStore`, or a `MemoryStore` where a machine keeps nothing.
        queue_bytes: of entries waiting to be shared.
    """

    def __init__(self, local: Store, remote: RemoteStore, queue_bytes: int = QUEUE_BYTES) -> None:
        super().__init__(local.catalog)
        self.tiers = (local, remote)
        self._local, self._remote = local, remote
        self._queue_bytes = queue_bytes
        self._writer = ThreadPoolExecutor(1, "kvboost-share")
        self._changed = threading.Condition()
        self._pending: dict[str, StoreEntry] = {}
        self._writing: str | None = None
        self._copies = Copies(self._lock)
        self._whole: Store = self
        self._refreshing = threading.Lock()
        self._asked = -math.inf

    def lookup(self, key: str, check: EntryCheck) -> tuple[StoreEntry | None, str | None]:
        self._refresh_soon()
        with self._copies.copy(key) as copy:
            entry, reason = self._local.lookup(key, check)
            if entry is None:
                entry, why_not = self._remote.lookup(key, check)
                reason = why_not or reason
                with self._lock:
                    if entry is not None and not copy.is_stale:
                        self._local.put(entry)
        return self._count(entry, reason)

    def load(self, key: str) -> tuple[StoreEntry | None, str | None]:
        with ExitStack() as stack:
            copy = stack.enter_context(self._copies.copy(key))
            entry, reason = self._local.load(key)
            if entry is None:
                entry, why_not = self._remote.load(key)
                reason = why_not or reason
                if entry is not None and not self.is_inherited:
                    self._writer.submit(self._keep, entry, copy, stack.pop_all())
        return entry, None if entry is not None else reason

    def _keep(self, entry: StoreEntry, copy: Copy, until: ExitStack) -> None:
        """Copy what was read ahead into the local store, off the reader's path."""
        with until, self._lock:
            if not copy.is_stale:
                self._local.put(entry)

    def put(self, entry: StoreEntry) -> bool:
        with self._copies.change(entry.key):
            kept = self._local.put(entry)
        with self._changed:
            waiting = sum(e.num_bytes for e in self._pending.values())
            if self.is_inherited or waiting + entry.num_bytes > self._queue_bytes:
                self.stats.put_failures["queue_full"] += 1
                return kept
            self._pending[entry.key] = entry
        self.stats.puts += 1
        self._writer.submit(self._share, entry.key)
        return True

    def delete(self, key: str, reason: str = "deleted") -> bool:
        with self._copies.change(key):
            with self._changed:
                self._pending.pop(key, None)
                self._changed.wait_for(lambda: self._writing != key)
            found = self._local.delete(key, reason)
            # What only makes room here, or mends a file of ours, is no reason to take it from the others.
            return (reason == DELETED and self._remote.delete(key, reason)) or found

    def announce(self, keys: Sequence[str], namespaces: Sequence[str] = (), touched: Sequence[str] = ()) -> None:
        touched = sorted({*touched, *(record.namespace for record in self.catalog.get_many(keys).values())})
        deletion = Deletion(tuple(map(digest_of, keys)), tuple(touched), tuple(namespaces))
        agreements = self._remote.agreements
        try:
            # First the tombstone: who writes KV made after these chunks looks for it afterwards.
            self.catalog.erasures.note_seen(agreements.bury(deletion))
            for key in keys:
                for dependent in agreements.dependents(key):
                    self._remote.delete(dependent)
                agreements.unlink(key)
        except RemoteError as error:
            raise StoreError(f"the machines that share the remote store cannot be told of it: {error}") from error

    def refresh(self) -> None:
        if self.is_inherited:
            return
        erasures = self.catalog.erasures
        with self._refreshing:
            self._asked = time.monotonic()
            try:
                for name, deletion in self._remote.agreements.deletions(erasures.seen()):
                    if deletion is not None:
                        carry_out(self._whole, set(deletion.digests), deletion.touched, deletion.whole)
                    erasures.note_seen(name)
            except RemoteError as error:
                logger.debug("nobody can say what other machines deleted: %s", error)
            except StoreError as error:  # done again when it is next asked for
                logger.warning("what another machine deleted is not all deleted here yet: %s", error)

    def _refresh_soon(self) -> None:
        if time.monotonic() - self._asked > REFRESH_S and not self.is_inherited:
            self._asked = time.monotonic()
            self._writer.submit(self.refresh)

    def agree(self, records: Sequence[ChunkRecord]) -> tuple[list[ChunkRecord], dict[str, tuple[int, ...]]]:
        agreed: list[ChunkRecord] = []
        elsewhere: dict[str, tuple[int, ...]] = {}
        for record in records:
            try:
                claim = self._claimed(record)
            except (RemoteError, StoreError) as error:  # each machine with its own: nothing wrong, less shared
                logger.debug("contexts are not agreed on: %s", error)
                claim = None
            agreed.append(record if claim is None else claim.adopted_by(record))
            if claim is not None and agreed[-1] != record:
                elsewhere.update(zip(claim.neighbours, claim.behind, strict=True))
        return agreed, elsewhere

    def _claimed(self, record: ChunkRecord) -> Claim | None:
        """What all machines encode the chunk after; a machine that already does so may change its mind."""
        known = self.catalog.get(record.content_hash)
        if not record.neighbours:  # only a choice is claimed, but what was made after others goes
            if known is not None and known.neighbours:
                self._remote.delete(record.content_hash)
            return None
        behind = self.catalog.neighbour_tokens(record)
        claim = self._remote.agreements.claim(record, behind)
        if claim is None or claim.is_of(record) or known is None or not claim.is_of(known):
            return claim
        self._remote.delete(record.content_hash)
        return self._remote.agreements.claim(record, behind)

    def belong_to(self, whole: Store) -> None:
        self._whole = whole

    def __contains__(self, key: object) -> bool:
        return key in self._local or key in self._remote

    def entries(self) -> Iterator[EntryInfo]:
        """What is held here, then what is only shared. Raises StoreError if that cannot be listed."""
        seen: set[str] = set()
        for info in self._local.entries():
            seen.add(info.key)
            yield info
        yield from (info for info in self._remote.entries() if info.key not in seen)

    def is_here(self, key: str) -> bool:
        return self._local.is_here(key)

    def info(self, key: str) -> EntryInfo | None:
        return self._local.info(key) or self._remote.info(key)

    @property
    def bytes_held(self) -> Mapping[str, int]:
        return {**self._local.bytes_held, **self._remote.bytes_held}

    @property
    def tier_stats(self) -> Mapping[str, StoreStats]:
        return {**self._local.tier_stats, **self._remote.tier_stats}

    def tier_of(self, key: str) -> str | None:
        return self._local.tier_of(key) or self._remote.tier_of(key)

    def touch(self, key: str) -> None:
        self._local.touch(key)

    def note_deviation(self, key: str, deviation: float) -> None:
        self._local.note_deviation(key, deviation)

    def pin(self, key: str) -> None:
        self._local.pin(key)

    def unpin(self, key: str) -> None:
        self._local.unpin(key)

    def wipe(self) -> bool:
        return self._local.wipe()

    def flush(self) -> None:
        if self.is_inherited:
            return
        with self._changed:
            self._changed.wait_for(lambda: not self._pending and self._writing is None)
        with suppress(RuntimeError):  # closed already
            self._writer.submit(lambda: None).result()  # what was read ahead is kept, too
        self._local.flush()

    def close(self) -> None:
        if self.is_inherited:
            return
        self.flush()
        self._writer.shutdown()
        self._local.close()
        self._remote.close()

    def _share(self, key: str) -> None:
        """Write one entry to the shared store, in the writer's thread."""
        with self._changed:
            entry = self._pending.pop(key, None)
            if entry is None:
                return
            self._writing = key
        before = None
        try:
            before = self.catalog.get(key)
            if before is not None:
                self._remote.agreements.link(before)
            self._remote.put(entry)
        except RemoteError:
            self._remote.stats.put_failures["unreachable"] += 1
        except Exception:
            logger.exception("chunk %s is not shared", key[:16])
        finally:
            with self._changed:
                self._writing = None
                self._changed.notify_all()
        self._take_back(key, before)

    def _take_back(self, key: str, before: ChunkRecord | None) -> None:
        """If another machine deleted the chunk, or one before it, while it was being written, it is written in vain."""
        try:
            self.refresh()
            now = self.catalog.get(key) if before is not None else None
            if before is not None and (now is None or now.contexts != before.contexts):
                self._remote.delete(key)
        except StoreError as error:
            logger.warning("chunk %s was deleted while it was shared: %s", key[:16], error)

    def _count(self, entry: StoreEntry | None, reason: str | None) -> tuple[StoreEntry | None, str | None]:
        with self._lock:
            self.stats.lookups += 1
            self.stats.hits += entry is not None
            self.stats.misses += entry is None
            if entry is None and reason is not None:
                self.stats.rejected[reason] += 1
        return entry, None if entry is not None else reason
