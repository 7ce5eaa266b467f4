"""What goes from lookup to decoding: the prompt, and for each of its segments where its keys and values come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvboost_rag.chunks.fetched import FetchedChunk
from kvboost_rag.datamodels import ChunkRecord, HitKind, Segment, SegmentKind
from kvboost_rag.models.hf_cache import BufferCache
from kvboost_rag.repair import RepairPlan


@dataclass(frozen=True)
class ServedSegment:
    """One segment of a prompt.

    Attributes:
        record: the chunk that a document is, None for everything else.
        chunk: its KV, once it was fetched.
        exact: its KV is stored as full prefill gave it.
        settled: a document in a part of the prompt that is served exactly, whatever its chunk is like.
    """

    segment: Segment
    record: ChunkRecord | None = None
    chunk: FetchedChunk | None = None
    exact: bool = False
    settled: bool = False

    @property
    def kind(self) -> SegmentKind:
        return self.segment.kind

    @property
    def start(self) -> int:
        return self.segment.start

    @property
    def end(self) -> int:
        return self.segment.end

    @property
    def hit(self) -> HitKind:
        """Where its KV comes from."""
        if self.chunk is not None:
            return self.chunk.hit
        return HitKind.EXACT if self.exact else HitKind.PREFILLED


@dataclass(frozen=True)
class ServedPrompt:
    """A prompt on its way from lookup to decoding. Each stage hands on a copy that says more.

    Attributes:
        token_ids: of the whole prompt.
        segments: it, in order.
        reuse: the mode that is really used.
        cache: over the buffer with everything in front of the rows still to compute, or None for plain prefill.
        plan: rows of the final pass, or None if only what lies after `cache.buffer.length` is to be computed.
        strategy: name of the one that chose the rows.
        exact_tokens: tokens taken from the exact path.
        created_tokens: tokens whose KV was computed and stored on the way.
        fallback_reason: why there is no reuse where there should have been.
    """

    token_ids: tuple[int, ...]
    segments: tuple[ServedSegment, ...]
    reuse: str = "off"
    cache: BufferCache | None = None
    plan: RepairPlan | None = None
    strategy: str = "none"
    exact_tokens: int = 0
    created_tokens: int = 0
    fallback_reason: str | None = None

    @classmethod
    def of(cls, segments: tuple[ServedSegment, ...]) -> ServedPrompt:
        """What lookup found, nothing prepared yet."""
        return cls(tuple(i for s in segments for i in s.segment.token_ids), segments)

    @property
    def documents(self) -> list[ServedSegment]:
        """Segments that are served from their chunks."""
        return [s for s in self.segments if s.record is not None and not s.settled]

    @property
    def num_document_tokens(self) -> int:
        return sum(s.end - s.start for s in self.documents)

    def of_kind(self, *kinds: SegmentKind) -> list[ServedSegment]:
        return [s for s in self.segments if s.kind in kinds]

    def settled_until(self, end: int) -> ServedPrompt:
        """With all documents that end by then served exactly."""
        segments = tuple(replace(s, settled=s.settled or s.end <= end) for s in self.segments)
        return replace(self, segments=segments)

    def with_chunks(self, fetched: Mapping[str, FetchedChunk]) -> ServedPrompt:
        """With the KV of its documents, by content hash."""
        segments = tuple(
            s if s.record is None or s.settled else replace(s, chunk=fetched[s.record.content_hash])
            for s in self.segments
        )
        return replace(self, segments=segments)

    def plain(self, reason: str | None = None) -> ServedPrompt:
        """The same prompt without reuse: decoding prefills all of it."""
        segments = tuple(ServedSegment(s.segment, s.record) for s in self.segments)
        return replace(ServedPrompt(self.token_ids, segments), fallback_reason=reason)
