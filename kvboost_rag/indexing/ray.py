"""Warming on a Ray cluster: a pool of actors, each with a model of its own, encodes what one engine has made known."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from kvboost_rag.datamodels import ChunkRecord, WarmReport
from kvboost_rag.indexing.source_texts import SourceTexts
from kvboost_rag.indexing.warm import WarmProgress, forwards, nothing_encoded, warm

logger = logging.getLogger(__name__)

OpenEngine = Callable[[], AbstractContextManager[Any]]
"""Opens an engine (a `KVBoost` is one) over the store. Sent to every actor: it must be picklable by cloudpickle."""

COUNTS = ("num_encoded", "num_already_stored", "num_failed", "encoded_tokens", "encoded_chunk_tokens", "num_bytes")


class RayWarmError(RuntimeError):
    """Chunks are left that no actor encoded. The message says how many and why."""


@dataclass(frozen=True)
class ActorPool:
    """Who encodes.

    Attributes:
        num_actors: actors, each with a model.
        num_gpus, num_cpus: what each of them reserves of the cluster; a part of a GPU is allowed.
        address: of the cluster; `auto` is the one this machine belongs to, `local` (or None, where `RAY_ADDRESS` names
            none) a new one on this machine that ends with the job. A Ray that runs in this process already is used.
        attempts: how often the chunks that are left are handed out again after actors died over them.
    """

    num_actors: int = 1
    num_gpus: float = 0.0
    num_cpus: float = 1.0
    address: str | None = None
    attempts: int = 3

    def __post_init__(self) -> None:
        if self.num_actors < 1 or self.attempts < 1 or self.num_gpus < 0 or self.num_cpus < 0:
            raise ValueError(f"{self}: expected one actor and attempt or more, and no negative share of a machine")


def warm_dataset(
    dataset: Any,
    open_engine: OpenEngine,
    pool: ActorPool | None = None,
    *,
    text: str = "text",
    source: str | None = None,
    progress: Callable[[WarmProgress], None] | None = None,
) -> WarmReport:
    """Encode a Ray dataset of chunk texts. Idempotent and resumable: what the store holds is never encoded again.

    An engine here makes all chunks known and chooses their encoding contexts, once, so that their KV does not depend on
    how many actors there are; it is closed again before they start. Then only content hashes and counts pass through
    Ray: actors take texts and contexts from the store's catalog and write KV to the store, which is all that a restart
    needs to know. Actors on other machines need a store that reaches them (`stores.Tiers`, `shared`).

    Args:
        dataset: a `ray.data.Dataset`, or any iterable of rows.
        open_engine: as `lambda: KVBoost.from_pretrained(…, store=…)`.
        text, source: columns: a chunk's text, and the id of the document it stands in (None: of none), in order.
        progress: called whenever an actor has done some chunks.

    Raises:
        ImportError: Ray is not installed.
        RayWarmError: chunks are left; calling again goes on from there.
        TypeError, ValueError, KeyError: a row that cannot be a chunk; nothing has been encoded then.
    """
    _ray()
    pool = pool or ActorPool()
    with connected(pool):
        rows = list(dataset.iter_rows() if hasattr(dataset, "iter_rows") else dataset)
        with open_engine() as engine:
            keys = _register(engine, rows, text, source)
            records = list(engine.store.catalog.get_many(dict.fromkeys(keys)).values())
        return encode_on_ray(open_engine, records, pool, progress)


def encode_on_ray(
    open_engine: OpenEngine,
    records: Sequence[ChunkRecord],
    pool: ActorPool,
    progress: Callable[[WarmProgress], None] | None = None,
) -> WarmReport:
    """Encode chunks that the store's catalog knows, on the cluster; raises as `warm_dataset`."""
    ray = _ray()
    distinct = list({r.content_hash: r for r in records}.values())
    job = _Job({r.content_hash: len(r.token_ids) for r in distinct}, progress)
    left = [tuple(r.content_hash for r in group) for group in forwards(distinct)]
    with connected(pool):
        for _ in range(pool.attempts):
            if not left:
                break
            try:
                for row in _run(ray, open_engine, left, pool):
                    job.take(row)
            except ray.exceptions.RayError as error:  # more actors died than it would start anew
                job.fault = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
                logger.warning("actors died; what is left goes to new ones: %s", job.fault)
            left = [unit for unit in left if unit not in job.done]
    if left:
        raise RayWarmError(f"{sum(map(len, left))} of {len(distinct)} chunks were not encoded: {job.fault}; run again")
    hashes = tuple(r.content_hash for r in records)
    return WarmReport(
        num_chunks=len(distinct), chunk_tokens=job.num_tokens, seconds=job.seconds, content_hashes=hashes, **job.counts
    )


@contextmanager
def connected(pool: ActorPool) -> Iterator[None]:
    """With a Ray: the one of this process, else one that is left (or ended) afterwards."""
    ray = _ray()
    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(address=pool.address, log_to_driver=False, logging_level=logging.WARNING)
    try:
        yield
    finally:
        ray.shutdown()


def _register(engine: Any, rows: Sequence[Mapping[str, Any]], text: str, source: str | None) -> tuple[str, ...]:
    """Content hashes of all rows' chunks, known and with their contexts from now on."""
    if source is None:
        return engine.warm([row[text] for row in rows], encode=False).content_hashes
    documents: dict[str, list[str]] = {}
    for row in rows:
        documents.setdefault(row[source], []).append(row[text])
    sources = {name: SourceTexts(texts) for name, texts in documents.items()}
    return engine.index.add_many(sources, encode=False).warm.content_hashes


def _run(ray: Any, open_engine: OpenEngine, units: Sequence[tuple[str, ...]], pool: ActorPool) -> Iterator[Any]:
    """Rows of counts, as actors finish units."""
    from ray.data import ActorPoolStrategy, DataContext

    context = DataContext.get_current()
    shown, context.enable_progress_bars = context.enable_progress_bars, False
    try:
        # Small blocks: one is done again if its actor dies over it, and one is what progress is reported after.
        num_blocks = min(len(units), max(64 * pool.num_actors, len(units) // 256))
        items = [{"keys": " ".join(unit)} for unit in units]
        dataset = ray.data.from_items(items, override_num_blocks=num_blocks).map_batches(
            _Actor,
            fn_constructor_args=(open_engine,),
            batch_size=1,
            compute=ActorPoolStrategy(size=pool.num_actors, max_tasks_in_flight_per_actor=2),
            num_gpus=pool.num_gpus or None,
            num_cpus=pool.num_cpus,
            # By default Ray starts actors anew without end, also one that dies over every chunk it is given.
            ray_remote_args_fn=lambda: {"max_restarts": pool.attempts, "max_task_retries": pool.attempts},
        )
        yield from dataset.iter_rows()
    finally:
        context.enable_progress_bars = shown


class _Actor:
    """A model; encodes what it is given unless the store holds it."""

    def __init__(self, open_engine: OpenEngine) -> None:
        self._opened = open_engine()
        self._engine = self._opened.__enter__()

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[Any]]:
        rows = [self._encode(str(unit)) for unit in batch["keys"]]
        return {name: [row[name] for row in rows] for name in rows[0]}

    def _encode(self, unit: str) -> dict[str, Any]:
        keys, fault, report = unit.split(), "", nothing_encoded([])
        try:
            known = self._engine.store.catalog.get_many(keys)
            if len(known) < len(keys):
                fault = f"{len(keys) - len(known)} chunks are not known on this machine"
            else:
                report = warm(self._engine.fetcher, [known[key] for key in keys])
        except Exception as error:  # whatever it is, the one who started the job is to read it
            fault = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        return {"keys": unit, "fault": fault, **{name: getattr(report, name) for name in COUNTS}}


@dataclass
class _Job:
    """Where the job stands; `num_of` are each chunk's tokens."""

    num_of: Mapping[str, int]
    progress: Callable[[WarmProgress], None] | None
    done: set[tuple[str, ...]] = field(default_factory=set)
    num_done: int = 0
    tokens_done: int = 0
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))
    fault: str = "all actors have died"
    start: float = field(default_factory=time.perf_counter)
    num_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_tokens = sum(self.num_of.values())

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.start

    def take(self, row: Mapping[str, Any]) -> None:
        if row["fault"]:
            self.fault = row["fault"]
            return
        unit = tuple(row["keys"].split())
        if unit in self.done:  # done again for somebody else's sake
            return
        self.done.add(unit)
        self.num_done += len(unit)
        self.tokens_done += sum(self.num_of[key] for key in unit)
        for name in COUNTS:
            self.counts[name] += int(row[name])
        if self.progress is not None:
            done, encoded = (self.num_done, len(self.num_of), self.tokens_done), self.counts["encoded_tokens"]
            self.progress(WarmProgress(*done, self.num_tokens, encoded, self.seconds))


def _ray() -> Any:
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise ImportError("warming on a cluster needs Ray: pip install 'kvboost-rag[ray]'") from error
    return ray
