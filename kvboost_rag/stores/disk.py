"""Entries as files in a folder that several processes may share."""

from __future__ import annotations

import errno
import logging
import sqlite3
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from kvboost_rag.chunk_keys import context_hash, encoding_context
from kvboost_rag.datamodels import ChunkRecord, StoreEntry
from kvboost_rag.stores import chunk_file, recovery
from kvboost_rag.stores.base import EntryInfo, Store, StoreError
from kvboost_rag.stores.budget import DEFAULT_RATIO, disk_bytes, resolve_budget
from kvboost_rag.stores.catalog import Catalog
from kvboost_rag.stores.chunk_file import ChunkFileError
from kvboost_rag.stores.eviction import EvictionPolicy, make_policy
from kvboost_rag.stores.file_table import FileTable, Reservation
from kvboost_rag.stores.folder import StoreFolder
from kvboost_rag.stores.payload import distinct, own

logger = logging.getLogger(__name__)


class DiskStore(Store):
    """One safetensors file per entry, written aside, synced and renamed, verified whenever it is read.

    A file appears under its name only when it is whole, so that a process killed at any moment costs at most what it
    was writing. The catalog (`catalog.sqlite`) lies in the folder and keeps the account of bytes for all processes
    that use it; if it is missing or damaged it is rebuilt from the files. Bytes are file sizes, files being written
    included; the catalog's own size is not counted. Pins hold against this process's evictions only: a reader of
    another process keeps what it has loaded, and a file that vanished is a miss.

    Args:
        folder: made if it does not exist.
        budget_bytes: absolute, or None for `kv_cache_size_ratio` (default 0.35) of the file system's size.
        policy: name or object, see `stores.eviction.make_policy`.
        secret: sign files with HMAC-SHA256 and serve only files signed with it; default: `KVBOOST_STORE_SECRET`.

    Raises:
        StoreError: the folder cannot be used (not writable, not a folder, of a newer version).
    """

    def __init__(
        self,
        folder: str | Path,
        budget_bytes: int | None = None,
        *,
        kv_cache_size_ratio: float = DEFAULT_RATIO,
        policy: str | EvictionPolicy = "importance",
        secret: bytes | None = None,
    ) -> None:
        self.folder = StoreFolder(Path(folder))
        self.budget_bytes = resolve_budget(budget_bytes, kv_cache_size_ratio, disk_bytes(self.folder.root))
        self._policy = make_policy(policy)
        self._secret = secret if secret is not None else chunk_file.secret_from_environment()
        self._used: set[str] = set()
        self._unsettled: list[Reservation] = []
        self._last_seq = 0
        try:
            with self.folder.opening():
                self._open()
        except (OSError, sqlite3.Error) as error:
            raise StoreError(f"cannot open the store in {folder}: {error}") from error

    def _open(self) -> None:
        """Open the catalog, or rebuild it from the files; clear up after processes that died; fit into the budget."""
        database = self.folder.open_database()
        super().__init__(Catalog(database))
        self.table = FileTable(database)
        if database.is_new:
            recovery.rebuild(self.folder, self.table, self.catalog)
        self.clear_after_dead_owners()
        with database.transaction():
            self._learn_of_new_files()
            self._make_room(0)

    def put(self, entry: StoreEntry) -> bool:
        self.folder.path(entry.key)  # refuses keys that are no hashes
        try:
            data = self._serialise(entry)
            reservation, reason = self._reserve(entry.key, len(data))
            if reservation is not None:
                self._write(entry, data, reservation)
        except (OSError, sqlite3.Error, StoreError) as error:
            reason = _io_reason(error)
            if reason == "disk_full":
                self._free_log()
            self._warn_once("", reason, "cannot write to %s: %s; entries are not kept on disk", self.folder.root, error)
        with self._lock:
            if reason is not None:
                self.stats.put_failures[reason] += 1
                return False
            self.stats.puts += 1
            return True

    def delete(self, key: str, reason: str = "deleted") -> bool:
        """Remove `key`.

        Raises:
            StoreError: the file cannot be removed.
        """
        try:
            with self._lock, self.table.database.transaction():
                return self._drop(key, reason)
        except (OSError, sqlite3.Error) as error:
            if self.folder.size(key) is not None:
                raise StoreError(f"cannot delete {key[:16]} from {self.folder.root}: {error}") from error
            # On a full disk the file can go although its row cannot; the row follows with the next write.
            self._unsettled.append(Reservation(0, self.folder.owner, key))
            return True

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self.folder.size(key) is not None

    def entries(self) -> Iterator[EntryInfo]:
        return self.table.infos()

    def entries_of(self, namespace: str) -> Iterator[EntryInfo]:
        """Entries of one tenant."""
        return self.table.infos(namespace)

    @property
    def bytes_held(self) -> Mapping[str, int]:
        return {"disk": self.table.total_bytes()}

    def touch(self, key: str) -> None:
        with self._lock:
            self._policy.hit(key)
            self._used.add(key)

    def note_deviation(self, key: str, deviation: float) -> None:
        with self._lock:
            self._policy.note_deviation(key, deviation)
            self._used.add(key)

    def flush(self) -> None:
        """Write use counts down. Entries are durable when `put` returns."""
        with self._lock:
            used = {key: self._policy.entries[key] for key in self._used if key in self._policy.entries}
            now = {key: replace(use, frequency=self._policy.frequency_now(use)) for key, use in used.items()}
            self._used.clear()
        try:
            self.table.save_uses(now)
        except sqlite3.Error as error:
            logger.warning("use counts of %s are not saved: %s", self.folder.root, error)

    def close(self) -> None:
        super().close()
        self.folder.close()

    def enter(self, key: str) -> bool:
        """Enter a file into the catalog and the account of bytes that is in neither; False if it is not usable."""
        with self._lock, self.table.database.transaction():
            try:
                recovery.enter(self.folder, self.table, self.catalog, key)
            except (OSError, ValueError):
                return False
            self._learn_of_new_files()
            self._make_room(0)
            return True

    def clear_after_dead_owners(self) -> None:
        """Settle what processes that died were writing."""
        num_dead, alive = self.folder.clear_after_dead_owners()
        for reservation in self.table.reservations():
            if reservation.owner not in alive:
                recovery.settle(self.folder, self.table, self.catalog, reservation)
        if num_dead:
            recovery.reconcile(self.folder, self.table, self.catalog)

    def _load(self, key: str) -> tuple[StoreEntry | None, str | None]:
        try:
            if self._is_expired(key):
                self._try_drop(key, "expired")
                return None, None
            return self.read(key), None
        except ValueError as error:
            if not isinstance(error, ChunkFileError):  # a key that is no hash has no file
                return None, None
        except OSError:
            pass
        return self._load_again(key)

    def _load_again(self, key: str) -> tuple[StoreEntry | None, str | None]:
        """Read again while no other thread can replace or delete the file, and remove it if it is bad."""
        with self._lock:
            try:
                return self.read(key), None
            except FileNotFoundError:
                if key not in self._policy.entries:
                    return None, None
                self._try_drop(key, "vanished")
                return None, "vanished"
            except ChunkFileError as error:
                if error.reason in chunk_file.USELESS:
                    self._try_drop(key, "outdated" if error.reason == "outdated" else "corrupt")
                return None, error.reason
            except OSError:
                return None, "io_error"

    def read(self, key: str) -> StoreEntry:
        """The entry in a file, verified; counts nothing and changes nothing.

        Raises:
            OSError: the file cannot be read.
            ChunkFileError: it is not a whole chunk file of this key (a ValueError, as for keys that are no hashes).
        """
        entry, _ = chunk_file.load(self.folder.read(key), self._secret)
        if entry.key != key:
            raise ChunkFileError("swapped", f"holds {entry.key[:16]}")
        return entry

    def _on_hit(self, entry: StoreEntry) -> None:
        self._policy.hit(entry.key)
        self._used.add(entry.key)

    def _is_expired(self, key: str) -> bool:
        with self._lock:
            return self._policy.is_expired(key)

    def _serialise(self, entry: StoreEntry) -> bytes:
        """The file's bytes, with the chunk's catalog record if that is what the entry was encoded from."""
        entry = own(entry)
        entry = replace(entry, tensors=distinct(entry.tensors))
        record, tokens = self._record_of(entry)
        return chunk_file.dump(entry, time.time(), record, tokens, self._secret)

    def _record_of(self, entry: StoreEntry) -> tuple[ChunkRecord | None, tuple[tuple[int, ...], ...]]:
        """The chunk's record and its neighbours' token ids, unless it was given another context since."""
        record = self.catalog.get(entry.key)
        if record is None:
            return None, ()
        try:
            tokens = self.catalog.neighbour_tokens(record)
        except KeyError:
            return None, ()
        context = encoding_context(record, tokens)
        return (record, tokens) if context_hash(context) == entry.context_hash else (None, ())

    def _reserve(self, key: str, num_bytes: int) -> tuple[Reservation | None, str | None]:
        """Make room for a file of `num_bytes` and set that aside, or say why not."""
        if num_bytes > self.budget_bytes:
            return None, "too_large"
        with self._lock, self.table.database.transaction():
            self._settle_failed_writes()
            self._learn_of_new_files()
            for expired in self._policy.expired():
                self._drop(expired, "expired")
            if self.table.total_bytes() + num_bytes > self.budget_bytes and self.table.bytes_of(key) is not None:
                self._drop(key, None)
            if not self._make_room(num_bytes):
                return None, "pinned"
            return self.table.reserve(self.folder.owner, key, num_bytes), None

    def _make_room(self, num_bytes: int) -> bool:
        """Evict until `num_bytes` more fit in the budget; whether they do. Inside a transaction."""
        while self.table.total_bytes() + num_bytes > self.budget_bytes:
            victim = self._policy.victim(self._pins)
            if victim is None:
                return False
            self._drop(victim, self._policy.reason)
        return True

    def _write(self, entry: StoreEntry, data: bytes, reservation: Reservation) -> None:
        """Write and publish a file under its reservation. Raises OSError or sqlite3.Error, the account still exact."""
        staged = None
        try:
            staged = self.folder.stage(data)
            with self._lock, self.table.database.transaction():
                self._learn_of_new_files()
                self.folder.publish(staged, entry.key)
                self._last_seq = self.table.add(_info_of(entry, len(data)))
                self.table.release(reservation)
                self._policy.add(entry.key, len(data))
            self.folder.sync(entry.key)
        except BaseException:
            if staged is not None:
                staged.unlink(missing_ok=True)
            with self._lock:
                self._unsettled.append(reservation)
            raise

    def _drop(self, key: str, reason: str | None) -> bool:
        """Delete a file and its row, inside a transaction. The file first: a row too many does no harm."""
        had_file = self.folder.remove(key)
        had_row = self.table.remove(key)
        self._policy.remove(key)
        if reason is not None and (had_file or had_row):
            self.stats.evictions[reason] += 1
        return had_file or had_row

    def _free_log(self) -> None:
        """Give the space of the write-ahead log back where the disk is full, so that rows can be written again."""
        try:
            self.table.database.wipe_log()
        except sqlite3.Error as error:
            logger.debug("the log of %s cannot be emptied: %s", self.folder.root, error)

    def _try_drop(self, key: str, reason: str) -> None:
        try:
            with self._lock, self.table.database.transaction():
                self._drop(key, reason)
        except (OSError, sqlite3.Error, StoreError) as error:
            self._warn_once(key, "undeletable", "%s cannot be removed: %s", key[:16], error)

    def _learn_of_new_files(self) -> None:
        """Tell the policy of files that were stored since the last call, by any process."""
        self._last_seq, uses = self.table.uses_after(self._last_seq)
        for key, use in uses:
            self._policy.restore(key, use)

    def _settle_failed_writes(self) -> None:
        while self._unsettled:
            recovery.settle(self.folder, self.table, self.catalog, self._unsettled[-1])
            self._unsettled.pop()


def _info_of(entry: StoreEntry, num_bytes: int) -> EntryInfo:
    now = time.time()
    num_tokens = len(entry.token_ids)
    return EntryInfo(entry.key, entry.namespace, entry.fingerprint, num_tokens, num_bytes, now, now, entry.meta)


def _io_reason(error: Exception) -> str:
    """A short name for a failed write."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "disk_full"
    if isinstance(error, sqlite3.Error) and "full" in str(error):
        return "disk_full"
    return "io_error"
