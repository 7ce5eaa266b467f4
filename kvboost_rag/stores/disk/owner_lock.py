"""Which processes that share a folder are alive: each holds a lock on a file of its own for as long as it lives."""

from __future__ import annotations

import contextlib
import fcntl
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

SUFFIX = ".lock"


class OwnerLock:
    """A name that is unique to this object, and a file lock that the kernel releases when the process dies.

    Neither clocks nor process ids are trusted: the first go backwards, the second are used again.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._pid = os.getpid()
        self._descriptor = -1
        while self._descriptor < 0:
            self.name = uuid.uuid4().hex
            self._path = folder / f"{self.name}{SUFFIX}"
            self._descriptor = self._acquire()

    def release(self) -> None:
        """Give the name up. Calling it again does nothing; in a forked child the name stays the parent's."""
        if self._descriptor >= 0:
            if self._pid == os.getpid():
                self._path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = -1

    def _acquire(self) -> int:
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if self._path.exists():
            return descriptor
        os.close(descriptor)  # another process took it for a dead owner's file before it was locked
        return -1


def remove_dead_owners(folder: Path) -> int:
    """Delete the lock files whose owners are gone; returns how many."""
    num_dead = 0
    for path in folder.glob(f"*{SUFFIX}"):
        with contextlib.suppress(OSError):  # locked: its owner lives
            descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                num_dead += 1
            finally:
                os.close(descriptor)
    return num_dead


def living_owners(folder: Path) -> set[str]:
    """Names of the owners whose lock files are left after `remove_dead_owners`."""
    return {path.stem for path in folder.glob(f"*{SUFFIX}")}


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold the lock on a file while the body runs; other processes (and threads) wait."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
