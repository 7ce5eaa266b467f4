"""Encoding known chunks in several processes, each with a model of its own."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import connection
from typing import TYPE_CHECKING, Any

from kvboost_rag.cli.console import console, progress_bar
from kvboost_rag.cli.model_choice import ModelChoice
from kvboost_rag.cli.options import StoreChoice

if TYPE_CHECKING:
    from kvboost_rag.config import EncodingConfig

logger = logging.getLogger(__name__)

Unit = tuple[str, ...]
"""Content hashes that one process encodes in a row."""

MAX_ATTEMPTS = 2
"""Processes that may die over a unit before it is given up."""


_SUMMED = (
    "num_encoded",
    "num_already_stored",
    "num_failed",
    "encoded_tokens",
    "encoded_chunk_tokens",
    "num_bytes",
)
"""What is added up over the processes' `WarmReport`s."""


class JobError(RuntimeError):
    """Chunks are left that no process encoded. The message says how many and why."""


@dataclass(frozen=True)
class WorkerSpec:
    """What a process needs to know. `num_threads`: of torch on a CPU, None = its own choice."""

    model: ModelChoice
    store: StoreChoice
    namespace: str
    encoding: EncodingConfig
    num_threads: int | None = None


@dataclass
class JobState:
    """Where a job stands; `pids` are the living processes."""

    num_chunks: int
    num_done: int = 0
    num_encoded: int = 0
    num_already_stored: int = 0
    num_failed: int = 0
    encoded_tokens: int = 0
    encoded_chunk_tokens: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    pids: list[int] = field(default_factory=list)


@dataclass
class _Worker:
    process: Any
    channel: connection.Connection
    ready: bool = False
    unit: Unit | None = None


def worker_specs(
    model: ModelChoice, store: StoreChoice, namespace: str, encoding: EncodingConfig, num_jobs: int
) -> list[WorkerSpec]:
    """One process a GPU in turn, where there are any and none is named; on CPUs the cores are divided."""
    import torch

    num_gpus = torch.cuda.device_count() if model.device is None else 0
    on_cpu = not num_gpus and model.resolved_device() == "cpu"
    threads = max(1, torch.get_num_threads() // num_jobs) if on_cpu and "OMP_NUM_THREADS" not in os.environ else None
    devices = [f"cuda:{i % num_gpus}" if num_gpus else model.device for i in range(num_jobs)]
    return [
        WorkerSpec(ModelChoice(model.name, model.dtype, device), store, namespace, encoding, threads)
        for device in devices
    ]


def encode_in_processes(
    specs: Sequence[WorkerSpec], units: Sequence[Unit], progress: Callable[[JobState], None] | None = None
) -> JobState:
    """Encode chunks that the store's catalog knows; what is stored already is left alone.

    Each unit is in the hands of one process at a time, so that no key is written twice. A process that dies costs the
    chunk it was at, which another one then takes; after `KeyboardInterrupt` each finishes its chunk.

    Raises:
        JobError: units are left, because all processes have died or some died over a unit twice.
    """
    state, start = JobState(sum(map(len, units))), time.perf_counter()
    job = _Job(deque(units), state)
    with _without_interrupts():
        job.workers = [_start(spec) for spec in specs[: max(1, len(units))]]
    try:
        while job.workers and (job.pending or any(worker.unit for worker in job.workers)):
            job.wait()
            state.seconds = time.perf_counter() - start
            if progress is not None:
                progress(state)
    except KeyboardInterrupt:
        console.print("stopping after the chunks that are being encoded; run the command again to go on from here")
        raise
    finally:
        job.close()
        state.seconds = time.perf_counter() - start
    num_left = sum(map(len, [*job.pending, *job.given_up]))
    if num_left:
        raise JobError(f"{num_left} of {state.num_chunks} chunks were not encoded: {job.fault}; run the command again")
    return state


class _Job:
    """The coordinating side."""

    def __init__(self, pending: deque[Unit], state: JobState) -> None:
        self.pending, self.state = pending, state
        self.workers: list[_Worker] = []
        self.given_up: list[Unit] = []
        self.fault = "all processes have died"
        self._attempts: Counter[Unit] = Counter()

    def wait(self) -> None:
        """Until some process has something to say; then deal with it."""
        self.state.pids = [worker.process.pid for worker in self.workers]
        by_channel = {worker.channel: worker for worker in self.workers}
        for channel in connection.wait(list(by_channel)):
            worker = by_channel[channel]  # type: ignore[index]
            try:
                self._take(worker, worker.channel.recv())
            except (EOFError, OSError):
                self._bury(worker)

    def _take(self, worker: _Worker, message: Any) -> None:
        if isinstance(message, str):
            self.fault = message
            return  # the process ends, which is seen next
        worker.ready = True  # its first message says only that
        if worker.unit is not None:
            self.state.num_done += len(worker.unit)
            for name, count in message.items():
                setattr(self.state, name, getattr(self.state, name) + count)
        self._employ(worker)

    def _employ(self, worker: _Worker) -> None:
        worker.unit = self.pending.popleft() if self.pending else None
        if worker.unit is not None:
            with suppress(OSError):  # it has died, which is seen next
                worker.channel.send(worker.unit)

    def _bury(self, worker: _Worker) -> None:
        worker.process.join()
        self.workers.remove(worker)
        if worker.unit is None:
            return
        self._attempts[worker.unit] += 1
        logger.warning(
            "process %d died (exit code %s); its chunk goes to another", worker.process.pid, worker.process.exitcode
        )
        if self._attempts[worker.unit] >= MAX_ATTEMPTS:
            self.fault = "processes died over them"
            self.given_up.append(worker.unit)
        else:
            self.pending.appendleft(worker.unit)
            # One that is still loading its model asks by itself when it is ready.
            idle = next((w for w in self.workers if w.ready and w.unit is None), None)
            if idle is not None:
                self._employ(idle)

    def close(self) -> None:
        """Each process ends when it has finished its unit."""
        for worker in self.workers:
            with suppress(OSError):
                worker.channel.send(None)
        for worker in self.workers:
            worker.process.join()
            worker.channel.close()


@contextmanager
def jobs_bar() -> Iterator[Callable[[JobState], None]]:
    """A progress bar for `encode_in_processes`."""
    with progress_bar("{task.completed}/{task.total} chunks", "{task.fields[rate]}") as bar:
        task = bar.add_task("encoding", total=None, rate="")

        def show(state: JobState) -> None:
            rate = state.encoded_tokens / state.seconds if state.seconds else 0
            text = f"{rate:,.0f} tokens/s in {len(state.pids)} processes" if rate else ""
            bar.update(task, total=state.num_chunks, completed=state.num_done, rate=text)

        yield show


def _start(spec: WorkerSpec) -> _Worker:
    context = multiprocessing.get_context("spawn")  # a process that uses CUDA cannot be forked
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs, spec), daemon=True)
    process.start()
    theirs.close()
    return _Worker(process, ours)


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Processes started here ignore Ctrl-C, which the terminal sends to all: they are told when to stop."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _work(channel: connection.Connection, spec: WorkerSpec) -> None:
    """A process: says that it is ready, then encodes what it is given until it is given None."""
    from kvboost_rag.cli.session import open_engine

    console.quiet = True
    with suppress(EOFError, BrokenPipeError):  # the coordinating process is gone
        try:
            if spec.num_threads is not None:
                import torch

                torch.set_num_threads(spec.num_threads)
            with open_engine(spec.model, spec.store, spec.namespace, encoding=spec.encoding) as engine:
                channel.send({})
                while (unit := channel.recv()) is not None:
                    channel.send(_encode(engine, unit))
        except (EOFError, BrokenPipeError):
            raise
        except Exception as error:  # whatever it is, the one who started the job is to read it
            text = " ".join(str(error).split())
            channel.send(
                text if isinstance(error, (ValueError, OSError)) and text else f"{type(error).__name__}: {text}"
            )


def _encode(engine: Any, unit: Unit) -> dict[str, int]:
    from kvboost_rag.indexing.warm import warm

    records = list(engine.store.catalog.get_many(unit).values())
    report = warm(engine.fetcher, records)
    return {name: getattr(report, name) for name in _SUMMED}
