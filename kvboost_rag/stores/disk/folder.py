"""The folder of a disk store: where things lie, and how a file is written so that it is whole or absent."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import re
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO

from kvboost_rag.stores.catalog.database import DamagedDatabaseError, Database, StoreError
from kvboost_rag.stores.catalog.schema import SCHEMA_VERSION
from kvboost_rag.stores.disk import file_table
from kvboost_rag.stores.disk.chunk_file import LENGTH_BYTES, ChunkFileError, header_bytes
from kvboost_rag.stores.disk.owner_lock import OwnerLock, exclusive, living_owners, remove_dead_owners
from kvboost_rag.stores.disk.seal import Piece
from kvboost_rag.stores.disk.spare_room import SpareRoom

logger = logging.getLogger(__name__)

SUFFIX = ".safetensors"
_KEY = re.compile(r"[0-9a-f]{64}")
FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a full disk."""


class StoreFolder:
    """Paths and file operations below one root.

    root/catalog.sqlite        chunks, sources, files
    root/chunks/ab/abcd….safetensors
    root/staging/OWNER-N       files being written
    root/owners/OWNER.lock     held by each open store
    root/spare                 bytes to give up when the disk is full, so that the catalog can be written to

    Attributes:
        is_full: nothing could be written when it was opened.

    Raises:
        StoreError: the root cannot be made or written to, for another reason than a full disk.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.catalog_path = root / "catalog.sqlite"
        self._chunks, self._staging, self._owners = root / "chunks", root / "staging", root / "owners"
        self._numbers = itertools.count()
        self.spare = SpareRoom(root / "spare")
        self.is_full = False
        try:
            try:
                self._prepare()
            except OSError as error:
                if error.errno not in FULL:
                    raise
                self.spare.give_up()
                self._prepare()
        except OSError as error:
            raise StoreError(
                f"cannot keep chunks in {root}: {error.strerror or error}; "
                "choose a folder that this user may write to, on a disk that is not full"
            ) from error

    def _prepare(self) -> None:
        """Make what is missing. On a full disk an existing folder can be used all the same."""
        for folder in (self._chunks, self._staging):
            folder.mkdir(parents=True, exist_ok=True)
        self._owner = OwnerLock(self._owners)
        try:
            self.stage([b"probe"]).unlink()
        except OSError as error:
            if error.errno not in FULL:
                raise
            self.is_full = True

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
        elif not self.catalog_path.is_file():
            raise StoreError(f"the catalog {self.catalog_path} is not a regular file")
        try:
            return self._database()
        except DamagedDatabaseError as error:
            aside = self.catalog_path.with_suffix(f".damaged-{time.time_ns()}")
            logger.error("the catalog is damaged (%s); it is kept as %s and made anew", error, aside.name)
            self.catalog_path.rename(aside)
            self._remove_log()
            return self._database()

    def damaged_copies(self) -> list[Path]:
        """Catalogs that were set aside. They hold texts: whatever deletes, removes them too."""
        return sorted(self.root.glob("catalog.damaged-*"))

    def path(self, key: str) -> Path:
        """Where the file of `key` lies.

        Raises:
            ValueError: not a SHA-256 hex digest (and so perhaps a path that leaves the folder).
        """
        if not _KEY.fullmatch(key):
            raise ValueError(f"key {key!r} is not a SHA-256 hex digest")
        return self._chunks / key[:2] / f"{key}{SUFFIX}"

    def stage(self, pieces: Sequence[Piece]) -> Path:
        """Write `pieces` to a staging file, one after the other, and wait until it is on the disk.

        Raises:
            OSError: as writing does; nothing is left behind then.
        """
        path = self._staging / f"{self.owner}-{os.getpid()}-{next(self._numbers)}"
        try:
            with open(path, "xb", buffering=0) as file:
                for piece in pieces:
                    _write_all(file.fileno(), piece)
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

    def read(self, key: str, most_bytes: int) -> bytes:
        """The file's bytes.

        Raises:
            OSError: as reading does.
            ChunkFileError: not a regular file (`foreign`), or larger than `most_bytes` (`corrupt`).
        """
        with self._open(key) as file:
            size = os.fstat(file.fileno()).st_size
            if size > most_bytes:
                raise ChunkFileError("corrupt", f"{size} bytes, {most_bytes} at most belong there")
            return file.read(size)

    def read_head(self, key: str) -> bytes:
        """The file's length field and JSON header.

        Raises:
            OSError: as reading does.
            ChunkFileError: not a regular file (`foreign`), or the length is absurd (`corrupt`).
        """
        with self._open(key) as file:
            length = file.read(LENGTH_BYTES)
            return length + file.read(min(header_bytes(length), os.fstat(file.fileno()).st_size))

    def _open(self, key: str) -> BinaryIO:
        """Only regular files: a pipe would be waited for, a link leads out of the folder."""
        try:
            descriptor = os.open(self.path(key), os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):
                raise ChunkFileError("foreign", "not a regular file") from error
            raise
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise ChunkFileError("foreign", "not a regular file")
        return os.fdopen(descriptor, "rb")

    def size(self, key: str) -> int | None:
        """The file's size in bytes, or None if there is none."""
        try:
            return self.path(key).lstat().st_size
        except (OSError, ValueError):
            return None

    def remove(self, key: str) -> bool:
        """Delete the file; whether there was one. Raises OSError if it cannot be deleted."""
        try:
            self.path(key).unlink()
        except (FileNotFoundError, ValueError):  # a key that is no hash has no file
            return False
        return True

    def list_keys(self) -> Iterator[str]:
        """Keys of all chunk files, by their names."""
        for path in self._chunks.glob(f"??/*{SUFFIX}"):
            if _KEY.fullmatch(path.stem):
                yield path.stem

    def clear_after_dead_owners(self) -> tuple[int, set[str]]:
        """Delete what dead processes left in staging; returns how many there were, and the names of living ones."""
        staged = list(self._staging.iterdir())  # before the owners: a process that opens meanwhile has its name first
        num_dead = remove_dead_owners(self._owners)
        alive = living_owners(self._owners)
        for path in staged:
            if path.name.split("-")[0] not in alive:
                path.unlink(missing_ok=True)
        return num_dead, alive

    def close(self) -> None:
        """Give up this process's name."""
        self._owner.release()

    def _database(self) -> Database:
        schema = file_table.SCHEMA, SCHEMA_VERSION
        try:
            return Database(self.catalog_path, *schema)
        except DamagedDatabaseError:
            raise
        except StoreError:
            if not self.is_full:
                raise
        if self.spare.give_up():
            with contextlib.suppress(StoreError):
                return Database(self.catalog_path, *schema)
        return Database(self.catalog_path, *schema, alone=True)

    def _remove_log(self) -> None:
        for suffix in ("-wal", "-shm"):
            Path(f"{self.catalog_path}{suffix}").unlink(missing_ok=True)


def _write_all(descriptor: int, piece: Piece) -> None:
    left = memoryview(piece)
    while left:
        left = left[os.write(descriptor, left) :]


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
