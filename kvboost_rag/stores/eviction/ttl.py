"""Entries live for a fixed time."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import takewhile

from kvboost_rag.stores.eviction.base import EntryUse, EvictionPolicy


class TTL(EvictionPolicy):
    """Entries expire `seconds` after they were stored; where room is short, the oldest goes first.

    An entry that expired is a miss and is removed (reason `expired`). While the clock stands before the time at
    which an entry was stored (it was set back), the entry does not expire.

    Args:
        seconds: lifetime, above 0.
        clock: seconds since the epoch, so that lifetimes hold across restarts.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.time) -> None:
        if not seconds > 0:
            raise ValueError(f"ttl seconds={seconds!r}: expected a number above 0")
        super().__init__(clock)
        self.seconds = seconds

    def rank(self, use: EntryUse) -> float:
        return use.added_at

    def is_expired(self, key: str) -> bool:
        use = self.entries.get(key)
        return use is not None and self.clock() - use.added >= self.seconds

    def expired(self) -> list[str]:
        return list(takewhile(self.is_expired, self.entries))
