"""From source texts to chunks in the store, each encoded behind its nearest neighbours."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvboost_rag.cli.console import console, progress_bar, seconds_text
from kvboost_rag.corpus import SourceText

if TYPE_CHECKING:
    from kvboost_rag.datamodels import WarmReport
    from kvboost_rag.engine import KVBoost
    from kvboost_rag.retrieval import RememberedVectors, Vectors
    from kvboost_rag.warm import WarmProgress


class Stopped(RuntimeError):
    """The user ended a job."""


@dataclass(frozen=True)
class ChunkPlan:
    """How texts become chunks."""

    chunk_tokens: int = 256
    neighbours: int = 4


@dataclass(frozen=True)
class IndexReport:
    """What indexing did: the warming report, and the chunks dropped since their text is in no source any more."""

    warm: WarmReport
    num_sources: int
    num_dropped: int


def open_embedder() -> RememberedVectors:
    """The embedding model, with the vectors of earlier runs."""
    from kvboost_rag.config import cache_dir
    from kvboost_rag.retrieval import MiniLM, RememberedVectors

    return RememberedVectors(cache_dir() / "embeddings.sqlite", MiniLM())


def index_sources(
    engine: KVBoost,
    embedder: RememberedVectors,
    sources: Sequence[SourceText],
    plan: ChunkPlan,
    below: Sequence[Path] = (),
) -> IndexReport:
    """Chunk, embed and warm. Idempotent: what is stored stays, what changed is replaced, what is gone is dropped.

    Args:
        below: folders that were read; files below them that are gone from disk are dropped.
    """
    chunks = _split(engine, sources, plan)
    dropped = _settle_sources(engine, chunks, below)
    texts = list(dict.fromkeys(text for group in chunks.values() for text in group))
    vectors = _embed(embedder, texts) if plan.neighbours and texts else None
    return IndexReport(_warm(engine, texts, vectors, plan.neighbours), len(sources), dropped)


def _split(engine: KVBoost, sources: Sequence[SourceText], plan: ChunkPlan) -> dict[str, list[str]]:
    from kvboost_rag.chunking import FixedChunker

    chunker = FixedChunker(engine.tokens.count, chunk_tokens=plan.chunk_tokens)
    chunks: dict[str, list[str]] = {}
    with progress_bar("{task.completed:.0f}/{task.total:.0f} files") as bar:
        for source in bar.track(sources, description="chunking"):
            chunks[source.source] = [chunk.text for chunk in chunker.split(source.text)]
    return chunks


def _settle_sources(engine: KVBoost, chunks: dict[str, list[str]], below: Sequence[Path]) -> int:
    """Note which chunks each source has now, and forget those that no source has any more. Returns how many."""
    catalog, namespace = engine.store.catalog, engine.config.namespace
    orphans: list[str] = []
    for source, texts in chunks.items():
        keys = [engine.library.describe(text, namespace).content_hash for text in texts]
        orphans += catalog.link(engine.library.fingerprint, namespace, source, keys)
    folders = [os.path.realpath(folder) + os.sep for folder in below]
    for _, source in catalog.sources(namespace):
        if source not in chunks and any(map(source.startswith, folders)) and not os.path.exists(source):
            orphans += catalog.unlink(namespace, source)
    held = catalog.get_many(key for key in orphans if not catalog.sources_of(key))
    return engine.evict([record.text for record in held.values()]) if held else 0


def _embed(embedder: RememberedVectors, texts: list[str]) -> Vectors:
    with progress_bar("{task.completed}/{task.total} chunks") as bar:
        task = bar.add_task("embedding", total=len(texts))
        vectors = embedder.embed(texts, lambda done, _: bar.update(task, completed=done))
        bar.update(task, completed=len(texts))
    return vectors


def _warm(engine: KVBoost, texts: list[str], vectors: Vectors | None, neighbours: int) -> WarmReport:
    stopped = False
    with progress_bar("{task.fields[rate]}", "{task.fields[left]}") as bar:
        task = bar.add_task("encoding", total=None, rate="", left="")

        def show(state: WarmProgress) -> None:
            if stopped:
                raise Stopped
            eta = state.eta_seconds
            bar.update(
                task,
                total=state.num_chunks,
                completed=state.num_done,
                rate=f"{state.tokens_per_second:,.0f} tokens/s" if state.encoded_tokens else "",
                left=f"{seconds_text(eta)} left" if eta else "",
            )

        try:
            return engine.warm(texts, neighbours=neighbours, embeddings=vectors, progress=show)
        except KeyboardInterrupt:
            stopped = True
            console.print("stopping after this chunk; run the command again to go on from here")
            raise
