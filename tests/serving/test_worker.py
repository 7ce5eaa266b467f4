"""One worker: callers queue, streams cancel, errors cross threads."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import pytest

from kvboost_rag.serving.worker import Cancelled, Stream, Worker


@pytest.fixture
def worker():
    worker = Worker("test")
    yield worker
    worker.close()


def test_jobs_never_overlap(worker: Worker) -> None:
    running, most = 0, 0

    def job() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        time.sleep(0.002)
        running -= 1

    threads = [threading.Thread(target=lambda: worker.submit(job).result()) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1


def test_items_come_in_order_and_may_be_taken_by_other_threads(worker: Worker) -> None:
    def job(emit: Callable[[int], None], cancelled: threading.Event) -> None:
        for i in range(5):
            emit(i)

    iterator = iter(Stream(worker, job))
    got: list[int] = []
    for _ in range(5):
        thread = threading.Thread(target=lambda: got.append(next(iterator)))
        thread.start()
        thread.join()
    assert got == [0, 1, 2, 3, 4]


def test_errors_reach_the_consumer(worker: Worker) -> None:
    def job(emit: Callable[[int], None], cancelled: threading.Event) -> None:
        emit(1)
        raise ZeroDivisionError("in the worker")

    iterator = iter(Stream(worker, job))
    assert next(iterator) == 1
    with pytest.raises(ZeroDivisionError, match="in the worker"):
        next(iterator)


def test_closing_early_cancels_the_running_job(worker: Worker) -> None:
    ended = threading.Event()

    def job(emit: Callable[[int], None], cancelled: threading.Event) -> None:
        emit(1)
        assert cancelled.wait(5)
        ended.set()

    iterator = iter(Stream(worker, job))
    next(iterator)
    iterator.close()
    assert ended.wait(5)


@pytest.mark.parametrize("how", ["close", "event", "drop"])
def test_a_job_that_is_given_up_before_it_begins_never_runs(worker: Worker, how: str) -> None:
    gate, ran, event = threading.Event(), threading.Event(), threading.Event()
    worker.submit(lambda: gate.wait(5))
    stream: Stream[int] = Stream(worker, lambda emit, cancelled: ran.set(), event)
    if how == "close":
        stream.close()
    elif how == "event":
        event.set()
    else:
        del stream
    gate.set()
    worker.submit(lambda: None).result()
    assert not ran.is_set()
    if how != "drop":
        assert list(stream) == []


def test_dropping_a_stream_stops_the_running_job(worker: Worker) -> None:
    ended = threading.Event()

    def job(emit: Callable[[int], None], cancelled: threading.Event) -> None:
        emit(1)
        assert cancelled.wait(5)
        ended.set()

    stream = Stream(worker, job)
    next(stream)
    del stream
    assert ended.wait(5)


def test_an_ended_stream_leaves_the_callers_event_alone(worker: Worker) -> None:
    event = threading.Event()
    stream: Stream[int] = Stream(worker, lambda emit, cancelled: emit(1), event)
    assert list(stream) == [1]
    stream.close()
    assert not event.is_set()


def test_a_job_that_gives_up_ends_its_stream(worker: Worker) -> None:
    def job(emit: Callable[[int], None], cancelled: threading.Event) -> None:
        emit(1)
        raise Cancelled

    assert list(Stream(worker, job)) == [1]


def test_a_job_must_not_wait_for_its_own_worker(worker: Worker) -> None:
    def job() -> None:
        worker.submit(lambda: None).result()

    with pytest.raises(RuntimeError, match="inside a running request"):
        worker.submit(job).result()


def test_a_closed_worker_says_so() -> None:
    worker = Worker("test")
    assert worker.close()
    assert not worker.close()
    with pytest.raises(RuntimeError, match="closed"):
        worker.submit(lambda: None)


def test_closing_ends_streams_that_wait() -> None:
    worker = Worker("test")
    gate = threading.Event()
    worker.submit(lambda: gate.wait(5))
    stream: Stream[int] = Stream(worker, lambda emit, cancelled: None)
    threading.Timer(0.05, gate.set).start()
    worker.close()
    with pytest.raises(RuntimeError, match="closed before"):
        list(stream)


def test_a_forked_child_is_told_instead_of_waiting_for_ever(worker: Worker) -> None:
    assert worker.submit(lambda: 1).result() == 1
    child = os.fork()
    if not child:
        try:
            worker.submit(lambda: 2)
        except RuntimeError as error:
            os._exit(0 if "make an engine in each process" in str(error) else 3)
        os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert worker.submit(lambda: 3).result() == 3


def test_callers_that_wait_for_their_turn_are_told_that_it_was_closed() -> None:
    worker = Worker("test")
    gate, said = threading.Event(), []
    worker.submit(lambda: gate.wait(5))

    def wait() -> None:
        with pytest.raises(RuntimeError, match="closed before") as raised:
            worker.call(lambda: None)
        said.append(raised)

    waiting = threading.Thread(target=wait)
    waiting.start()
    while worker._unfinished < 2:
        time.sleep(0.001)
    threading.Timer(0.05, gate.set).start()
    worker.close()
    waiting.join(5)
    assert len(said) == 1
