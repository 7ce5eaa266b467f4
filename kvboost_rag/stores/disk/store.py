"""Entries as files in a folder that several processes may share."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from kvboost_rag.datamodels import ChunkRecord, StoreEntry
from kvboost_rag.kv.keys import content_hash, record_context_hash
from kvboost_rag.stores.base import EntryInfo, Store, StoreError
from kvboost_rag.stores.budget import DEFAULT_RATIO, disk_budget
from kvboost_rag.stores.catalog.catalog import Catalog
from kvboost_rag.stores.catalog.database import StoreFullError
from kvboost_rag.stores.disk import chunk_file
from kvboost_rag.stores.disk.account import DiskAccount
from kvboost_rag.stores.disk.chunk_file import ChunkFileError
from kvboost_rag.stores.disk.file_table import Reservation
from kvboost_rag.stores.disk.folder import FULL, StoreFolder
from kvboost_rag.stores.disk.seal import Piece, secret_from_environment
from kvboost_rag.stores.eviction import EvictionPolicy, make_policy
from kvboost_rag.stores.maintenance import finish_erasures
from kvboost_rag.stores.payload import own

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
        secret: sign files and the catalog's records with HMAC-SHA256 and believe only what is signed with it; default:
            `KVBOOST_STORE_SECRET`.

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
        self._secret = secret if secret is not None else secret_from_environment()
        try:
            with self.folder.opening():
                super().__init__(Catalog(self.folder.open_database(), self._secret))
                self.account = DiskAccount(
                    self.folder,
                    self.catalog,
                    chosen,
                    self.budget_bytes,
                    self._pins,
                    self.stats.evictions,
                    self._lock,
                    self._secret,
                )
                self._settle()
        except OSError as error:
            raise StoreError(f"cannot open the store in {folder}: {error}") from error

    def _settle(self) -> None:
        """Finish what others left; on a full disk as far as that can be written, so that deleting makes room."""
        try:
            self.account.open()
            finish_erasures(self)
        except StoreFullError as error:
            logger.warning("%s: it is opened as it is, and keeps nothing new until there is room", error)
        else:
            self.folder.spare.keep()

    def put(self, entry: StoreEntry) -> bool:
        self.folder.path(entry.key)  # refuses keys that are no hashes
        try:
            pieces = self._serialise(entry)
            size = chunk_file.num_bytes(pieces)
            reservation, reason = self.account.reserve(entry.key, size)
            if reservation is not None:
                reason = self._write(entry, pieces, size, reservation)
        except (OSError, StoreError) as error:
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
        return {"disk": self.account.table.held_bytes()}

    def touch(self, key: str) -> None:
        self.account.note_use(key)

    def note_deviation(self, key: str, deviation: float) -> None:
        self.account.note_deviation(key, deviation)

    def flush(self) -> None:
        """Write use counts down, and give back room set aside. Entries are durable when `put` returns."""
        if self.is_inherited:
            return
        self.account.save_uses()
        try:
            self.account.release_allowance()
        except StoreError as error:  # somebody opens the folder later and finds that we are gone
            logger.debug("room in %s is not given back: %s", self.folder.root, error)

    def wipe(self) -> bool:
        for path in self.folder.damaged_copies():
            path.unlink(missing_ok=True)
        return super().wipe()

    def free_room(self, keys: Iterable[str]) -> None:
        self.folder.spare.give_up()
        for key in keys:
            self.folder.remove(key)
        self._free_log()

    def close(self) -> None:
        if not self.is_inherited:
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
        """The entry in a file, verified; counts nothing and changes nothing. No more is read than belongs there.

        Raises:
            OSError: the file cannot be read.
            ChunkFileError: it is not a whole chunk file of this key (a ValueError, as for keys that are no hashes).
        """
        most_bytes = self.account.table.bytes_of(key)
        if most_bytes is None or most_bytes != self.folder.size(key):  # perhaps just replaced by another process
            most_bytes = chunk_file.read_head(self.folder.read_head(key), self._secret)[1]
        entry, _ = chunk_file.load(self.folder.read(key, min(most_bytes, self.budget_bytes)), self._secret)
        if entry.key != key:
            raise ChunkFileError("swapped", f"holds {entry.key[:16]}")
        return entry

    def _on_hit(self, entry: StoreEntry) -> None:
        self.account.note_use(entry.key)

    def _serialise(self, entry: StoreEntry) -> list[Piece]:
        """The file's bytes, with the chunk's catalog record if that is what the entry was encoded from."""
        record, tokens = self._record_of(entry)
        return chunk_file.dump(own(entry), time.time(), record, tokens, self._secret)

    def _is_wanted(self, entry: StoreEntry) -> bool:
        """Whether it is not KV of a chunk that was deleted, or given another context, while it was being computed."""
        if self.catalog.get(entry.key) is not None:
            return self._record_of(entry)[0] is not None
        is_chunk = content_hash(entry.fingerprint, entry.namespace, entry.token_ids) == entry.key
        return not is_chunk or entry.key not in self.catalog.erasures

    def _record_of(self, entry: StoreEntry) -> tuple[ChunkRecord | None, tuple[tuple[int, ...], ...]]:
        """The chunk's record and its neighbours' token ids, unless it was given another context since."""
        record = self.catalog.get(entry.key)
        if record is None:
            return None, ()
        try:
            tokens = self.catalog.neighbour_tokens(record)
        except KeyError:
            return None, ()
        return (record, tokens) if record_context_hash(record, tokens) == entry.context_hash else (None, ())

    def _write(self, entry: StoreEntry, pieces: list[Piece], num_bytes: int, reservation: Reservation) -> str | None:
        """Write and publish a file under its reservation, or say why not (`context`).

        Raises:
            OSError, StoreError: it could not be written; the account is exact all the same.
        """
        staged = None
        try:
            staged = self.folder.stage(pieces)
            info = _info_of(entry, num_bytes)
            refused = self.account.publish(staged, info, reservation, lambda: self._is_wanted(entry))
            if refused is None:
                self.folder.sync(entry.key)
            return refused
        except BaseException:
            if staged is not None:
                staged.unlink(missing_ok=True)
            self.account.fail(reservation)
            raise

    def _try_drop(self, key: str, reason: str) -> None:
        try:
            self.account.drop(key, reason)
        except StoreError as error:
            self._warn_once(key, "undeletable", "%s cannot be removed: %s", key[:16], error)

    def _free_log(self) -> None:
        """Give the space of the write-ahead log back where the disk is full, so that rows can be written again."""
        try:
            self.catalog.database.wipe_log()
        except StoreError as error:
            logger.debug("the log of %s cannot be emptied: %s", self.folder.root, error)


def _info_of(entry: StoreEntry, num_bytes: int) -> EntryInfo:
    now, num_tokens = time.time(), len(entry.token_ids)
    return EntryInfo(
        entry.key,
        entry.namespace,
        entry.fingerprint,
        num_tokens,
        num_bytes,
        now,
        now,
        entry.meta,
        entry.context_hash,
    )


def _io_reason(error: Exception) -> str:
    """A short name for a failed write."""
    full = isinstance(error, StoreFullError) or (isinstance(error, OSError) and error.errno in FULL)
    return "disk_full" if full else "io_error"
