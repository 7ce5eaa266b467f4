"""Checking a store's folder against itself, and clearing up what does not belong there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from kvboost_rag.datamodels import GIVEN, ChunkRecord
from kvboost_rag.kv.keys import content_hash
from kvboost_rag.stores.base import Store
from kvboost_rag.stores.disk.chunk_file import USELESS, ChunkFileError
from kvboost_rag.stores.disk.store import DiskStore
from kvboost_rag.stores.maintenance import finish_erasures, forget, set_contexts
from kvboost_rag.stores.remote.store import RemoteStore

LATE_S = 300.0
"""How long after a deletion a machine may still write what it was encoding then."""
SHARED = "deleted, but shared"
SHARED_DAMAGED = "damaged where it is shared"

Progress = Callable[[int, int], None]
"""Called with the number of files done and of all files."""


@dataclass(frozen=True)
class Problem:
    """One thing that is not as it should be; `what` is short, for counting."""

    key: str
    what: str
    detail: str


@dataclass
class VerifyReport:
    """What `verify` read. The store is sound if there are no problems."""

    num_files: int = 0
    num_bytes: int = 0
    num_chunks_known: int = 0
    problems: list[Problem] = field(default_factory=list)

    def add(self, key: str, what: str, detail: str) -> None:
        """Note a problem."""
        self.problems.append(Problem(key, what, detail))


@dataclass(frozen=True)
class Collected:
    """What `gc` did: things removed by kind, files entered, rows of vanished files dropped."""

    removed: dict[str, int]
    entered: int
    rows_dropped: int


def disk_of(store: Store) -> DiskStore:
    """The disk tier of a store.

    Raises:
        ValueError: it has none.
    """
    if isinstance(store, DiskStore):
        return store
    for tier in getattr(store, "tiers", ()):
        with contextlib.suppress(ValueError):
            return disk_of(tier)
    raise ValueError("this store keeps nothing on disk; name its folder")


def shared_of(store: Store) -> RemoteStore | None:
    """The tier that machines share, if there is one."""
    if isinstance(store, RemoteStore):
        return store
    return next((found for tier in getattr(store, "tiers", ()) if (found := shared_of(tier)) is not None), None)


def verify(store: Store, progress: Progress | None = None) -> VerifyReport:
    """Read every chunk file whole, compare it with its seal, its name, the account of bytes and the catalog.

    Of a store that machines share, what lies there is listed, too: values that are not whole, and those of chunks that
    were deleted. Changes nothing. What others write or remove meanwhile may be reported although nothing is wrong.

    Raises:
        ValueError: the store keeps nothing on disk.
        StoreError: the shared store cannot be reached.
    """
    disk = disk_of(store)
    rows = {info.key: info for info in disk.entries()}
    keys = sorted({*disk.folder.list_keys(), *rows})
    report = VerifyReport()
    for done, key in enumerate(keys, 1):
        _verify_file(disk, key, rows[key].num_bytes if key in rows else None, report)
        if progress is not None:
            progress(done, len(keys))
    _verify_catalog(disk, report)
    remote = shared_of(store)
    if remote is not None:
        _verify_shared(disk, remote, report)
    return report


def gc(store: Store, progress: Progress | None = None) -> Collected:
    """Mend what `verify` finds, and clear up after processes that died.

    Damaged files, chunk KV that the catalog does not know or knows with another context, and records that are damaged
    or whose encoding context is lost are removed; chunks after one that is not known any more are given a context
    without it; deletions are finished, orphan vectors and damaged catalogs removed; files without a row are entered;
    rows without a file are dropped; the account is summed anew.

    Raises:
        ValueError: the store keeps nothing on disk.
        StoreError: a file cannot be removed.
    """
    disk = disk_of(store)
    store.flush()
    report = verify(store, progress)
    removed: dict[str, int] = {}
    entered = rows_dropped = 0
    for problem in report.problems:
        if problem.what == "not accounted for":
            entered += disk.account.enter(problem.key)
        elif problem.what == "vanished":
            rows_dropped += disk.delete(problem.key, "vanished")
        elif problem.what in (*USELESS, "wrong size"):
            removed["corrupt"] = removed.get("corrupt", 0) + store.delete(problem.key, "corrupt")
        elif problem.what == "foreign":
            rows_dropped += disk.account.disown(problem.key)
        elif problem.what in (SHARED, SHARED_DAMAGED):
            removed["shared"] = removed.get("shared", 0) + store.delete(problem.key)
        elif problem.what == "unknown chunk":
            removed["unknown"] = removed.get("unknown", 0) + store.delete(problem.key)
        elif problem.what == "other context":
            removed["outdated"] = removed.get("outdated", 0) + store.delete(problem.key)
        elif problem.what in ("damaged row", "context lost"):
            removed["unusable record"] = removed.get("unusable record", 0) + 1
            forget(store, [problem.key])
        elif problem.what == "after a removed chunk":
            removed["lost neighbour"] = removed.get("lost neighbour", 0) + 1
            _drop_lost_neighbours(store, problem.key)
    disk.account.clear_after_dead_owners()
    disk.account.table.recount()
    disk.catalog.purge()
    finish_erasures(store)
    store.wipe()
    return Collected(removed, entered, rows_dropped)


def _drop_lost_neighbours(store: Store, key: str) -> None:
    record = store.catalog.get(key)
    if record is not None:
        known = store.catalog.known(record.neighbours)
        left = tuple(neighbour for neighbour in record.neighbours if neighbour in known)
        set_contexts(store, [replace(record, neighbours=left, forward_tokens=0)])


def _verify_file(disk: DiskStore, key: str, accounted: int | None, report: VerifyReport) -> None:
    size = disk.folder.size(key)
    if size is None:
        report.add(key, "vanished", "in the catalog, but there is no file")
        return
    report.num_files += 1
    report.num_bytes += size
    try:
        entry = disk.read(key)
    except ChunkFileError as error:
        report.add(key, error.reason, str(error))
        return
    except OSError as error:
        report.add(key, "unreadable", str(error))
        return
    if accounted is None:
        report.add(key, "not accounted for", "there is a file, but no row in the catalog")
    elif accounted != size:
        report.add(key, "wrong size", f"{size} bytes, {accounted} in the catalog")
    if content_hash(entry.fingerprint, entry.namespace, entry.token_ids) != key:
        return
    record = disk.catalog.get(key)
    if record is None and GIVEN in entry.meta:
        return
    if record is None:
        report.add(key, "unknown chunk", "the catalog does not know this chunk")
    elif entry.context_hash != _context_of(disk, record):
        report.add(key, "other context", "encoded after other chunks than the catalog says")


def _context_of(disk: DiskStore, record: ChunkRecord) -> str | None:
    try:
        return disk.catalog.context_hash(record)
    except KeyError:
        return None


def _verify_catalog(disk: DiskStore, report: VerifyReport) -> None:
    hashes, elsewhere = disk.catalog.hashes(), disk.catalog.elsewhere()
    found = disk.catalog.get_many(hashes)
    report.num_chunks_known = len(found)
    for key in hashes:
        if key not in found:
            report.add(key, "damaged row", "the catalog's row does not have its digest")
        elif _context_of(disk, found[key]) is None:
            report.add(key, "context lost", "token ids of a neighbour are missing")
        elif any(n not in found and n not in elsewhere for n in found[key].neighbours):
            report.add(key, "after a removed chunk", "a chunk in its encoding context is not known any more")
    held, rows = disk.bytes_held["disk"], sum(info.num_bytes for info in disk.entries())
    if held != rows and not disk.account.table.reservations():
        report.add("", "account", f"{held} bytes accounted, {rows} in the rows of files")
    _verify_deletions(disk, report)


def _verify_shared(disk: DiskStore, remote: RemoteStore, report: VerifyReport) -> None:
    for key, fault in remote.faults():
        report.add(key, SHARED_DAMAGED, fault)
    for info in remote.entries():
        erased = disk.catalog.erasures.erased_at(info.key)
        # Much newer ones were written by a machine where the chunk has become known again.
        if erased is not None and info.created < erased + LATE_S:
            report.add(info.key, SHARED, "KV of a deleted chunk lies in the shared store")


def _verify_deletions(disk: DiskStore, report: VerifyReport) -> None:
    """What a deletion should have taken along."""
    for key in disk.catalog.erasures.pending():
        report.add(key, "unfinished deletion", "something of what was deleted may be left")
    for key in disk.catalog.orphan_arrays():
        report.add(key, "orphan vector", "a vector or signature of a chunk that is not known")
    for path in disk.folder.damaged_copies():
        report.add("", "damaged copy", f"{path.name} may hold deleted texts")
