"""Aged frequency × deviation per byte goes by worth: the default."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable

from kvboost_rag.stores.eviction.base import EntryUse, EvictionPolicy


class Importance(EvictionPolicy):
    """Evicts the entry of the lowest importance,

        importance = frequency × weight ÷ bytes,
        frequency  = Σ over its uses of ½^(age of the use ÷ half-life),
        weight     = its average deviation ÷ the mean deviation of all entries, within [½, 2] (1 where not measured).

    The age of a use is counted in accesses of the tier, and the half-life is `half_life` × the number of entries held,
    so that a small tier forgets as many turnovers back as a large one. Frequency survives eviction (for as many
    evicted keys as `history` × the entries held): a chunk that comes back need not start from nothing.

    How it differs from plain frequency (LFU): old uses fade, so what was popular last month leaves; a chunk of high
    deviation is kept longer than its frequency alone would earn, because getting it back costs repair as well as
    encoding; and bytes are the price, so that one whole-document chunk must be worth several small ones. It differs
    from LRU in that a single use, as in a scan over the corpus, cannot push out what is used again and again.

    Ranks are log₂(importance) + the time of the last use in half-lives, which orders entries at any later time exactly
    as their aged importance does (after Lee et al. 2001, "LRFU"; the deviation and the bytes are ours).

    Args:
        half_life: in multiples of the number of entries held. Smaller is nearer to LRU, larger to LFU. Up to 1.5 it
            stays level with LRU where only recency counts (`benchmarks/eviction.py`, trace `drift`); 4 gains some
            points more under a steady Zipf and loses more than ten there.
        history: evicted keys remembered, in multiples of the number of entries held.
    """

    reason = "importance_low"

    def __init__(self, half_life: float = 1.5, history: float = 4.0, clock: Callable[[], float] = time.time) -> None:
        if not half_life > 0 or not history >= 0:
            raise ValueError(f"half_life={half_life!r}, history={history!r}: expected above 0, and 0 or more")
        super().__init__(clock)
        self.half_life = half_life
        self.history = history
        self._age = 0.0
        self._past: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self._deviation_sum, self._deviation_count = 0.0, 0

    def rank(self, use: EntryUse) -> float:
        return math.log2(use.frequency * self._weight(use) / max(1, use.num_bytes)) + use.age

    def note_deviation(self, key: str, deviation: float) -> None:
        self._deviation_sum += deviation
        self._deviation_count += 1
        super().note_deviation(key, deviation)

    def remove(self, key: str) -> EntryUse | None:
        use = super().remove(key)
        if use is not None:
            self._past[key] = (use.frequency, use.age)
            while len(self._past) > self.history * (len(self.entries) + 1):
                self._past.popitem(last=False)
        return use

    def frequency_now(self, use: EntryUse) -> float:
        return use.frequency * 0.5 ** (self._age - use.age)

    def _on_add(self, key: str, use: EntryUse) -> None:
        self._grow_older()
        frequency, age = self._past.pop(key, (0.0, self._age))
        use.frequency = 1.0 + frequency * 0.5 ** (self._age - age)
        use.age = self._age

    def _on_hit(self, use: EntryUse) -> None:
        self._grow_older()
        use.frequency = 1.0 + self.frequency_now(use)
        use.age = self._age

    def _grow_older(self) -> None:
        self._age += 1.0 / (self.half_life * max(1, len(self.entries)))

    def _weight(self, use: EntryUse) -> float:
        if use.deviation is None or self._deviation_sum <= 0.0:
            return 1.0
        return min(2.0, max(0.5, use.deviation * self._deviation_count / self._deviation_sum))
