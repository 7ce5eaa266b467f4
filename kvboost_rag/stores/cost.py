"""Load a chunk's KV or compute it again? Decided by what both have cost on this machine so far."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvboost_rag.stores.base import Store

DISK, REMOTE = "disk", "remote"
"""Tiers whose loads are weighed against encoding again."""
SMOOTHING = 0.2
"""Weight of the newest measurement."""
RETRY_EVERY = 32
"""After so many decisions in a row for computing, one load is tried again: the disk may have become faster."""


@dataclass(frozen=True)
class Decision:
    """What was decided, and the estimates behind it (None: not measured yet, which always means loading)."""

    load: bool
    load_seconds: float | None
    recompute_seconds: float | None


class CostModel:
    """Seconds a byte for loading from each tier, and seconds a token for encoding, as running averages.

    Loads from disk and from a shared store are measured and weighed, each by itself: what lies in memory is always
    used. Encoding a chunk forwards its encoding context too, so callers count those tokens. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds_per_byte: dict[str, float] = {}
        self._seconds_per_token: float | None = None
        self._computed_in_a_row: Counter[str] = Counter()

    @property
    def load_bytes_per_second(self) -> float | None:
        """Measured load bandwidth of the disk, verification included."""
        return 1.0 / self._seconds_per_byte[DISK] if self._seconds_per_byte.get(DISK) else None

    @property
    def encode_tokens_per_second(self) -> float | None:
        """Measured encoding speed."""
        return None if not self._seconds_per_token else 1.0 / self._seconds_per_token

    def observe_load(self, num_bytes: int, seconds: float, tier: str = DISK) -> None:
        """Entries of `num_bytes` were read from a tier and verified in `seconds`."""
        if num_bytes > 0:
            with self._lock:
                self._seconds_per_byte[tier] = _smooth(self._seconds_per_byte.get(tier), seconds / num_bytes)

    def observe_encode(self, num_tokens: int, seconds: float) -> None:
        """`num_tokens` (encoding context included) were forwarded in `seconds`."""
        if num_tokens > 0:
            with self._lock:
                self._seconds_per_token = _smooth(self._seconds_per_token, seconds / num_tokens)

    def decide(self, num_bytes: int, num_tokens: int, tier: str = DISK) -> Decision:
        """Whether to load `num_bytes` from a tier rather than encode `num_tokens` (context included)."""
        with self._lock:
            if tier not in self._seconds_per_byte or self._seconds_per_token is None:
                return Decision(True, None, None)
            load_seconds = self._seconds_per_byte[tier] * num_bytes
            recompute_seconds = self._seconds_per_token * num_tokens
            load = load_seconds <= recompute_seconds or self._computed_in_a_row[tier] >= RETRY_EVERY
            self._computed_in_a_row[tier] = 0 if load else self._computed_in_a_row[tier] + 1
            return Decision(load, load_seconds, recompute_seconds)


@dataclass(frozen=True)
class Plan:
    """What reuse will cost and save for one model and corpus on this machine.

    Attributes:
        bytes_per_token: of stored KV.
        corpus_bytes: all of the corpus.
        warm_seconds: to encode it once, encoding contexts included.
        load_seconds, encode_seconds: for one chunk of `chunk_tokens`, from disk and by encoding.
        break_even_bytes_per_second: load bandwidth below which computing again is faster than loading.
    """

    bytes_per_token: float
    corpus_bytes: int
    warm_seconds: float
    chunk_tokens: int
    load_seconds: float
    encode_seconds: float
    break_even_bytes_per_second: float

    @property
    def loading_pays(self) -> bool:
        """Whether loading a chunk from disk is faster than encoding it."""
        return self.load_seconds <= self.encode_seconds


def plan(
    *,
    bytes_per_token: float,
    corpus_tokens: int,
    chunk_tokens: int,
    context_tokens: int,
    load_bytes_per_second: float,
    encode_tokens_per_second: float,
) -> Plan:
    """The arithmetic of `kvboost-rag plan`.

    Args:
        context_tokens: tokens of the encoding context in front of each chunk (anchor and neighbours).

    Raises:
        ValueError: a count or a speed that is not above 0 (`corpus_tokens` and `context_tokens` may be 0).
    """
    for name, value in (("bytes_per_token", bytes_per_token), ("chunk_tokens", chunk_tokens)):
        if not value > 0:
            raise ValueError(f"{name}={value!r}: expected a number above 0")
    if not load_bytes_per_second > 0 or not encode_tokens_per_second > 0:
        raise ValueError(
            f"speeds {load_bytes_per_second!r} B/s, {encode_tokens_per_second!r} tokens/s: expected above 0"
        )
    num_chunks = -(-corpus_tokens // chunk_tokens)
    encode_seconds = (chunk_tokens + context_tokens) / encode_tokens_per_second
    chunk_bytes = bytes_per_token * chunk_tokens
    return Plan(
        bytes_per_token=bytes_per_token,
        corpus_bytes=round(bytes_per_token * corpus_tokens),
        warm_seconds=(corpus_tokens + num_chunks * context_tokens) / encode_tokens_per_second,
        chunk_tokens=chunk_tokens,
        load_seconds=chunk_bytes / load_bytes_per_second,
        encode_seconds=encode_seconds,
        break_even_bytes_per_second=chunk_bytes / encode_seconds,
    )


def measure_load_speed(store: Store, max_entries: int = 16) -> float | None:
    """Bytes per second at which entries are read from the store's disk and verified, or None if it holds none.

    What the operating system still has in its page cache is read from there: after warming, the figure is that of
    memory. On a machine that has just started it is the disk's.

    Raises:
        ValueError: the store keeps nothing on disk.
    """
    from kvboost_rag.stores.verify import disk_of

    disk = disk_of(store)
    num_bytes, start = 0, time.perf_counter()
    for info, _ in zip(disk.entries(), range(max_entries), strict=False):
        try:
            disk.read(info.key)
        except (OSError, ValueError):
            continue
        num_bytes += info.num_bytes
    seconds = time.perf_counter() - start
    return num_bytes / seconds if num_bytes else None


def _smooth(old: float | None, new: float) -> float:
    return new if old is None else (1.0 - SMOOTHING) * old + SMOOTHING * new
