"""What a tier asks when it must make room: which entry is worth least?"""

from __future__ import annotations

import heapq
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import ClassVar


@dataclass
class EntryUse:
    """How one entry was used so far.

    Attributes:
        num_bytes: what it takes in its tier.
        added, last_used: seconds since the epoch. Only for expiry and reports: clocks go backwards.
        added_at, used_at: values of the policy's own counter of events, which never goes backwards.
        hits: lookups that found it.
        deviation: average relative L2 distance between its values and freshly computed ones; None if not measured.
        frequency, age: of use, and the policy's age at the last use; kept by policies that let frequency fade.
    """

    num_bytes: int
    added: float
    last_used: float
    added_at: int
    used_at: int
    hits: int = 0
    deviation: float | None = None
    frequency: float = 1.0
    age: float = 0.0


class EvictionPolicy(ABC):
    """Orders the entries of one tier by worth.

    A policy is one method, `rank`; the entry of the lowest rank goes first. A rank may depend on the entry's own
    history and on what the policy had seen up to the entry's last event, so it changes only at the entry's events,
    and a heap with stale items finds the lowest in logarithmic time. Not thread-safe: the tier holds its lock.
    """

    reason: ClassVar[str] = "budget"
    """What an eviction for lack of room is counted as."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.clock = clock
        self.entries: dict[str, EntryUse] = {}
        self.events = 0
        self._heap: list[tuple[float, int, str]] = []
        self._ranked: dict[str, tuple[float, int, str]] = {}

    @abstractmethod
    def rank(self, use: EntryUse) -> float:
        """Worth of an entry: larger stays longer."""

    def add(self, key: str, num_bytes: int) -> None:
        """An entry was stored (anew, if it was known)."""
        self.events += 1
        now = self.clock()
        self.entries.pop(key, None)  # so that the dictionary's order is the order of storing
        self.entries[key] = EntryUse(num_bytes, now, now, self.events, self.events)
        self._on_add(key, self.entries[key])
        self._push(key)

    def restore(self, key: str, use: EntryUse) -> None:
        """An entry that an earlier process stored; `added_at` and `used_at` are set here: call in order of last use."""
        self.events += 1
        use.added_at = use.used_at = self.events
        self.entries[key] = use
        self._push(key)

    def hit(self, key: str) -> None:
        """A lookup found the entry. Unknown keys are ignored."""
        use = self.entries.get(key)
        if use is None:
            return
        self.events += 1
        self._on_hit(use)
        use.hits, use.used_at, use.last_used = use.hits + 1, self.events, self.clock()
        self._push(key)

    def note_deviation(self, key: str, deviation: float) -> None:
        """Average in a measured deviation (running mean over about the last four)."""
        use = self.entries.get(key)
        if use is None:
            return
        use.deviation = deviation if use.deviation is None else 0.75 * use.deviation + 0.25 * deviation
        self._push(key)

    def remove(self, key: str) -> EntryUse | None:
        """The entry is gone, for whatever reason."""
        self._ranked.pop(key, None)
        return self.entries.pop(key, None)

    def victim(self, pinned: Container[str] = ()) -> str | None:
        """The entry to evict next, or None if all are pinned. Does not remove it."""
        put_back, found = [], None
        while self._heap and found is None:
            item = self._heap[0]
            if self._ranked.get(item[2]) is not item:
                heapq.heappop(self._heap)
            elif item[2] in pinned:
                put_back.append(heapq.heappop(self._heap))
            else:
                found = item[2]
        for item in put_back:
            heapq.heappush(self._heap, item)
        return found

    def frequency_now(self, use: EntryUse) -> float:
        """Frequency of use as of now, to be given to `restore` by a later process."""
        return use.frequency

    def is_expired(self, key: str) -> bool:
        """Whether the entry must not be served any more although there is room for it."""
        return False

    def expired(self) -> list[str]:
        """Entries of which `is_expired` is true, those stored first; called at each `put`, so it must be cheap."""
        return []

    def _on_add(self, key: str, use: EntryUse) -> None:  # noqa: B027 - a hook, empty in most policies
        """Called when `use` is new, before it is ranked."""

    def _on_hit(self, use: EntryUse) -> None:  # noqa: B027 - a hook, empty in most policies
        """Called before a hit is noted in `use`."""

    def _push(self, key: str) -> None:
        item = (self.rank(self.entries[key]), self.events, key)
        self._ranked[key] = item
        heapq.heappush(self._heap, item)
        if len(self._heap) > 2 * len(self._ranked) + 64:
            self._heap = list(self._ranked.values())
            heapq.heapify(self._heap)
