"""`kvboost-rag plan`: what reuse will need and save here, before anything is warmed."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvboost_rag.cli import options
from kvboost_rag.cli.console import bytes_text, console, progress_bar, seconds_text

if TYPE_CHECKING:
    from kvboost_rag.engine import KVBoost
    from kvboost_rag.stores import DiskStore
    from kvboost_rag.stores.cost import Plan

SAMPLES = 4
"""Chunks that are encoded, written and read for the measurement."""


@dataclass(frozen=True)
class Corpus:
    """What is to be warmed: its size, that of a mean chunk and its encoding context, and text to measure with."""

    num_tokens: int
    num_chunks: int
    sample: str
    context_tokens: int = 0

    @property
    def chunk_tokens(self) -> int:
        return max(1, round(self.num_tokens / self.num_chunks))


@dataclass(frozen=True)
class Measured:
    """What chunks cost on this machine: context included in the tokens a second, verification in the bytes."""

    bytes_per_token: float
    encode_tokens_per_second: float
    load_bytes_per_second: float


def plan(
    paths: Annotated[list[Path] | None, typer.Argument(help="The corpus: files, and folders of them.")] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Size of the corpus, if there are no files to read.")
    ] = None,
    model: options.Model = options.DEFAULT_MODEL,
    store: options.Store = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    chunk_tokens: options.ChunkTokens = 256,
    neighbours: options.Neighbours = None,
    quantization: Annotated[
        str | None, typer.Option(help="none, k8v8 or k8v4. Default: what calibration chose, else none.")
    ] = None,
    memory_budget: options.MemoryBudget = None,
    disk_budget: options.DiskBudget = None,
) -> None:
    """Measure this machine and model, and say what a corpus will need: bytes, time to warm, load or recompute.

    Nothing is kept: the measurement uses a few chunks in a temporary folder beside the store.

    Example: kvboost-rag plan docs --chunk-tokens 256
    """
    from kvboost_rag.cli.model_choice import ModelChoice
    from kvboost_rag.cli.session import load
    from kvboost_rag.config import EncodingConfig
    from kvboost_rag.engine import KVBoost
    from kvboost_rag.indexing.corpus import CorpusError

    if (tokens is None) == (not paths):
        raise CorpusError("say what to plan for: files and folders, or --tokens N")
    kept, encoding = (
        options.StoreChoice.of(store, memory_budget, disk_budget),
        EncodingConfig(quantization=quantization, neighbours=neighbours),
    )
    texts = _read(paths or [])
    with KVBoost(load(ModelChoice(model, dtype, device)), encoding=encoding) as engine:
        if not engine.probe.reusable:
            raise CorpusError(f"{model} cannot be warmed: {engine.probe.reason}")
        corpus = _with_context(engine, _size_of(engine, texts, tokens, chunk_tokens))
        with _scratch_store(kept.folder) as disk, progress_bar() as bar:
            bar.add_task("measuring", total=None)
            measured = _measure(engine, disk, corpus)
        times = engine.encoding.contexts or 1
        alone = _leads(engine) * (len(engine.registry.identity.anchor_ids) + corpus.chunk_tokens)
    # Each context has a forward of its own.
    forwarded = times * corpus.context_tokens + (times - 1) * corpus.chunk_tokens + alone
    _print(replace(corpus, context_tokens=forwarded), measured, kept)


def _leads(engine: KVBoost) -> bool:
    """Whether chunks are stored as they are after the anchor alone, too."""
    return engine.registry.identity.leading and bool(engine.encoding.neighbours)


def _read(paths: list[Path]) -> list[str]:
    from kvboost_rag.indexing.corpus import CorpusError, read_paths

    if not paths:
        return []
    found = read_paths(paths)
    if not found.texts:
        raise CorpusError(f"no text files in {', '.join(map(str, paths))}")
    return [text.text for text in found.texts]


def _size_of(engine: KVBoost, texts: list[str], tokens: int | None, chunk_tokens: int) -> Corpus:
    from kvboost_rag.indexing.chunking import FixedChunker

    if tokens is not None:
        sample = "The store holds keys and values of every document. "
        return Corpus(tokens, -(-tokens // chunk_tokens), sample)
    chunker = FixedChunker(engine.tokens.count, chunk_tokens=chunk_tokens)
    chunks = list(dict.fromkeys(chunk.text for text in texts for chunk in chunker.split(text)))
    return Corpus(sum(engine.tokens.count(chunk) for chunk in chunks), len(chunks), " ".join(chunks[:8]))


def _with_context(engine: KVBoost, corpus: Corpus) -> Corpus:
    """With the tokens in front of a chunk while it is encoded, as far as the model's context has room."""
    identity, limit = engine.registry.identity, engine.registry.max_chunk_tokens
    behind = (engine.encoding.neighbours or 0) * (corpus.chunk_tokens + len(identity.separator_ids))
    if limit is not None:
        behind = max(0, min(behind, limit - corpus.chunk_tokens))
    return replace(corpus, context_tokens=len(identity.anchor_ids) + behind)


@contextmanager
def _scratch_store(folder: Path) -> Iterator[DiskStore]:
    """A store on the same disk that is gone afterwards."""
    from kvboost_rag.stores import DiskStore
    from kvboost_rag.stores.budget import UNLIMITED

    with tempfile.TemporaryDirectory(prefix=".kvboost-plan-", dir=_nearest_folder(folder)) as scratch:
        disk = DiskStore(scratch, UNLIMITED)
        try:
            yield disk
        finally:
            disk.close()


def _nearest_folder(folder: Path) -> Path:
    """`folder`, or what exists above it."""
    return next(p for p in (folder.absolute(), *folder.absolute().parents) if p.is_dir())


def _measure(engine: KVBoost, disk: DiskStore, corpus: Corpus) -> Measured:
    """Encode a few chunks of the planned size after a context of the planned size, write them and read them."""
    from kvboost_rag.chunks.fetched import leading_parts
    from kvboost_rag.datamodels import StoreEntry
    from kvboost_rag.encode.encoder import EncodingJob
    from kvboost_rag.kv import quantization
    from kvboost_rag.kv.keys import content_hash
    from kvboost_rag.stores.cost import measure_load_speed

    encoder, fetcher = engine.fetcher.encoder, engine.fetcher
    if encoder is None:
        raise RuntimeError("the model was refused")
    chunk_tokens, context = corpus.chunk_tokens, corpus.context_tokens
    once = engine.tokens.document_ids(corpus.sample)
    ids = (once * (1 + (context + chunk_tokens + SAMPLES) // len(once)))[: context + chunk_tokens + SAMPLES]
    encoder.encode(EncodingJob(ids[:chunk_tokens], ()))  # the first forward of a process also pays for buffers
    seconds = []
    for number in range(SAMPLES):
        job = EncodingJob(ids[number : number + chunk_tokens], ids[number + chunk_tokens :][:context])
        start = time.perf_counter()
        kv = encoder.encode(job)
        tensors, meta = quantization.encode(kv, fetcher.identity.quantization)
        tensors |= leading_parts(kv)[0] if _leads(engine) else {}
        encoder.synchronise()
        seconds.append(time.perf_counter() - start)
        key = content_hash(engine.registry.fingerprint, "", (number, *job.token_ids))
        disk.put(StoreEntry(key, "", engine.registry.fingerprint, job.token_ids, "", tensors, meta))
    num_bytes = sum(disk.bytes_held.values())
    _drop_page_cache(disk)
    speed = measure_load_speed(disk, SAMPLES)
    if not speed:
        raise OSError(f"{disk.folder.root} could not be written to: {dict(disk.stats.put_failures)}")
    return Measured(num_bytes / SAMPLES / chunk_tokens, (chunk_tokens + context) / min(seconds), speed)


def _drop_page_cache(disk: DiskStore) -> None:
    """Make the next reads come from the disk, where the system lets a program ask for that."""
    if not hasattr(os, "posix_fadvise"):
        return
    for key in list(disk.keys()):
        with disk.folder.path(key).open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _print(corpus: Corpus, measured: Measured, kept: options.StoreChoice) -> None:
    from kvboost_rag.stores.budget import DEFAULT_RATIO, disk_budget, host_memory_bytes, resolve_budget
    from kvboost_rag.stores.cost import plan as compute

    found = compute(
        bytes_per_token=measured.bytes_per_token,
        corpus_tokens=corpus.num_tokens,
        chunk_tokens=corpus.chunk_tokens,
        context_tokens=corpus.context_tokens,
        load_bytes_per_second=measured.load_bytes_per_second,
        encode_tokens_per_second=measured.encode_tokens_per_second,
    )
    memory = resolve_budget(kept.memory_bytes, DEFAULT_RATIO, host_memory_bytes())
    disk = disk_budget(kept.disk_bytes, DEFAULT_RATIO, _nearest_folder(kept.folder))
    lines = [
        f"corpus     {corpus.num_tokens:,} tokens in {corpus.num_chunks:,} chunks of {corpus.chunk_tokens:,}",
        f"needs      {bytes_text(found.corpus_bytes)} ({bytes_text(found.bytes_per_token)} a token): "
        f"{_share(found.corpus_bytes, memory, 'memory')}, {_share(found.corpus_bytes, disk, 'disk')}",
        f"warming    {seconds_text(found.warm_seconds)} at {measured.encode_tokens_per_second:,.0f} tokens/s, "
        f"{corpus.context_tokens:,} tokens of encoding context a chunk included",
        f"a chunk    {seconds_ms(found.load_seconds)} to load from disk "
        f"({bytes_text(measured.load_bytes_per_second)}/s), {seconds_ms(found.encode_seconds)} to encode",
        f"break-even {_break_even(found)}",
    ]
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)


def _share(need: int, budget: int, tier: str) -> str:
    if need <= budget:
        return f"fits into the {tier} budget of {bytes_text(budget)}"
    return f"{budget / need:.0%} of it fits into the {tier} budget of {bytes_text(budget)}"


def _break_even(found: Plan) -> str:
    verdict = "loading from disk pays" if found.loading_pays else "computing again is faster than this disk"
    return f"at {bytes_text(found.break_even_bytes_per_second)}/s of load bandwidth: {verdict}"


def seconds_ms(seconds: float) -> str:
    """Milliseconds below a second."""
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else seconds_text(seconds)
