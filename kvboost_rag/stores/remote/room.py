"""A bound on bytes that are under way at the same time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Room:
    """Lets values through as long as their bytes together are within `most`; a larger one goes alone. Thread-safe.

    Args:
        most: bytes.
        patience_s: how long one waits for the others.
    """

    def __init__(self, most: int, patience_s: float) -> None:
        self.most, self._patience_s = most, patience_s
        self._taken = 0
        self._changed = threading.Condition()

    @property
    def taken(self) -> int:
        """Bytes under way."""
        return self._taken

    @contextmanager
    def of(self, num_bytes: int) -> Iterator[None]:
        """Room for `num_bytes` while the block runs.

        Raises:
            TimeoutError: the others took too long.
        """
        size = min(num_bytes, self.most)
        with self._changed:
            if not self._changed.wait_for(lambda: self._taken + size <= self.most, self._patience_s):
                raise TimeoutError(f"{self._taken} of {self.most} bytes are under way")
            self._taken += size
        try:
            yield
        finally:
            with self._changed:
                self._taken -= size
                self._changed.notify_all()
