"""One request's way from a located prompt to a buffer that decoding can start from."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from kvboost_rag.chunks import fetching
from kvboost_rag.chunks.donors import Donors
from kvboost_rag.chunks.library import FetchedChunk
from kvboost_rag.chunks.lookup import LocatedPrompt
from kvboost_rag.chunks.prefix_cache import PrefixCache
from kvboost_rag.config import ResolvedConfig
from kvboost_rag.datamodels import ChunkRecord, DiskChoice, HitKind, SegmentKind
from kvboost_rag.kv.assemble import PlacedEntry, assemble
from kvboost_rag.kv.buffer import BufferPool, KVBuffer, KVLayout
from kvboost_rag.kv.realign import PositionTables
from kvboost_rag.models.hf_cache import BufferCache
from kvboost_rag.observe.timing import StageClock
from kvboost_rag.repair import RepairContext, RepairStrategy
from kvboost_rag.serving.decode import DecodeStart

logger = logging.getLogger(__name__)


@dataclass
class Prepared:
    """Everything in front of decoding, and what is known about it.

    Attributes:
        start: where decoding starts.
        reuse: the mode that was really used.
        hits: where each segment's KV comes from.
        exact_tokens: tokens taken from the exact path.
        created_tokens: tokens whose KV was computed and stored on the way.
        repair: what repair saw and chose, or None without repair.
    """

    start: DecodeStart
    reuse: str
    hits: list[HitKind]
    exact_tokens: int = 0
    created_tokens: int = 0
    repair: RepairContext | None = None
    strategy: str = "none"
    fallback_reason: str | None = None
    chunks: list[FetchedChunk] = field(default_factory=list)


class Pipeline:
    """The stages between segmentation and decoding, for one model that can be reused."""

    def __init__(self, model: PreTrainedModel, layout: KVLayout, donors: Donors, prefixes: PrefixCache) -> None:
        self.model = model
        self.layout = layout
        self.library = donors.library
        self.donors = donors
        self.prefixes = prefixes
        self.buffers = BufferPool(layout)
        self._tables: PositionTables | None = None

    def exact(self, located: LocatedPrompt, namespace: str, room: int, clock: StageClock) -> Prepared:
        """A prefix cache over the whole prompt. Whole blocks are found and stored; the rest is left to decoding."""
        ids = located.token_ids
        whole = self.prefixes.whole(len(ids) - 1)
        cache = BufferCache(self.buffers.take(len(ids) + room))
        loaded = self.prefixes.load(cache, ids[:whole], namespace)
        clock.lap("load_ms")
        created = self.prefixes.fill(cache, ids[:whole], namespace)
        clock.lap("prefix_ms")
        hits = [HitKind.EXACT if s.end <= loaded else HitKind.PREFILLED for s in located.segments]
        return Prepared(DecodeStart(self._tensor(ids), cache), "exact", hits, loaded, created)

    def blend(
        self, located: LocatedPrompt, config: ResolvedConfig, strategy: RepairStrategy, room: int, clock: StageClock
    ) -> Prepared:
        """Exact hits for the prefix, chunk KV for documents, repair of the rows that the strategy chooses."""
        chunks = self._fetch(located, config, clock)
        ids = located.token_ids
        cache = BufferCache(self.buffers.take(len(ids) + room))
        prefix = tuple(i for s in located.of_kind(SegmentKind.PREFIX) for i in s.token_ids)
        loaded = self.prefixes.load(cache, prefix, config.namespace)
        clock.lap("load_ms")
        created = self.prefixes.fill(cache, prefix, config.namespace)
        clock.lap("prefix_ms")
        self._assemble(located, chunks, cache.buffer)
        clock.lap("realign_ms")
        context = self._context(located, cache.buffer, config)
        context.sensitivity = _joined([chunk.sensitivity for chunk in chunks])
        plan = strategy.plan(context)
        clock.lap("repair_ms")
        created += sum(len(c.record.token_ids) for c in chunks if c.hit is HitKind.ENCODED)
        created += sum(c.computed_tokens for c in chunks)
        return Prepared(
            DecodeStart(context.token_ids, cache, plan),
            "blend",
            self._hits(located, chunks, loaded == len(prefix)),
            loaded,
            created,
            context,
            strategy.name,
            chunks=chunks,
        )

    def _fetch(self, located: LocatedPrompt, config: ResolvedConfig, clock: StageClock) -> list[FetchedChunk]:
        """KV of every document segment, missing ones encoded; a text that occurs twice is fetched once."""
        library, records = self.library, {r.content_hash: r for _, r in located.documents}
        choices = {key: fetching.choose(library, r, config.disk_load == "always") for key, r in records.items()}
        clock.lap("lookup_ms")
        found = fetching.load_all(library, records, choices)
        clock.lap("load_ms")
        fetched = {key: found.get(key) or self._compute(r, choices[key], config) for key, r in records.items()}
        clock.lap("encode_ms")
        return [fetched[record.content_hash] for _, record in located.documents]

    def _compute(self, record: ChunkRecord, choice: DiskChoice | None, config: ResolvedConfig) -> FetchedChunk:
        """A chunk that is missing: for this request out of a donor, or encoded and kept."""
        if config.donors and choice is None:
            try:
                made = self.donors.make(record)
            except Exception as error:
                if config.strict:
                    raise
                logger.warning("a donor could not be used, the chunk is encoded whole: %s", error, exc_info=error)
                made = None
            if made is not None:
                return made
        return fetching.encode(self.library, record, choice)

    def _assemble(self, located: LocatedPrompt, chunks: list[FetchedChunk], buffer: KVBuffer) -> None:
        length = len(located.token_ids)
        if self._tables is None or self._tables.num_positions < length:
            # No longer than the prompt: some models change their frequencies for positions beyond their range.
            self._tables = PositionTables.of(self.layout, length)
        starts = [segment.start for segment, _ in located.documents]
        placed = [PlacedEntry(chunk.payload, start) for chunk, start in zip(chunks, starts, strict=True)]
        assemble(buffer, placed, self._tables)

    def _context(self, located: LocatedPrompt, buffer: KVBuffer, config: ResolvedConfig) -> RepairContext:
        ids = located.token_ids
        fresh = [torch.arange(s.start, s.end) for s in located.of_kind(SegmentKind.TEXT, SegmentKind.SUFFIX)]
        question = [torch.arange(s.start, s.end) for s in located.of_kind(SegmentKind.SUFFIX)]
        last = torch.tensor([len(ids) - 1])  # gives the first token's logits, whatever it belongs to
        return RepairContext(
            model=self.model,
            buffer=buffer,
            token_ids=self._tensor(ids),
            documents=tuple((s.start, s.end) for s, _ in located.documents),
            fresh_rows=torch.unique(torch.cat([*fresh, last])),
            question_rows=torch.unique(torch.cat([*question, last])),
            config=config,
        )

    def _hits(self, located: LocatedPrompt, chunks: list[FetchedChunk], prefix_hit: bool) -> list[HitKind]:
        documents = iter(chunks)
        hits = []
        for segment, record in zip(located.segments, located.records, strict=True):
            if record is not None:
                hits.append(next(documents).hit)
            else:
                exact = segment.kind is SegmentKind.PREFIX and prefix_hit
                hits.append(HitKind.EXACT if exact else HitKind.PREFILLED)
        return hits

    def recycle(self, prepared: Prepared) -> None:
        """The request is over: its buffer may serve the next one."""
        if prepared.start.cache is not None:
            self.buffers.give_back(prepared.start.cache.buffer)

    def _tensor(self, ids: tuple[int, ...]) -> torch.Tensor:
        return prompt_tensor(self.model, ids)


def _joined(parts: list[torch.Tensor | None]) -> torch.Tensor | None:
    """Sensitivity of all document tokens, float32 `[num_document_tokens]`; None if some document has none."""
    known = [part.float().cpu() for part in parts if part is not None]
    return torch.cat(known) if known and len(known) == len(parts) else None


def prompt_tensor(model: PreTrainedModel, ids: tuple[int, ...]) -> torch.Tensor:
    """Token ids `[prompt_len]` where the model expects them."""
    return torch.tensor(ids, device=model.get_input_embeddings().weight.device)


def plain(model: PreTrainedModel, located: LocatedPrompt, reason: str | None = None) -> Prepared:
    """No reuse: decoding prefills the whole prompt."""
    hits = [HitKind.PREFILLED] * len(located.segments)
    return Prepared(DecodeStart(prompt_tensor(model, located.token_ids)), "off", hits, fallback_reason=reason)
