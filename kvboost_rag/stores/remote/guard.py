"""Attempts at a service that may be slow or gone: a few with pauses, then none for a while."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from kvboost_rag.stores.remote.backend import RemoteError

T = TypeVar("T")


class Guard:
    """Repeats what failed, and after failures in a row lets nothing through until some time has passed (a circuit
    breaker): a request must not wait for a service that is gone. One attempt is let through then. Places of a service
    (nodes of a cluster) fail apart: what lies on the others is served on. Thread-safe.

    Args:
        attempts: of one operation.
        pause_s: before the second attempt; doubles with each, with a random part (full jitter).
        failures: operations failed in a row that open the circuit.
        closed_s: how long nothing is let through then.
    """

    def __init__(self, attempts: int = 3, pause_s: float = 0.05, failures: int = 3, closed_s: float = 10.0) -> None:
        self.attempts, self.pause_s, self.failures, self.closed_s = attempts, pause_s, failures, closed_s
        self._failed: Counter[str] = Counter()
        self._not_before: dict[str, float] = {}
        self._lock = threading.Lock()

    @property
    def is_open(self) -> bool:
        """Whether nothing is let through to some place at the moment."""
        return any(time.monotonic() < moment for moment in self._not_before.values())

    def run(self, call: Callable[[], T], place: str = "") -> T:
        """What `call`, which asks a place, returns.

        Raises:
            RemoteError: of the last attempt, or that none is made at the moment.
        """
        if time.monotonic() < self._not_before.get(place, 0.0):
            raise RemoteError("not asked: it did not answer a moment ago")
        for attempt in range(self.attempts):
            if attempt:
                time.sleep(random.uniform(0, self.pause_s * 2 ** (attempt - 1)))
            try:
                result = call()
            except RemoteError as error:
                last = error
            else:
                with self._lock:
                    self._failed[place] = 0
                return result
        with self._lock:
            self._failed[place] += 1
            if self._failed[place] >= self.failures:
                self._not_before[place] = time.monotonic() + self.closed_s
        raise last
