"""Bytes set aside on the disk, to be given up when it is full."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

SPARE_BYTES = 4 << 20
"""Room for the log of a deletion: what is deleted then gives back more."""


class SpareRoom:
    """A file that only takes room. Deleting from a store takes a few pages of its catalog, also on a full disk."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def keep(self) -> None:
        """Set the bytes aside unless they are; where there is no room for them, nothing happens."""
        if self._path.exists():
            return
        with contextlib.suppress(OSError):
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            try:
                os.posix_fallocate(descriptor, 0, SPARE_BYTES)
            except OSError:
                self._path.unlink(missing_ok=True)
            finally:
                os.close(descriptor)

    def give_up(self) -> bool:
        """Give the bytes back to the disk; whether there were any."""
        try:
            self._path.unlink()
        except OSError:
            return False
        return True
