"""Work that waits until nobody else does: order, steps, bounds, cancelling."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator

from kvboost_rag.observe.idle import IdleJobs


def test_a_job_with_steps_goes_on_only_while_nobody_waits() -> None:
    idle, done, first = threading.Event(), [], threading.Event()
    idle.set()

    def steps() -> Iterator[int]:
        for step in range(3):
            done.append(step)
            if step == 0:
                idle.clear()
                first.set()
            yield step

    jobs = IdleJobs("jobs", idle.is_set)
    jobs.offer("a", steps)
    assert first.wait(10)
    jobs.offer("b", lambda: done.append("b"))
    assert not threading.Event().wait(0.1)
    assert done == [0]
    idle.set()
    jobs.wait()
    assert done == [0, 1, 2, "b"]
    jobs.close()


def test_cancelled_jobs_end_at_their_next_step_and_new_ones_are_taken() -> None:
    running, gate, done = threading.Event(), threading.Event(), []

    def steps() -> Iterator[int]:
        for step in range(100):
            done.append(step)
            running.set()
            gate.wait(10)
            yield step

    jobs = IdleJobs("jobs", lambda: True, max_pending=2)
    assert jobs.offer("a", steps)
    assert running.wait(10)
    assert jobs.offer("b", lambda: done.append("b"))
    assert not jobs.offer("b", lambda: None), "waits already"
    assert not jobs.offer("c", lambda: None), "more than may wait"
    assert jobs.cancel() == 2
    gate.set()
    jobs.wait()
    assert done == [0]
    assert jobs.offer("b", lambda: done.append("again"))
    jobs.wait()
    assert done == [0, "again"]
    jobs.close()
    assert not jobs.offer("d", lambda: None)


def test_a_job_that_fails_does_not_end_the_others() -> None:
    done = []

    def fails() -> Iterator[int]:
        yield 1
        raise OSError("broken on purpose")

    jobs = IdleJobs("jobs", lambda: True)
    jobs.offer("a", fails)
    jobs.offer("b", lambda: done.append("b"))
    jobs.wait()
    assert done == ["b"]
    assert jobs.num_pending == 0
    jobs.close()


def test_what_a_job_held_is_gone_when_it_is_done() -> None:
    class Buffer:
        def steps(self) -> Iterator[int]:
            yield 1

    jobs, buffer = IdleJobs("jobs", lambda: True), Buffer()
    held = weakref.ref(buffer)
    jobs.offer("a", buffer.steps)
    del buffer
    jobs.wait()
    assert held() is None
    jobs.close()
