"""What a store of two LRU tiers must hold and have counted, written down independently of the store."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field


class SoakError(AssertionError):
    """The store is not what the model of it says."""


@dataclass
class LruTier:
    """One tier, as anybody would write it down: what was used longest ago goes first."""

    budget: int
    held: OrderedDict[str, int] = field(default_factory=OrderedDict)

    def add(self, key: str, num_bytes: int, pinned: Collection[str]) -> list[str]:
        """Take `key` in unless only pinned keys could make room; returns what had to go."""
        gone: list[str] = []
        if num_bytes > self.budget:
            return gone
        self.held.pop(key, None)
        while sum(self.held.values()) + num_bytes > self.budget:
            victim = next((k for k in self.held if k not in pinned), None)
            if victim is None:
                return gone
            del self.held[victim]
            gone.append(victim)
        self.held[key] = num_bytes
        return gone

    def use(self, key: str) -> None:
        if key in self.held:
            self.held.move_to_end(key)


@dataclass
class Expected:
    """The model of the store: two LRU tiers, and what lookups must have counted."""

    memory: LruTier
    disk: LruTier
    entry_bytes: dict[str, int]
    file_bytes: dict[str, int]
    hits: int = 0
    misses: int = 0
    pinned: Collection[str] = ()
    """The chunks of the request that is being served."""

    def lookup(self, key: str) -> bool:
        """Predict one lookup."""
        if key in self.memory.held:
            self.memory.use(key)
            self.disk.use(key)
        elif key in self.disk.held:
            self.disk.use(key)
            self._into_memory(key)
        else:
            self.misses += 1
            return False
        self.hits += 1
        return True

    def store(self, key: str) -> None:
        """Predict one `put` and the writing that follows it."""
        self.disk.add(key, self.file_bytes[key], self.pinned)
        self._into_memory(key)

    def forget(self, key: str) -> None:
        self.memory.held.pop(key, None)
        self.disk.held.pop(key, None)

    def restart(self) -> None:
        self.memory.held.clear()
        self.hits = self.misses = 0

    def _into_memory(self, key: str) -> None:
        for demoted in self.memory.add(key, self.entry_bytes[key], self.pinned):
            if demoted not in self.disk.held:
                self.disk.add(demoted, self.file_bytes[demoted], self.pinned)
