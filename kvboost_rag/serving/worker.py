"""One thread a model: concurrent callers are queued, streams can be cancelled, exceptions reach the caller."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

T = TypeVar("T")

CLOSED_BEFORE = "the engine was closed before this request began"


class EngineClosed(RuntimeError):
    """The engine takes no jobs any more: it was closed, or the interpreter ends."""


class Worker:
    """Runs jobs one after the other in a thread of its own (a transformers model is not safe to share)."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._thread: int | None = None
        self._pid = os.getpid()
        self._closed = threading.Event()
        self._unfinished = 0
        self._queued: set[Future[Any]] = set()
        self._lock = threading.Lock()

    @property
    def is_idle(self) -> bool:
        """Nothing runs and nothing is queued."""
        return self._unfinished == 0

    @property
    def is_open(self) -> bool:
        """Jobs are taken: it was not closed, and its thread is in this process."""
        return not self._closed.is_set() and not self.is_inherited

    @property
    def is_inherited(self) -> bool:
        """This process was forked off after the worker was made, and has no thread of it."""
        return os.getpid() != self._pid

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Queue a job.

        Raises:
            EngineClosed: it takes no jobs any more.
            RuntimeError: it was made before this process was forked off (its thread stayed behind:
                the job would never run), or the call comes from one of its own jobs (it would wait for itself).
        """
        if self.is_inherited:
            raise RuntimeError(
                f"this engine was made by process {self._pid}, which this one was forked from: make an engine in each "
                "process, after the fork"
            )
        if self._closed.is_set():
            raise EngineClosed("the engine is closed")
        if threading.get_ident() == self._thread:
            raise RuntimeError("called from inside a running request of the same engine; finish that one first")
        with self._lock:
            self._unfinished += 1
        try:
            with self._lock:
                future = self._executor.submit(self._run, job)
                self._queued.add(future)
        except RuntimeError:  # closed a moment ago
            self._finished()
            raise EngineClosed("the engine is closed") from None
        future.add_done_callback(self._finished)
        return future

    def call(self, job: Callable[[], T]) -> T:
        """Run a job in its turn and wait for what it gives.

        Raises:
            RuntimeError: as in `submit`, or the engine was closed before the job's turn came.
        """
        future = self.submit(job)
        try:
            return future.result()
        except CancelledError:
            if future.cancelled():
                raise EngineClosed(CLOSED_BEFORE) from None
            raise
        finally:
            future.cancel()  # whoever was interrupted while waiting wants no more of it

    def again(self, job: Callable[[], None]) -> bool:
        """From inside a job: queue its continuation, which runs even if the engine is closed before its turn.

        Returns:
            False: the engine is closed already; go on at once.
        """
        with self._lock:
            if self._closed.is_set():
                return False
            self._unfinished += 1
            future = self._executor.submit(self._run, job)
        future.add_done_callback(self._finished)
        return True

    def _finished(self, future: object = None) -> None:
        with self._lock:
            self._unfinished -= 1
            self._queued.discard(future)

    def _run(self, job: Callable[[], T]) -> T:
        self._thread = threading.get_ident()
        return job()

    def close(self) -> bool:
        """Let the running job finish, drop the queued ones; False if it was closed before."""
        if self._closed.is_set():
            return False
        with self._lock:
            self._closed.set()
            queued = list(self._queued)
        for future in queued:
            future.cancel()
        self._executor.shutdown(wait=True)
        return True


class Cancelled(Exception):
    """Raised by a job that sees that nobody waits for it any more; ends its stream."""


Job = Callable[[Callable[[T], None], threading.Event], None]
"""Gets a function that hands over an item, and the event that asks it to stop."""


class Submits(Protocol):
    """What a stream's job is handed to."""

    def submit(self, job: Callable[[], None]) -> Future[None]:
        """Queue a job."""


class Stream(Generic[T]):
    """Iterator over the items that a job produces in the worker; any number of threads may take them in turn.

    Closing the stream early, dropping it, or setting `cancelled` (from whatever thread) asks the job to stop; a job
    that has not begun by then never runs.

    Args:
        cancelled: an event of the caller's own, where others than the consumer are to be able to stop the job.
    """

    def __init__(self, worker: Submits, job: Job[T], cancelled: threading.Event | None = None) -> None:
        self.cancelled = cancelled or threading.Event()
        self._items: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._ended = False
        # Neither of the two holds the stream, so that it can be dropped while the job is queued or runs.
        self._future = worker.submit(partial(_produce, job, self._items, self.cancelled))
        self._future.add_done_callback(partial(_ended_early, self._items, self.cancelled))

    def __iter__(self) -> Stream[T]:
        return self

    def __next__(self) -> T:
        item = _END if self._ended else self._items.get()
        if item is _END:
            self._ended = True
            raise StopIteration
        if isinstance(item, _Failure):
            self._ended = True
            raise item.error
        return item  # type: ignore[return-value]

    def close(self) -> None:
        """Stop the job if it has not ended; nothing more comes out of the stream."""
        if not self._ended:
            self._ended = True
            self.cancelled.set()
            self._future.cancel()

    def __del__(self) -> None:
        if hasattr(self, "_future"):  # else the worker did not take the job
            self.close()


class _Failure:
    def __init__(self, error: BaseException) -> None:
        self.error = error


_END = object()


def _produce(job: Job[T], items: queue.SimpleQueue[object], cancelled: threading.Event) -> None:
    try:
        if not cancelled.is_set():
            job(items.put, cancelled)
    except Cancelled:
        pass
    except BaseException as error:
        items.put(_Failure(error))
    finally:
        items.put(_END)


def _ended_early(items: queue.SimpleQueue[object], cancelled: threading.Event, future: Future[None]) -> None:
    """Whoever waits for a job that never begins must not wait for ever."""
    if future.cancelled():
        if not cancelled.is_set():
            items.put(_Failure(RuntimeError(CLOSED_BEFORE)))
        items.put(_END)
