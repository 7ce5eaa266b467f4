"""`kvboost-rag warm`: encode documents before anybody asks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvboost_rag.cli import options
from kvboost_rag.cli.console import bytes_text, console, seconds_text

if TYPE_CHECKING:
    from kvboost_rag.cli.indexing import ChunkPlan, IndexReport
    from kvboost_rag.cli.jobs import JobState
    from kvboost_rag.cli.model_choice import ModelChoice
    from kvboost_rag.cli.options import StoreChoice
    from kvboost_rag.config import EncodingConfig
    from kvboost_rag.datamodels import ChunkRecord, WarmReport
    from kvboost_rag.engine import KVBoost
    from kvboost_rag.indexing.corpus import Corpus
    from kvboost_rag.indexing.ray import ActorPool


def warm(
    paths: Annotated[list[Path], typer.Argument(help="Text, Markdown or code files, and folders of them.")],
    model: options.Model = options.DEFAULT_MODEL,
    store: options.Store = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    namespace: options.Namespace = "",
    chunk_tokens: options.ChunkTokens = 256,
    neighbours: options.Neighbours = None,
    groups: Annotated[
        bool, typer.Option("--groups", help="Encode new chunks in groups of similar ones: five times as fast, cruder.")
    ] = False,
    jobs: Annotated[
        int, typer.Option("--jobs", "-j", min=1, help="Processes, each with its own model; with GPUs one on each.")
    ] = 1,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Encode in --jobs actors of a Ray cluster: its address, auto, or local for a new one.",
        ),
    ] = None,
    actor_gpus: Annotated[
        float, typer.Option(min=0, callback=options.finite, help="With --ray: GPUs of an actor; 0.5 puts two on one.")
    ] = 0.0,
    actor_cpus: Annotated[
        float, typer.Option(min=0, callback=options.finite, help="With --ray: CPUs of an actor.")
    ] = 1.0,
    shard: Annotated[
        str | None,
        typer.Option(help="Encode only part I of N, such as 0/8: for machines with the same files and a shared store."),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Go on, and keep the store in step with the files.")] = False,
    interval: Annotated[
        float,
        typer.Option(min=0.1, max=86_400, callback=options.finite, help="Seconds between two looks with --watch."),
    ] = 2.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done; loads no weights.")] = False,
    memory_budget: options.MemoryBudget = None,
    disk_budget: options.DiskBudget = None,
    metrics_port: options.MetricsPort = None,
) -> None:
    """Chunk files and store the KV of every chunk.

    Can be stopped and run again: what is stored is left alone, files that changed are done anew, and the chunks of
    files that are gone are dropped.

    Example: kvboost-rag warm docs README.md
    """
    from kvboost_rag.cli.dry_run import dry_run as preview
    from kvboost_rag.cli.indexing import ChunkPlan
    from kvboost_rag.cli.model_choice import ModelChoice
    from kvboost_rag.cli.watch import FolderWatch
    from kvboost_rag.config import EncodingConfig
    from kvboost_rag.indexing.chunking import FixedChunker
    from kvboost_rag.indexing.corpus import read_paths

    FixedChunker(len, chunk_tokens)  # refuses a size that does not exist, before a model is loaded
    part = _shard(shard, jobs > 1 or watch or ray is not None)
    chosen = options.StoreChoice.of(store, memory_budget, disk_budget)
    folders = FolderWatch(paths)  # before reading, so that no change is missed in between
    corpus = read_paths(paths)
    _check(corpus, paths, watch)
    plan, encoding = ChunkPlan(chunk_tokens, neighbours), EncodingConfig(neighbours=neighbours, groups=groups)
    job = WarmJob(ModelChoice(model, dtype, device), chosen, namespace, plan, encoding, metrics_port)
    if dry_run:
        preview(job.model, chosen, namespace, corpus, plan, _folders(paths))
        return
    if part is not None:
        _one_shard(job, corpus, paths, *part)
        return
    if ray is not None:
        from kvboost_rag.indexing.ray import ActorPool

        _on_ray(job, corpus, paths, ActorPool(jobs, actor_gpus, actor_cpus, ray))
    elif jobs > 1:
        _in_processes(job, corpus, paths, jobs)
    if not watch and (ray is not None or jobs > 1):
        return
    _here(job, corpus, paths, folders if watch else None, interval)


@dataclass(frozen=True)
class WarmJob:
    """What the options ask for."""

    model: ModelChoice
    store: StoreChoice
    namespace: str
    plan: ChunkPlan
    encoding: EncodingConfig
    metrics_port: int | None


def _check(corpus: Corpus, paths: list[Path], watch: bool) -> None:
    from kvboost_rag.indexing.corpus import CorpusError

    for path, fault in corpus.skipped:
        console.print(f"skipped    {path} {fault}", highlight=False)
    if not corpus.texts and not watch:
        raise CorpusError(f"no text files in {', '.join(str(path) for path in paths)}")


def _here(job: WarmJob, corpus: Corpus, paths: list[Path], folders: object, interval: float) -> None:
    from kvboost_rag.cli.indexing import empty_sources, gone_of, index_sources
    from kvboost_rag.cli.session import open_engine
    from kvboost_rag.cli.watch import Changes, FolderWatch, watch
    from kvboost_rag.indexing.corpus import read_files

    with open_engine(job.model, job.store, job.namespace, job.metrics_port, job.encoding) as engine:
        _refuse_unusable(engine)
        gone = gone_of(engine.index.sources(), [t.source for t in corpus.texts], empty_sources(corpus), _folders(paths))
        _print(index_sources(engine, corpus.texts, job.plan, gone))

        def apply(changes: Changes) -> None:
            changed = read_files(changes.changed.values())
            for path, fault in changed.skipped:
                console.print(f"skipped    {path} {fault}", highlight=False)
            lost = [*changes.gone, *empty_sources(changed)]
            _print(index_sources(engine, changed.texts, job.plan, lost))

        if isinstance(folders, FolderWatch):
            watch(folders, apply, interval)


def _shard(text: str | None, with_others: bool) -> tuple[int, int] | None:
    """`I/N` as numbers."""
    from kvboost_rag.config import ConfigError

    if text is None:
        return None
    if with_others:
        raise ConfigError("--shard goes with neither --jobs, --ray nor --watch: start one process for each shard")
    index, _, number = text.partition("/")
    if not (index.isdecimal() and number.isdecimal() and int(index) < int(number)):
        raise ConfigError(f"--shard {text!r}: expected I/N with I from 0 to N - 1, such as 0/8")
    return int(index), int(number)


def _one_shard(job: WarmJob, corpus: Corpus, paths: list[Path], index: int, number: int) -> None:
    """All machines make all documents known and so choose the same contexts; each encodes its part of the chunks."""
    from kvboost_rag.cli.indexing import empty_sources, encoding_bar, gone_of, index_sources
    from kvboost_rag.cli.session import open_engine
    from kvboost_rag.indexing.warm import forwards
    from kvboost_rag.indexing.warm import warm as encode

    with open_engine(job.model, job.store, job.namespace, job.metrics_port, job.encoding) as engine:
        _refuse_unusable(engine)
        gone = gone_of(engine.index.sources(), [t.source for t in corpus.texts], empty_sources(corpus), _folders(paths))
        report = index_sources(engine, corpus.texts, replace(job.plan, encode=False), gone)
        records = engine.store.catalog.get_many(report.warm.content_hashes)
        # By hash, so that a shard's part does not depend on what is stored already.
        mine = [g for g in forwards(list(records.values())) if int(g[0].content_hash[:12], 16) % number == index]
        with encoding_bar() as show:
            done = encode(engine.fetcher, [record for group in mine for record in group], show)
        _print(replace(report, warm=done))


def _in_processes(job: WarmJob, corpus: Corpus, paths: list[Path], num_jobs: int) -> None:
    from kvboost_rag.cli.jobs import encode_in_processes, jobs_bar, worker_specs
    from kvboost_rag.indexing.warm import forwards

    report, missing = _made_known(job, corpus, paths)
    specs = worker_specs(job.model, job.store, job.namespace, job.encoding, num_jobs)
    units = [tuple(record.content_hash for record in group) for group in forwards(missing)]
    with jobs_bar() as show:
        state = encode_in_processes(specs, units, show)
    _print(_with_encoded(report, len(missing), state))


def _on_ray(job: WarmJob, corpus: Corpus, paths: list[Path], pool: ActorPool) -> None:
    from kvboost_rag.cli.indexing import encoding_bar
    from kvboost_rag.cli.session import open_engine
    from kvboost_rag.indexing.ray import connected, encode_on_ray

    with connected(pool):  # before the model: a cluster that cannot be reached shows at once
        report, missing = _made_known(job, corpus, paths)
        opening = partial(open_engine, job.model, job.store, job.namespace, encoding=job.encoding)
        with encoding_bar() as show:
            done = encode_on_ray(opening, missing, pool, show)
    _print(_with_encoded(report, len(missing), done))


def _made_known(job: WarmJob, corpus: Corpus, paths: list[Path]) -> tuple[IndexReport, list[ChunkRecord]]:
    """Contexts are chosen here, with a model of which only tokenizer and fingerprint are needed; then it is let go.

    Returns:
        What indexing did, and the chunks that are left to be encoded.
    """
    from kvboost_rag.cli.indexing import empty_sources, gone_of, index_sources
    from kvboost_rag.cli.session import open_engine

    with open_engine(job.model, job.store, job.namespace, job.metrics_port, job.encoding) as engine:
        _refuse_unusable(engine)
        gone = gone_of(engine.index.sources(), [t.source for t in corpus.texts], empty_sources(corpus), _folders(paths))
        report = index_sources(engine, corpus.texts, replace(job.plan, encode=False), gone)
        keys = dict.fromkeys(report.warm.content_hashes)
        return report, list(engine.store.catalog.get_many(key for key in keys if key not in engine.store).values())


def _with_encoded(report: IndexReport, num_missing: int, done: JobState | WarmReport) -> IndexReport:
    """With what others encoded of the chunks that were missing."""
    warm = replace(
        report.warm,
        num_encoded=done.num_encoded,
        num_already_stored=report.warm.num_chunks - num_missing + done.num_already_stored,
        num_failed=done.num_failed,
        encoded_tokens=done.encoded_tokens,
        encoded_chunk_tokens=done.encoded_chunk_tokens,
        num_bytes=done.num_bytes,
        seconds=done.seconds,
    )
    return replace(report, warm=warm)


def _folders(paths: list[Path]) -> list[Path]:
    return [path for path in paths if path.is_dir()]


def _refuse_unusable(engine: KVBoost) -> None:
    from kvboost_rag.indexing.corpus import CorpusError

    if not engine.probe.reusable:
        raise CorpusError(f"{engine.name} cannot be warmed: {engine.probe.reason}")


def _print(report: IndexReport) -> None:
    from kvboost_rag.indexing.corpus import CorpusError

    done = report.warm
    rate = done.encoded_tokens / done.seconds if done.encoded_tokens and done.seconds else 0
    cost = done.encoded_tokens / done.encoded_chunk_tokens if done.encoded_chunk_tokens else 0
    console.print(
        f"{report.num_sources} files, {done.num_chunks} chunks, {done.chunk_tokens:,} tokens: "
        f"{done.num_encoded} encoded, {done.num_already_stored} stored already, {report.num_dropped} dropped; "
        f"{bytes_text(done.num_bytes)} written in {seconds_text(done.seconds)}"
        + (f" ({rate:,.0f} tokens/s, encoding contexts included)" if rate else "")
        + (f"; {cost:.1f} tokens forwarded per document token" if cost else ""),
        highlight=False,
    )
    if done.num_failed:
        raise CorpusError(f"{done.num_failed} chunks were not kept: the store's budget is used up")
