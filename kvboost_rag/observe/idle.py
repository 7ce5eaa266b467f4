"""Work that can wait until nobody is waiting."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

logger = logging.getLogger(__name__)

MAX_PENDING = 256


class IdleJobs:
    """Runs jobs one after the other in a thread of its own, each when the engine has nothing to do.

    A job that returns an iterator is run step by step, each step when nobody is waiting. Nothing depends on a job being
    run: those beyond `max_pending`, those pending at `close` and those that are cancelled are dropped, and one that
    fails is logged. Thread-safe.
    """

    def __init__(self, name: str, is_idle: Callable[[], bool], max_pending: int = MAX_PENDING) -> None:
        self._name, self._is_idle, self._max_pending = name, is_idle, max_pending
        self._jobs: queue.Queue[tuple[str, Callable[[], Any]] | None] = queue.Queue()
        self._pending: set[str] = set()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    @property
    def num_pending(self) -> int:
        """Jobs that wait or run."""
        return len(self._pending)

    def offer(self, key: str, job: Callable[[], Any]) -> bool:
        """Run `job` some time, unless one of the same key waits already; returns at once, whether it was taken."""
        with self._lock:
            if self._closed.is_set() or key in self._pending or len(self._pending) >= self._max_pending:
                return False
            self._pending.add(key)
            self._jobs.put((key, job))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
        return True

    def cancel(self) -> int:
        """Drop all jobs, one that runs at its next step; returns how many."""
        with self._lock:
            dropped = len(self._pending)
            self._pending.clear()
        return dropped

    def wait(self) -> None:
        """Until everything taken so far is done."""
        self._jobs.join()

    def close(self) -> None:
        """Drop what is pending and end the thread; waits for a job's step that runs."""
        with self._lock:
            self._closed.set()
            thread = self._thread
            self._jobs.put(None)
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while (item := self._jobs.get()) is not None:
            try:
                self._do(*item)
            except Exception as error:
                if not self._closed.is_set():
                    logger.warning("a job in the background failed: %s", error, exc_info=error)
            finally:
                with self._lock:
                    self._pending.discard(item[0])
                del item  # what a job holds is not to outlive it
                self._jobs.task_done()
        self._jobs.task_done()

    def _do(self, key: str, job: Callable[[], Any]) -> None:
        if self._may_go_on(key):
            result = job()
            while isinstance(result, Iterator) and self._may_go_on(key) and next(result, self) is not self:
                pass

    def _may_go_on(self, key: str) -> bool:
        """Wait until the engine is idle; False if the job is not wanted any more."""
        while key in self._pending and not self._is_idle() and not self._closed.wait(0.02):
            pass
        return key in self._pending and not self._closed.is_set()
