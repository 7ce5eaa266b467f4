"""The folder of a disk store: where things lie, and how a file is written so that it is whole or absent."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import re
import sqlite3
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from kvboost_rag.stores.catalog.database import DamagedDatabaseError, Database, StoreError
from kvboost_rag.stores.catalog.rows import SCHEMA_VERSION
from kvboost_rag.stores.disk import file_table
from kvboost_rag.stores.disk.chunk_file import LENGTH_BYTES, header_bytes
from kvboost_rag.stores.disk.owner_lock import OwnerLock, exclusive, living_owners, remove_dead_owners

logger = logging.getLogger(__name__)

SUFFIX = ".safetensors"
_KEY = re.compile(r"[0-9a-f]{64}")


class StoreFolder:
    """Paths and file operations below one root.

    root/catalog.sqlite        chunks, sources, files
    root/chunks/ab/abcd….safetensors
    root/staging/OWNER-N       files being written
    root/owners/OWNER.lock     held by each open store

    Raises:
        StoreError: the root cannot be made or written to.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.catalog_path = root / "catalog.sqlite"
        self._chunks, self._staging, self._owners = root / "chunks", root / "staging", root / "owners"
        self._numbers = itertools.count()
        try:
            for folder in (self._chunks, self._staging):
                folder.mkdir(parents=True, exist_ok=True)
            self._owner = OwnerLock(self._owners)
            probe = self.stage(b"probe")
            probe.unlink()
        except OSError as error:
            raise StoreError(
                f"cannot keep chunks in {root}: {error.strerror or error}; "
                "choose a folder that this user may write to, on a disk that is not full"
            ) from error

    @property
    def owner(self) -> str:
        """The name under which this process writes."""
        return self._owner.name

    def opening(self) -> AbstractContextManager[None]:
        """One process at a time opens the catalog, so that none sees it half made or half rebuilt."""
        return exclusive(self.root / "open.lock")

    def open_database(self) -> Database:
        """The catalog's database: a new one where it is missing or damaged (set aside then), see `Database.is_new`.

        Raises:
            StoreError: it cannot be opened, or is of another version.
        """
        if not self.catalog_path.exists():
            self._remove_log()
        try:
            try:
                return self._database()
            except DamagedDatabaseError as error:
                aside = self.catalog_path.with_suffix(f".damaged-{time.time_ns()}")
                logger.error("the catalog is damaged (%s); it is kept as %s and made anew", error, aside.name)
                self.catalog_path.rename(aside)
                self._remove_log()
                return self._database()
        except (sqlite3.Error, OSError) as error:
            raise StoreError(f"cannot open the catalog {self.catalog_path}: {error}") from error

    def path(self, key: str) -> Path:
        """Where the file of `key` lies.

        Raises:
            ValueError: not a SHA-256 hex digest (and so perhaps a path that leaves the folder).
        """
        if not _KEY.fullmatch(key):
            raise ValueError(f"key {key!r} is not a SHA-256 hex digest")
        return self._chunks / key[:2] / f"{key}{SUFFIX}"

    def stage(self, data: bytes) -> Path:
        """Write `data` to a staging file and wait until it is on the disk.

        Raises:
            OSError: as writing does; nothing is left behind then.
        """
        path = self._staging / f"{self.owner}-{os.getpid()}-{next(self._numbers)}"
        try:
            with open(path, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            raise
        return path

    def publish(self, staged: Path, key: str) -> None:
        """Give a staged file its name, in place of an earlier file of that key. Call `sync` to make that durable."""
        path = self.path(key)
        if not path.parent.exists():
            path.parent.mkdir(exist_ok=True)
            _sync_folder(self._chunks)
        os.replace(staged, path)

    def sync(self, key: str) -> None:
        """Wait until the name of a published file is on the disk."""
        _sync_folder(self.path(key).parent)

    def read(self, key: str) -> bytes:
        """The file's bytes. Raises OSError as reading does."""
        return self.path(key).read_bytes()

    def read_head(self, key: str) -> bytes:
        """The file's length field and JSON header. Raises OSError, or ChunkFileError where the length is absurd."""
        with open(self.path(key), "rb") as file:
            length = file.read(LENGTH_BYTES)
            return length + file.read(header_bytes(length))

    def size(self, key: str) -> int | None:
        """The file's size in bytes, or None if there is none."""
        try:
            return self.path(key).stat().st_size
        except (OSError, ValueError):
            return None

    def remove(self, key: str) -> bool:
        """Delete the file; whether there was one. Raises OSError if it cannot be deleted."""
        try:
            self.path(key).unlink()
        except FileNotFoundError:
            return False
        return True

    def list_keys(self) -> Iterator[str]:
        """Keys of all chunk files, by their names."""
        for path in self._chunks.glob(f"??/*{SUFFIX}"):
            if _KEY.fullmatch(path.stem):
                yield path.stem

    def clear_after_dead_owners(self) -> tuple[int, set[str]]:
        """Delete what dead processes left in staging; returns how many there were, and the names of living ones."""
        num_dead = remove_dead_owners(self._owners)
        alive = living_owners(self._owners)
        for path in self._staging.iterdir():
            if path.name.split("-")[0] not in alive:
                path.unlink(missing_ok=True)
        return num_dead, alive

    def close(self) -> None:
        """Give up this process's name."""
        self._owner.release()

    def _database(self) -> Database:
        return Database(self.catalog_path, file_table.SCHEMA, SCHEMA_VERSION)

    def _remove_log(self) -> None:
        for suffix in ("-wal", "-shm"):
            Path(f"{self.catalog_path}{suffix}").unlink(missing_ok=True)


def _sync_folder(path: Path) -> None:
    """Some network and user-space file systems cannot sync a folder: names are as durable there as they make them."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF):
            raise
    finally:
        os.close(descriptor)
