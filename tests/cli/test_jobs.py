"""Several processes that encode one store's chunks: one dies, all die, they are told to stop, they cannot start."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import deque
from contextlib import suppress
from types import SimpleNamespace

import pytest

from kvboost_rag.cli.jobs import JobError, JobState, _Job, _Worker, encode_in_processes, worker_specs
from kvboost_rag.cli.model_choice import ModelChoice
from kvboost_rag.cli.options import StoreChoice
from kvboost_rag.config import EncodingConfig
from kvboost_rag.engine import KVBoost
from kvboost_rag.models.load import load_model
from kvboost_rag.stores import open_store

WORDS = ("store", "tide", "apple", "clock")


@pytest.fixture
def job(model_folder, tmp_path):
    """Specs of two processes and the units of ten known chunks, none encoded."""
    texts = [f"Chunk number {n} tells of the {WORDS[n % 4]}. " * 5 for n in range(10)]
    encoding = EncodingConfig(neighbours=0)
    with KVBoost(load_model(model_folder), store=tmp_path / "kv", encoding=encoding) as engine:
        keys = engine.warm(texts, encode=False).content_hashes
        assert len(engine.store) == 0
    specs = worker_specs(ModelChoice(model_folder), StoreChoice(tmp_path / "kv"), "", encoding, 2)
    return specs, [(key,) for key in keys], tmp_path / "kv"


def keys_in(folder):
    store = open_store(folder)
    try:
        return set(store.keys())
    finally:
        store.close()


def test_a_dying_process_does_not_lose_the_rest(job):
    specs, units, folder = job
    killed = []

    def kill_one(state):
        if state.num_done and not killed:
            killed.append(state.pids[0])
            os.kill(state.pids[0], signal.SIGKILL)

    state = encode_in_processes(specs, units, kill_one)
    assert killed
    assert keys_in(folder) == {key for (key,) in units}
    assert state.num_encoded + state.num_already_stored == len(units)


def test_a_chunk_of_a_dead_process_waits_for_one_that_is_still_loading():
    state, ends = JobState(num_chunks=2), [multiprocessing.Pipe() for _ in range(2)]
    job = _Job(deque([("a",), ("b",)]), state)
    process = SimpleNamespace(pid=0, exitcode=-9, join=lambda: None)
    job.workers = [_Worker(process, ours) for ours, _ in ends]
    (_, dying), (_, loading) = ends
    dying.send({})
    job.wait()
    assert dying.recv() == ("a",)
    dying.close()
    job.wait()
    assert not loading.poll(), "it has not said that it is ready"
    loading.send({})
    for unit in ("a",), ("b",):
        job.wait()
        assert loading.recv() == unit
        loading.send({"num_encoded": 1})
    job.wait()
    assert (state.num_done, state.num_encoded) == (2, 2)


def test_all_processes_die_and_the_next_run_goes_on(job):
    specs, units, folder = job

    def kill_all(state):
        if state.num_done:
            for pid in state.pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    with pytest.raises(JobError, match=r"of 10 chunks were not encoded"):
        encode_in_processes(specs, units, kill_all)
    before = keys_in(folder)
    assert 0 < len(before) < len(units)
    state = encode_in_processes(specs[:1], units)
    assert state.num_already_stored == len(before)
    assert keys_in(folder) == {key for (key,) in units}


def test_ctrl_c_lets_each_process_finish_its_chunk(job):
    specs, units, folder = job
    pids = set()

    def interrupt(state):
        pids.update(state.pids)
        if state.num_done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        encode_in_processes(specs, units, interrupt)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert 0 < len(keys_in(folder)) < len(units)
    assert encode_in_processes(specs, units).num_done == len(units)


def test_a_model_that_cannot_be_loaded_is_named(job, tmp_path):
    specs, units, _ = job
    broken = [specs[0].__class__(ModelChoice(str(tmp_path / "none/x")), *list(vars(specs[0]).values())[1:])]
    with pytest.raises(JobError, match="no such folder"):
        encode_in_processes(broken, units)
