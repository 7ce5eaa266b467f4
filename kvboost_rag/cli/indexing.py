"""From source texts to chunks in the store, each encoded after its nearest neighbours."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvboost_rag.cli.console import console, progress_bar, seconds_text
from kvboost_rag.indexing.corpus import Corpus, SourceText, is_gone, is_lasting

if TYPE_CHECKING:
    from kvboost_rag.datamodels import WarmReport
    from kvboost_rag.engine import KVBoost
    from kvboost_rag.indexing.warm import WarmProgress


@dataclass(frozen=True)
class ChunkPlan:
    """How texts become chunks; `neighbours` None is what the engine says, `encode` False leaves encoding to others."""

    chunk_tokens: int = 256
    neighbours: int | None = None
    encode: bool = True


@dataclass(frozen=True)
class IndexReport:
    """What indexing did: the warming report, and the chunks dropped since their text is in no source any more."""

    warm: WarmReport
    num_sources: int
    num_dropped: int


def index_sources(
    engine: KVBoost,
    sources: Sequence[SourceText],
    plan: ChunkPlan,
    gone: Sequence[str] = (),
) -> IndexReport:
    """Chunk and warm. Idempotent: what is stored stays, what changed is replaced, what is gone is dropped.

    Args:
        gone: source ids that are to be forgotten (`gone_of`); unknown ones are passed over.
    """
    from kvboost_rag.indexing.source_texts import SourceTexts

    chunks = split_sources(engine.tokens.count, sources, plan.chunk_tokens)
    neighbours = (engine.encoding.neighbours or 0) if plan.neighbours is None else plan.neighbours
    ready = {source: SourceTexts(group) for source, group in chunks.items()}
    dropped = engine.index.delete_many(gone)
    with encoding_bar() as show:
        report = engine.index.add_many(ready, neighbours=neighbours, progress=show, encode=plan.encode)
    return IndexReport(report.warm, len(sources), dropped + report.num_forgotten)


def split_sources(
    count: Callable[[str], int], sources: Sequence[SourceText], chunk_tokens: int
) -> dict[str, list[str]]:
    """Chunk texts of each source, in order."""
    from kvboost_rag.indexing.chunking import FixedChunker

    if not sources:  # a bar needs something to count
        return {}
    chunker = FixedChunker(count, chunk_tokens=chunk_tokens)
    chunks: dict[str, list[str]] = {}
    with progress_bar("{task.completed:.0f}/{task.total:.0f} files") as bar:
        for source in bar.track(sources, description="chunking"):
            chunks[source.source] = [chunk.text for chunk in chunker.split(source.text) if chunk.text.strip()]
    return chunks


def gone_of(known: Sequence[str], read: Sequence[str], empty: Sequence[str], below: Sequence[Path]) -> list[str]:
    """Those of the known sources below the folders that have no text any more; what is out of reach is kept.

    Args:
        read: sources that have text.
        empty: files that are there and have none.
        below: folders that were read.
    """
    folders = tuple(os.path.realpath(folder) + os.sep for folder in below)
    present, without = set(read), set(empty)
    return [
        source
        for source in known
        if source not in present and source.startswith(folders) and (source in without or is_gone(source))
    ]


def empty_sources(corpus: Corpus) -> list[str]:
    """Files that are there and hold no text (any more); one that cannot be read at the moment is none of them."""
    return [source for source, fault in corpus.skipped if is_lasting(fault)]


@contextmanager
def encoding_bar() -> Iterator[Callable[[WarmProgress], None]]:
    """A progress bar for encoding; after Ctrl-C closing the engine waits for the chunk that is being encoded."""
    with progress_bar("{task.fields[rate]}", "{task.fields[left]}") as bar:
        task = bar.add_task("encoding", total=None, rate="", left="")

        def show(state: WarmProgress) -> None:
            eta = state.eta_seconds
            bar.update(
                task,
                total=state.num_chunks,
                completed=state.num_done,
                rate=f"{state.tokens_per_second:,.0f} tokens/s" if state.encoded_tokens else "",
                left=f"{seconds_text(eta)} left" if eta else "",
            )

        try:
            yield show
        except KeyboardInterrupt:
            console.print("stopping after this chunk; run the command again to go on from here")
            raise
