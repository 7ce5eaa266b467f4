"""Accuracy in production: a sample of the served requests is compared with full prefill, when nobody is waiting."""

from __future__ import annotations

import logging
import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

logger = logging.getLogger(__name__)

WINDOW = 50
"""Comparisons that the figures look back on."""
MIN_SAMPLES = 5
"""No decision on fewer."""
MAX_PENDING = 8
"""Requests kept for comparison at most; more are passed over and counted."""
PATIENCE_S = 10.0
"""A comparison waits this long for the engine to be idle, then runs all the same: a busy server must see some, too."""
MAX_ANSWER_TOKENS = 64
"""Tokens of the answer that are compared."""


@dataclass(frozen=True)
class ShadowSample:
    """One served answer under full prefill: KL(full ‖ served) in nats at the first token and over the answer
    (teacher-forced), and the share of its tokens with the same most likely token."""

    kl_first: float
    kl_mean: float
    agreement: float


@dataclass(frozen=True)
class ShadowStats:
    """Means over the last `WINDOW` comparisons, None before the first. `num_passed_over`: sampled, not compared."""

    num_compared: int
    num_passed_over: int
    kl_first: float | None
    kl_mean: float | None
    agreement: float | None
    tripped: bool


@dataclass(frozen=True)
class _Job:
    compare: Callable[[], ShadowSample]
    max_kl: float | None


class Shadow:
    """Takes served requests, compares some in a thread of its own, and remembers whether accuracy got too bad.

    Tripped means that the larger of the mean KLs was above the request's limit; it stays so until `reset`. Thread-safe.

    Args:
        name: of the model, for the log.
        is_idle: whether the engine has nothing to do.
        on_sample: called after each comparison, in the shadow's thread.
        seed: of the sampling.
    """

    def __init__(
        self,
        name: str,
        is_idle: Callable[[], bool],
        on_sample: Callable[[ShadowSample], None] | None = None,
        seed: int | None = None,
    ) -> None:
        self._name, self._is_idle, self._on_sample = name, is_idle, on_sample
        self._draw = random.Random(seed)
        self._jobs: queue.Queue[_Job | None] = queue.Queue(MAX_PENDING)
        self._lock = threading.Lock()
        self._samples: deque[ShadowSample] = deque(maxlen=WINDOW)
        self._num_compared = self._num_passed_over = 0
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()
        self.tripped = False

    def offer(self, compare: Callable[[], ShadowSample], rate: float, max_kl: float | None) -> bool:
        """Maybe keep a served request for comparison; returns at once.

        Args:
            compare: does the comparison; an exception is logged and counted as passed over.
            rate: chance that it is taken.
            max_kl: limit above which the engine is to stop approximating; None = only report.

        Returns:
            Whether it was taken.
        """
        if rate <= 0 or self._closed.is_set() or self._draw.random() >= rate:
            return False
        try:
            self._jobs.put_nowait(_Job(compare, max_kl))
        except queue.Full:
            with self._lock:
                self._num_passed_over += 1
            return False
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"kvboost-shadow-{self._name}", daemon=True)
                self._thread.start()
        return True

    def stats(self) -> ShadowStats:
        with self._lock:
            samples = list(self._samples)
            counts = self._num_compared, self._num_passed_over
        if not samples:
            return ShadowStats(*counts, None, None, None, self.tripped)
        first = fmean(s.kl_first for s in samples)
        mean = fmean(s.kl_mean for s in samples)
        return ShadowStats(*counts, first, mean, fmean(s.agreement for s in samples), self.tripped)

    def reset(self) -> None:
        """Forget the comparisons and go back to approximate reuse."""
        with self._lock:
            self._samples.clear()
            self.tripped = False

    def wait(self) -> None:
        """Until everything taken so far is compared."""
        self._jobs.join()

    def close(self) -> None:
        """Drop what is pending and end the thread; waits for a comparison that runs."""
        self._closed.set()
        thread = self._thread
        if thread is None:
            return
        self._discard_pending()
        self._jobs.put(None)
        thread.join()

    def _discard_pending(self) -> None:
        while True:
            try:
                self._jobs.get_nowait()
            except queue.Empty:
                return
            self._jobs.task_done()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._wait_until_idle()
            try:
                if not self._closed.is_set():
                    self._book(job.compare(), job.max_kl)
            except Exception as error:  # a comparison that fails must not end the thread
                with self._lock:
                    self._num_passed_over += 1
                if not self._closed.is_set():
                    logger.warning("a request could not be compared with full prefill: %s", error, exc_info=error)
            finally:
                self._jobs.task_done()
        self._jobs.task_done()

    def _wait_until_idle(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not self._is_idle() and time.monotonic() < deadline and not self._closed.wait(0.02):
            pass

    def _book(self, sample: ShadowSample, max_kl: float | None) -> None:
        with self._lock:
            self._samples.append(sample)
            self._num_compared += 1
            enough = len(self._samples) >= MIN_SAMPLES
            worst = max(fmean(s.kl_first for s in self._samples), fmean(s.kl_mean for s in self._samples))
            trips = enough and max_kl is not None and worst > max_kl and not self.tripped
            self.tripped |= trips
        if trips:
            logger.error(
                "%s: answers are %.3g nats from full prefill (limit %g, last %d comparisons); only exact reuse from "
                "now on. engine.shadow.reset() goes back",
                self._name,
                worst,
                max_kl,
                len(self._samples),
            )
        if self._on_sample is not None:
            self._on_sample(sample)
