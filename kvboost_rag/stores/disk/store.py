"""Entries as files in a folder that several processes may share."""

from __future__ import annotations

import errno
import logging
import sqlite3
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from kvboost_rag.datamodels import ChunkRecord, StoreEntry
from kvboost_rag.kv.keys import context_hash, encoding_context
from kvboost_rag.stores.base import EntryInfo, Store, StoreError
from kvboost_rag.stores.budget import DEFAULT_RATIO, disk_budget
from kvboost_rag.stores.catalog.catalog import Catalog
from kvboost_rag.stores.disk import chunk_file
from kvboost_rag.stores.disk.account import DiskAccount
from kvboost_rag.stores.disk.chunk_file import ChunkFileError
from kvboost_rag.stores.disk.file_table import Reservation
from kvboost_rag.stores.disk.folder import StoreFolder
from kvboost_rag.stores.eviction import EvictionPolicy, make_policy
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
        self.budget_bytes = disk_budget(budget_bytes, kv_cache_size_ratio, self.folder.root)
        chosen = make_policy(policy)
        self._secret = secret if secret is not None else chunk_file.secret_from_environment()
        try:
            with self.folder.opening():
                super().__init__(Catalog(self.folder.open_database()))
                self.account = DiskAccount(
                    self.folder,
                    self.catalog,
                    chosen,
                    self.budget_bytes,
                    self._pins,
                    self.stats.evictions,
                    self._lock,
                )
                self.account.open()
        except (OSError, sqlite3.Error) as error:
            raise StoreError(f"cannot open the store in {folder}: {error}") from error

    def put(self, entry: StoreEntry) -> bool:
        self.folder.path(entry.key)  # refuses keys that are no hashes
        try:
            data = self._serialise(entry)
            reservation, reason = self.account.reserve(entry.key, len(data))
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
        return self.account.drop(key, reason)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self.folder.size(key) is not None

    def entries(self) -> Iterator[EntryInfo]:
        return (self.account.info_with_use(info) for info in self.account.table.infos())

    def info(self, key: str) -> EntryInfo | None:
        return next((self.account.info_with_use(info) for info in self.account.table.infos(key)), None)

    @property
    def bytes_held(self) -> Mapping[str, int]:
        return {"disk": self.account.table.total_bytes()}

    def touch(self, key: str) -> None:
        self.account.note_use(key)

    def note_deviation(self, key: str, deviation: float) -> None:
        self.account.note_deviation(key, deviation)

    def flush(self) -> None:
        """Write use counts down. Entries are durable when `put` returns."""
        self.account.save_uses()

    def close(self) -> None:
        super().close()
        self.folder.close()

    def load(self, key: str) -> tuple[StoreEntry | None, str | None]:
        try:
            if self.account.is_expired(key):
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
                if not self.account.knows(key):
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
        self.account.note_use(entry.key)

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

    def _write(self, entry: StoreEntry, data: bytes, reservation: Reservation) -> None:
        """Write and publish a file under its reservation. Raises OSError or sqlite3.Error, the account still exact."""
        staged = None
        try:
            staged = self.folder.stage(data)
            self.account.publish(staged, _info_of(entry, len(data)), reservation)
            self.folder.sync(entry.key)
        except BaseException:
            if staged is not None:
                staged.unlink(missing_ok=True)
            self.account.fail(reservation)
            raise

    def _try_drop(self, key: str, reason: str) -> None:
        try:
            self.account.drop(key, reason)
        except (sqlite3.Error, StoreError) as error:
            self._warn_once(key, "undeletable", "%s cannot be removed: %s", key[:16], error)

    def _free_log(self) -> None:
        """Give the space of the write-ahead log back where the disk is full, so that rows can be written again."""
        try:
            self.catalog.database.wipe_log()
        except sqlite3.Error as error:
            logger.debug("the log of %s cannot be emptied: %s", self.folder.root, error)


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
