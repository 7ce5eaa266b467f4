"""Pre-warming: compute and store the KV of documents before anybody asks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from kvboost_rag.chunks.fetcher import ChunkFetcher
from kvboost_rag.chunks.registry import ChunkRegistry
from kvboost_rag.datamodels import ChunkRecord, WarmReport
from kvboost_rag.prompt.segments import canonical_text
from kvboost_rag.stores.maintenance import set_contexts

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class WarmProgress:
    """Where a warming job stands; tokens are chunk tokens, encoding contexts not counted."""

    num_done: int
    num_chunks: int
    tokens_done: int
    num_tokens: int
    encoded_tokens: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Tokens forwarded (contexts included) per second so far."""
        return self.encoded_tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def eta_seconds(self) -> float | None:
        """Estimated seconds left, or None before the first chunk is done."""
        if not self.tokens_done or not self.seconds:
            return None
        return self.seconds * (self.num_tokens - self.tokens_done) / self.tokens_done


@dataclass
class _Tally:
    start: float = field(default_factory=time.perf_counter)
    encoded: int = 0
    stored: int = 0
    failed: int = 0
    tokens: int = 0
    encoded_tokens: int = 0
    encoded_chunk_tokens: int = 0
    num_bytes: int = 0


def neighbour_choice(
    neighbours: Literal["auto"] | int | Sequence[Sequence[Any]] | None, default: int
) -> tuple[int, Sequence[Sequence[str]] | None]:
    """How many neighbours are to be found for each document, and the neighbours that the caller gave.

    Raises:
        TypeError, ValueError: it is neither `auto`, a number, None, nor a list of lists of texts.
    """
    if neighbours is None:
        return 0, None
    if isinstance(neighbours, str):
        if neighbours != "auto":
            raise ValueError(f"neighbours={neighbours!r}: expected auto, a number, None, or texts for each document")
        return default, None
    if isinstance(neighbours, int):
        if isinstance(neighbours, bool) or neighbours < 0:
            raise ValueError(f"neighbours={neighbours!r}: expected 0 or more")
        return neighbours, None
    if any(isinstance(texts, str) for texts in neighbours):
        raise TypeError("neighbours must be a list of texts for each document, got one str; write [[text]]")
    return 0, neighbours


def register_documents(
    registry: ChunkRegistry, documents: Sequence[str], neighbours: Sequence[Sequence[str]] | None, namespace: str
) -> list[ChunkRecord]:
    """Make documents known, each with its encoding context; nothing is encoded yet.

    Args:
        documents: chunk texts; white space around them does not count, repeats are one chunk.
        neighbours: for each document the texts to encode it after, nearest last, or several lists of such texts for
            several contexts. Neighbours that are not among the documents become known chunks too. Only as many as fit
            in front of the chunk are used, nearest first.

    Raises:
        TypeError, ValueError: a document is not text, empty, or longer than the model's context; says which.
    """
    if isinstance(documents, str):
        raise TypeError("documents must be a list of texts, got one str; write [text]")
    if neighbours is not None and len(neighbours) != len(documents):
        raise ValueError(f"neighbours are given for {len(neighbours)} of {len(documents)} documents")
    described = [_describe(registry, text, f"documents[{i}]", namespace) for i, text in enumerate(documents)]
    registry.store.refresh()  # or what others deleted before would take along what is made known now
    if neighbours is None:
        return registry.store.catalog.add_many(described)
    behind = [
        [
            [_describe(registry, text, f"neighbours[{i}]", namespace) for text in texts if canonical_text(text)]
            for texts in _contexts_of(given)
        ]
        for i, given in enumerate(neighbours)
    ]
    # First everybody without context, so that neighbours may name each other; then the contexts.
    catalog = registry.store.catalog
    catalog.add_many([*described, *(n for contexts in behind for group in contexts for n in group)])
    known = catalog.get_many(r.content_hash for r in described)
    given = {r.content_hash: (r, c) for r, c in zip(described, behind, strict=True)}.values()
    wanted = [registry.with_contexts(record, contexts) for record, contexts in given]
    set_contexts(registry.store, [r for r in wanted if r.contexts != known[r.content_hash].contexts])
    found = catalog.get_many(r.content_hash for r in described)
    return [found[r.content_hash] for r in described]


def _contexts_of(given: Sequence[Any]) -> Sequence[Sequence[str]]:
    """The contexts that were given for one document: texts are one context, lists of texts are several."""
    return given if given and not isinstance(given[0], str) else [given]


def _describe(registry: ChunkRegistry, text: str, what: str, namespace: str) -> ChunkRecord:
    if not isinstance(text, str):
        raise TypeError(f"{what} is a {type(text).__name__}; expected a str")
    try:
        record = registry.describe(text, namespace)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None
    room = registry.max_chunk_tokens
    if room is not None and len(record.token_ids) > room:
        raise ValueError(
            f"{what} has {len(record.token_ids)} tokens, the model's context has room for {room}; split it"
        )
    return record


def warm(
    fetcher: ChunkFetcher,
    records: Sequence[ChunkRecord],
    progress: Callable[[WarmProgress], None] | None = None,
    stop: Callable[[], bool] = lambda: False,
    run: Callable[[Callable[[], None]], None] = lambda step: step(),
) -> WarmReport:
    """Encode the chunks that are not stored yet. Idempotent and resumable: what is stored is left alone.

    Args:
        records: registered chunks.
        progress: called after each batch (a batch is one chunk, unless the engine encodes several in one forward).
        stop: asked before each batch; True ends the job early (what is done stays).
        run: runs one batch, for example in an engine's worker, where requests may come in between.
    """
    distinct = list({r.content_hash: r for r in records}.values())
    num_tokens = sum(len(r.token_ids) for r in distinct)
    tally, done = _Tally(), 0
    for batch in forwards(distinct, fetcher.identity.batch_size):
        if stop():
            break
        run(partial(_warm_batch, fetcher, batch, tally))
        tally.tokens += sum(len(r.token_ids) for r in batch)
        if progress is not None:
            done, seconds = done + len(batch), time.perf_counter() - tally.start
            progress(WarmProgress(done, len(distinct), tally.tokens, num_tokens, tally.encoded_tokens, seconds))
    fetcher.store.flush()
    return WarmReport(
        num_chunks=len(distinct),
        num_encoded=tally.encoded,
        num_already_stored=tally.stored,
        num_failed=tally.failed,
        chunk_tokens=num_tokens,
        encoded_tokens=tally.encoded_tokens,
        num_bytes=tally.num_bytes,
        seconds=time.perf_counter() - tally.start,
        content_hashes=tuple(r.content_hash for r in records),
        encoded_chunk_tokens=tally.encoded_chunk_tokens,
    )


def nothing_warmed(num_chunks: int, reason: str | None) -> WarmReport:
    """About chunks of a model whose KV cannot be reused."""
    logger.warning("nothing was warmed: %s", reason)
    return WarmReport(num_chunks, 0, 0, num_chunks, 0, 0, 0, 0.0)


def nothing_encoded(records: Sequence[ChunkRecord]) -> WarmReport:
    """About chunks that were only made known."""
    distinct = {r.content_hash: len(r.token_ids) for r in records}
    hashes = tuple(r.content_hash for r in records)
    return WarmReport(len(distinct), 0, 0, 0, sum(distinct.values()), 0, 0, 0.0, hashes)


def forwards(records: Sequence[ChunkRecord], batch_size: int = 1) -> list[list[ChunkRecord]]:
    """Distinct records by the forward that encodes them: groups of chunks after each other, else `batch_size` each.

    Of a group some may be missing (stored already): any beginnings of the same chain go together.
    """
    home: dict[tuple[int, tuple[str, ...]], list[ChunkRecord]] = {}
    groups: list[list[ChunkRecord]] = []
    single = [r for r in records if not r.forward_tokens]
    # The longest first: it names all that stand before it.
    for record in sorted((r for r in records if r.forward_tokens), key=lambda r: -len(r.contexts[0])):
        chain = (*record.contexts[0], record.content_hash)
        if (record.forward_tokens, chain) not in home:
            groups.append([])
            for end in range(1, len(chain) + 1):
                home.setdefault((record.forward_tokens, chain[:end]), groups[-1])
        home[record.forward_tokens, chain].insert(0, record)
    place = {r.content_hash: i for i, r in enumerate(records)}
    batches = [single[start : start + batch_size] for start in range(0, len(single), batch_size)]
    filled = [group for group in groups if group]
    return sorted([*filled, *batches], key=lambda batch: min(place[r.content_hash] for r in batch))


def _warm_batch(fetcher: ChunkFetcher, batch: Sequence[ChunkRecord], tally: _Tally) -> None:
    missing = [r for r in batch if not fetcher.holds(r)]
    tally.stored += len(batch) - len(missing)
    for fetched in fetcher.encode_many(missing):
        tally.encoded += fetched.kept
        tally.failed += not fetched.kept
        tally.encoded_tokens += fetched.encoded_tokens
        tally.encoded_chunk_tokens += len(fetched.record.token_ids)
        tally.num_bytes += fetched.num_bytes
