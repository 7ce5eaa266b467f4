"""One SQLite connection that threads share and forked children do not, with nested write transactions."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

BUSY_TIMEOUT_S = 60.0

LONGEST_PAUSE_S = 0.05
"""Between two attempts to begin a transaction."""

_patience: ContextVar[list[float] | None] = ContextVar("kvboost_patience", default=None)


class StoreError(RuntimeError):
    """A store cannot do its work at all (folder not writable, wrong format). Never raised by `Store.get`."""


class DamagedDatabaseError(StoreError):
    """The file is not a readable SQLite database."""


class StoreBusyError(StoreError):
    """Another process held the catalog for longer than we waited."""


class StoreFullError(StoreError):
    """There is no room left on the disk for the catalog."""


@contextlib.contextmanager
def waiting_at_most(seconds: float) -> Iterator[None]:
    """In the block this thread waits `seconds` in all for other processes' writes, not `BUSY_TIMEOUT_S` for each."""
    token = _patience.set([seconds])
    try:
        yield
    finally:
        _patience.reset(token)


_open_databases: weakref.WeakSet[Database] = weakref.WeakSet()


class Database:
    """A SQLite database in a file (write-ahead log, several processes) or in memory (`":memory:"`).

    A new file has no version until `finish_creation`: whoever fills it from elsewhere does both in one transaction, and
    is asked to again if killed before its end. SQLite's errors come out as StoreError and its kinds.

    Statements of one process run one after the other under a lock. Another process's write is waited for, up to
    `BUSY_TIMEOUT_S` (or `waiting_at_most`), while other threads go on reading. A child made by `fork` opens a
    connection of its own: SQLite's may not cross a fork.

    Args:
        path: the file, or `":memory:"`.
        schema: `CREATE … IF NOT EXISTS` statements.
        version: of the schema. A file of another version is refused.
        alone: without the memory that processes share over a file, which a full disk has no room for; other processes
            wait until this one closes the file.

    Raises:
        DamagedDatabaseError: the file is not a database, fails SQLite's check, or has an earlier schema version.
        StoreError: it was written with a later schema version.

    Attributes:
        is_new: the file was missing or held nothing.
    """

    def __init__(self, path: str | Path, schema: str, version: int, alone: bool = False) -> None:
        self.path = str(path)
        self._schema = schema
        self._version, self._alone = version, alone
        self._lock = threading.RLock()
        self._depth = 0
        self._left_to_parent: list[sqlite3.Connection] = []
        self.is_new = False
        with self._errors():
            self._connection: sqlite3.Connection | None = self._connect(check=True)
        self._closed = False
        _open_databases.add(self)

    def read(self, sql: str, params: Sequence[Any] = ()) -> list[Any]:
        """All rows of a query."""
        with self._lock, self._errors():
            return self._alive().execute(sql, params).fetchall()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Hold the write lock of the database; commit at the end, roll back on an exception. May be nested."""
        with self._errors():
            connection = self._begin()
            try:
                try:
                    yield connection
                except BaseException:
                    self._depth -= 1
                    if self._depth == 0 and connection.in_transaction:
                        connection.execute("ROLLBACK")
                    raise
                self._depth -= 1
                if self._depth == 0:
                    self._commit(connection)
            finally:
                self._lock.release()

    def wait_for_writers(self) -> None:
        """Until no other process writes, for callers who are about to take a lock of their own before `transaction`."""
        with self.transaction():
            pass

    def wipe_log(self) -> bool:
        """Move the write-ahead log into the main file and empty it, so that deleted text is in neither.

        Returns:
            False where another process reads so long that the log could not be emptied: try again later.
        """
        with self._lock, self._errors():
            if self._depth:
                return False
            return not self._alive().execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]

    def finish_creation(self) -> None:
        """Give a new file its version, in the caller's transaction if there is one."""
        with self.transaction() as db:
            db.execute(f"PRAGMA user_version = {self._version}")

    def close(self) -> None:
        """Release the file. Calling it again does nothing."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
            self._connection, self._closed = None, True

    def after_fork(self) -> None:
        """Leave the parent's connection alone in a child: closing it here would drop the parent's file locks."""
        self._lock, self._depth = threading.RLock(), 0
        if self._connection is not None and self.path != ":memory:":
            self._left_to_parent.append(self._connection)
            self._connection = None

    def _begin(self) -> sqlite3.Connection:
        """Take the lock and be in a transaction; the lock is not held while another process's write is waited for."""
        left, pause = _patience.get() or [BUSY_TIMEOUT_S], LONGEST_PAUSE_S / 64
        while True:
            self._lock.acquire()
            try:
                connection = self._alive()
                if self._depth == 0:
                    _begin_at_once(connection)
                self._depth += 1
                return connection
            except BaseException as error:
                self._lock.release()
                if not _is_busy(error) or left[0] <= 0:
                    raise
            started = time.monotonic()
            time.sleep(min(pause, left[0]))
            left[0] -= time.monotonic() - started
            pause = min(2 * pause, LONGEST_PAUSE_S)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Say what SQLite's errors mean to whoever uses the store."""
        try:
            yield
        except sqlite3.Error as error:
            raise meaning_of(error, self.path) from error

    @staticmethod
    def _commit(connection: sqlite3.Connection) -> None:
        try:
            connection.execute("COMMIT")
        except sqlite3.Error:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise

    def _alive(self) -> sqlite3.Connection:
        if self._closed:
            raise StoreError(f"the catalog {self.path} is closed")
        if self._connection is None:
            self._connection = self._connect(check=False)
        return self._connection

    def _connect(self, check: bool) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self.path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False, cached_statements=256
        )
        try:
            connection.text_factory = _lenient  # a damaged text is a row of its own to deal with, not the end
            connection.execute("PRAGMA secure_delete = ON")
            connection.execute("PRAGMA temp_store = MEMORY")  # no deleted text in files of SQLite's own
            if self._alone:
                connection.execute("PRAGMA locking_mode = EXCLUSIVE")
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            if check:
                self._check(connection)
            if self.is_new:  # otherwise nothing is written: a full disk can be opened
                connection.execute("BEGIN IMMEDIATE")
                for statement in self._schema.split(";\n\n"):
                    connection.execute(statement)
                connection.execute("COMMIT")
        except sqlite3.OperationalError:  # cannot open, read-only, disk full, locked: not damage
            connection.close()
            raise
        except sqlite3.DatabaseError as error:
            connection.close()
            raise DamagedDatabaseError(f"{self.path}: {error}") from error
        except StoreError:
            connection.close()
            raise
        return connection

    def _check(self, connection: sqlite3.Connection) -> None:
        found = connection.execute("PRAGMA user_version").fetchone()[0]
        self.is_new = found == 0
        if 0 < found < self._version:
            raise DamagedDatabaseError(f"{self.path}: written by an earlier version of this program ({found})")
        if found > self._version:
            raise StoreError(
                f"{self.path} has catalog version {found}, this program reads {self._version}: "
                "use the program that wrote it, or another folder"
            )
        verdict = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        if verdict != "ok":
            raise DamagedDatabaseError(f"{self.path}: {verdict}")


def _begin_at_once(connection: sqlite3.Connection) -> None:
    """Begin to write, or raise if another process does; SQLite's own waiting would keep our other threads out."""
    connection.execute("PRAGMA busy_timeout = 0")
    try:
        connection.execute("BEGIN IMMEDIATE")
    finally:
        connection.execute(f"PRAGMA busy_timeout = {int(BUSY_TIMEOUT_S * 1000)}")


def meaning_of(error: sqlite3.Error, path: str) -> StoreError:
    """What an error of SQLite means to whoever uses the store."""
    text = str(error)
    if _is_busy(error):
        return StoreBusyError(f"the catalog {path} is locked by another process that writes; try again")
    if "full" in text:
        return StoreFullError(f"no room for the catalog {path}: free space on its disk (kvboost-rag evict does)")
    if type(error) is sqlite3.DatabaseError:
        return DamagedDatabaseError(f"{path}: {text}")
    return StoreError(f"the catalog {path} cannot be used: {text}")


def _lenient(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


def _is_busy(error: BaseException) -> bool:
    return isinstance(error, sqlite3.OperationalError) and "locked" in str(error)


def _after_fork_in_child() -> None:
    for database in list(_open_databases):
        database.after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
