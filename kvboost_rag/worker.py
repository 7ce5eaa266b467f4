"""One thread a model: concurrent callers are queued, streams can be cancelled, exceptions reach the caller."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class Worker:
    """Runs jobs one after the other in a thread of its own (a transformers model is not safe to share)."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._thread: int | None = None
        self._closed = threading.Event()
        self._unfinished = 0
        self._lock = threading.Lock()

    @property
    def is_idle(self) -> bool:
        """Nothing runs and nothing is queued."""
        return self._unfinished == 0

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Queue a job.

        Raises:
            RuntimeError: the engine is closed, or the call comes from one of its own jobs (it would wait for itself).
        """
        if self._closed.is_set():
            raise RuntimeError("the engine is closed")
        if threading.get_ident() == self._thread:
            raise RuntimeError("called from inside a running request of the same engine; finish that one first")
        with self._lock:
            self._unfinished += 1
        try:
            future = self._executor.submit(self._run, job)
        except RuntimeError:  # closed a moment ago
            self._finished()
            raise
        future.add_done_callback(self._finished)
        return future

    def _finished(self, future: object = None) -> None:
        with self._lock:
            self._unfinished -= 1

    def _run(self, job: Callable[[], T]) -> T:
        self._thread = threading.get_ident()
        return job()

    def close(self) -> bool:
        """Let the running job finish, drop the queued ones; False if it was closed before."""
        if self._closed.is_set():
            return False
        self._closed.set()
        self._executor.shutdown(wait=True, cancel_futures=True)
        return True


class _Failure:
    def __init__(self, error: BaseException) -> None:
        self.error = error


_END = object()


class Stream(Generic[T]):
    """Items that a job produces in the worker, consumed by another thread, any number of threads in turn.

    Closing the stream early (or dropping it) sets `cancelled`, which the job checks.
    """

    def __init__(self, worker: Worker, job: Callable[[Callable[[T], None], threading.Event], None]) -> None:
        self.cancelled = threading.Event()
        self._items: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._future = worker.submit(lambda: self._produce(job))
        self._future.add_done_callback(self._ended_early)

    def _produce(self, job: Callable[[Callable[[T], None], threading.Event], None]) -> None:
        try:
            job(self._items.put, self.cancelled)
        except BaseException as error:
            self._items.put(_Failure(error))
        finally:
            self._items.put(_END)

    def _ended_early(self, future: Future[None]) -> None:
        if future.cancelled():  # the engine was closed before the job began
            self._items.put(_Failure(RuntimeError("the engine was closed before this request began")))
            self._items.put(_END)

    def __iter__(self) -> Iterator[T]:
        try:
            while (item := self._items.get()) is not _END:
                if isinstance(item, _Failure):
                    raise item.error
                yield item  # type: ignore[misc]
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Ask the job to stop after the current token; a job that has not begun never runs."""
        self.cancelled.set()
        self._future.cancel()
