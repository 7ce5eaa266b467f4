"""One request's way from lookup to a buffer that decoding can start from."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise, takewhile

import torch
from transformers import PreTrainedModel

from kvboost_rag.chunks.donors import Donors
from kvboost_rag.chunks.fetched import FetchedChunk
from kvboost_rag.chunks.prefix_cache import PrefixCache
from kvboost_rag.chunks.served import ServedPrompt, ServedSegment
from kvboost_rag.chunks.turns import ServedTurns
from kvboost_rag.config import ResolvedConfig
from kvboost_rag.datamodels import ChunkRecord, DiskChoice, HitKind, SegmentKind
from kvboost_rag.forward.probe import ProbeReport
from kvboost_rag.kv.assemble import PlacedChunk, PlacedEntry, assemble
from kvboost_rag.kv.buffer import BufferPool, KVBuffer
from kvboost_rag.kv.realign import PositionTables
from kvboost_rag.models.hf_cache import BufferCache
from kvboost_rag.observe.timing import StageClock
from kvboost_rag.repair import RepairContext
from kvboost_rag.repair.agreed import agreed
from kvboost_rag.repair.base import least_ratio
from kvboost_rag.serving.decode import prompt_tensor
from kvboost_rag.serving.history import MERGING_TOKENS, has_past, past_tokens
from kvboost_rag.serving.lanes import breathe
from kvboost_rag.serving.requests import Request

LEADING_TOKENS = 64
"""Most tokens between the anchor and a prompt's first document (a line of instructions) for that to count as standing
after the anchor alone."""

logger = logging.getLogger(__name__)

Given = Callable[[str], ChunkRecord]


class PlainPrefill:
    """The way of every prompt on a model whose KV cannot be reused."""

    reusable = False

    def given(self, request: Request) -> Given | None:
        """What makes chunks of the request's documents; None: nothing does."""
        return None

    def prepare(self, prompt: ServedPrompt, request: Request, room: int, clock: StageClock) -> ServedPrompt:
        """Everything in front of decoding; `room` is the number of tokens that the answer may have."""
        return prompt

    def empty_cache(self, num_tokens: int) -> BufferCache | None:
        """Room for a prompt that nothing is reused for, so that it can be decoded with others; None: it cannot."""
        return None

    def recycle(self, prompt: ServedPrompt) -> None:
        """The request is over."""


class Pipeline(PlainPrefill):
    """The stages between lookup and decoding, for a model that can be reused."""

    reusable = True

    def __init__(
        self, model: PreTrainedModel, probe: ProbeReport, donors: Donors, prefixes: PrefixCache, turns: ServedTurns
    ) -> None:
        self.model = model
        self.layout = probe.require_layout
        self.max_positions = probe.max_positions
        self.fetcher = donors.fetcher
        self.donors = donors
        self.prefixes = prefixes
        self.turns = turns
        self.buffers = BufferPool(self.layout)
        self._tables: PositionTables | None = None

    def given(self, request: Request) -> Given | None:
        config = request.config
        if config.reuse == "off":
            return None
        owner = self.donors if config.donors and config.reuse == "blend" else self.fetcher.registry
        return lambda text: owner.given(text, config.namespace)

    def prepare(self, prompt: ServedPrompt, request: Request, room: int, clock: StageClock) -> ServedPrompt:
        """Lookup, load, realign, repair; plain prefill where there is nothing to reuse."""
        reuse, limit = request.config.reuse, self.max_positions
        if reuse == "off":
            return prompt
        if limit is not None and len(prompt.token_ids) + room > limit:
            return prompt.plain(f"the model's RoPE is constant up to {limit} positions only")
        if reuse == "exact":
            return self.exact(prompt, request.config.namespace, room, clock)
        prompt, said = self._settled(prompt, request)
        if prompt.documents and least_ratio(request.config, prompt.num_document_tokens) < 1:
            return self.blend(prompt, request, said, room, clock)
        short = not self.prefixes.whole(len(prompt.token_ids) - 1)
        return prompt if short else self.exact(prompt, request.config.namespace, room, clock, said)

    def _settled(self, prompt: ServedPrompt, request: Request) -> tuple[ServedPrompt, int]:
        """Documents of earlier turns are served exactly, in a conversation whose turns were served here.

        That depends on the messages and on which turns were served, not on what is stored of them.

        Returns:
            The prompt, and how many tokens of earlier turns it begins with; 0 where those are not exact.
        """
        if not (request.config.settle and has_past(request.prompt)):
            return prompt, 0
        before = past_tokens(self.fetcher.registry, request, prompt.token_ids)
        if prompt.documents:
            known = self.turns.reach(prompt.token_ids, request.config.namespace)
            prompt = prompt.settled_until(next((end for end in known if end <= before), 0))
        is_exact = all(s.start >= before for s in prompt.documents)
        return prompt, max(0, before - MERGING_TOKENS) if is_exact else 0

    def exact(self, prompt: ServedPrompt, namespace: str, room: int, clock: StageClock, said: int = 0) -> ServedPrompt:
        """A prefix cache over the prompt; what it does not hold is left to decoding.

        Whole blocks are found and stored; in a conversation whole blocks and the rest of what was `said` before, so
        that a turn whose history is settled computes its new message and no more.
        """
        ids = prompt.token_ids
        end = said or self.prefixes.whole(len(ids) - 1)
        cache = BufferCache(self.buffers.take(len(ids) + room))
        loaded, created = self._fill(cache, ids[:end], (namespace, 0), clock)
        segments = tuple(replace(s, exact=s.end <= loaded) for s in prompt.segments)
        return replace(
            prompt, segments=segments, reuse="exact", cache=cache, exact_tokens=loaded, created_tokens=created
        )

    def blend(self, prompt: ServedPrompt, request: Request, said: int, room: int, clock: StageClock) -> ServedPrompt:
        """Exact KV up to the first document, chunk KV for documents, repair of the rows that the strategy chooses."""
        config = request.config
        prompt = self._fetch(prompt, config, clock)
        cache = BufferCache(self.buffers.take(len(prompt.token_ids) + room))
        first = prompt.documents[0].start
        loaded, created = self._fill(cache, prompt.token_ids[:first], (config.namespace, said), clock)
        self._assemble(prompt, cache.buffer)
        clock.lap("realign_ms")
        plan = agreed(request.strategy.plan(self._context(prompt, cache.buffer, config)), self.fetcher.ranks)
        breathe(plan.probe_rows)
        clock.lap("repair_ms")
        return replace(
            prompt,
            segments=tuple(replace(s, exact=s.end <= loaded) for s in prompt.segments),
            reuse="blend",
            cache=cache,
            plan=plan,
            strategy=request.strategy.name,
            exact_tokens=loaded,
            created_tokens=created + sum(_created(s.chunk) for s in prompt.documents if s.chunk is not None),
        )

    def _fill(
        self, cache: BufferCache, token_ids: tuple[int, ...], where: tuple[str, int], clock: StageClock
    ) -> tuple[int, int]:
        """Exact KV of the prompt's beginning: how many tokens were found, and how many computed and stored.

        Args:
            where: namespace, and the position where a block is to end (`PrefixCache.blocks`).
        """
        loaded = self.prefixes.load(cache, token_ids, *where)
        clock.lap("load_ms")
        created = 0
        for computed in self.prefixes.steps(cache, token_ids, *where):
            created += computed
            breathe(computed)
        clock.lap("prefix_ms")
        return loaded, created

    def _fetch(self, prompt: ServedPrompt, config: ResolvedConfig, clock: StageClock) -> ServedPrompt:
        """KV of every document segment, missing ones encoded; a text that occurs twice is fetched once."""
        records = {s.record.content_hash: s.record for s in prompt.documents if s.record is not None}
        choices = {key: self.fetcher.choose(r, config.disk_load == "always") for key, r in records.items()}
        clock.lap("lookup_ms")
        found = self.fetcher.load_all(records, choices)
        clock.lap("load_ms")
        fetched = {key: found.get(key) or self._compute(r, choices[key], config) for key, r in records.items()}
        clock.lap("encode_ms")
        return prompt.with_chunks(fetched)

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
                breathe(made.computed_tokens)
                return made
        again = choice == "recompute"
        encoded = self.fetcher.encode(record, again)
        breathe(len(record.token_ids))
        return replace(encoded, disk_choice="recompute" if again else None)

    def _assemble(self, prompt: ServedPrompt, buffer: KVBuffer) -> None:
        length = len(prompt.token_ids)
        if self._tables is None or self._tables.num_positions < length:
            # No longer than the prompt: some models change their frequencies for positions beyond their range.
            self._tables = PositionTables.of(self.layout, length)
        assemble(buffer, _placed(prompt, self._leading(prompt)), self._tables)

    def _leading(self, prompt: ServedPrompt) -> bool:
        """Whether the first document stands after the anchor and little else."""
        identity, start = self.fetcher.identity, prompt.documents[0].start
        anchor = identity.anchor_ids
        near = prompt.token_ids[: len(anchor)] == anchor and start <= len(anchor) + LEADING_TOKENS
        kept = identity.leading and self.fetcher.heads.whole
        return kept and near and not any(s.settled and s.record is not None for s in prompt.segments)

    def _context(self, prompt: ServedPrompt, buffer: KVBuffer, config: ResolvedConfig) -> RepairContext:
        last = torch.tensor([len(prompt.token_ids) - 1])  # gives the first token's logits, whatever it belongs to
        fresh = _rows([s for s in prompt.segments if s.start >= prompt.documents[0].start and s.chunk is None])
        question = _rows(prompt.of_kind(SegmentKind.SUFFIX))
        return RepairContext(
            model=self.model,
            buffer=buffer,
            token_ids=prompt_tensor(self.model, prompt.token_ids),
            documents=tuple((s.start, s.end) for s in prompt.documents),
            fresh_rows=torch.unique(torch.cat([*fresh, last])),
            question_rows=torch.unique(torch.cat([*question, last])),
            config=config,
            sensitivity=_sensitivity(prompt),
            ranks=self.fetcher.ranks,
        )

    def empty_cache(self, num_tokens: int) -> BufferCache | None:
        return BufferCache(self.buffers.take(num_tokens))

    def recycle(self, prompt: ServedPrompt) -> None:
        """The request is over: its buffer may serve the next one."""
        if prompt.cache is not None:
            self.buffers.give_back(prompt.cache.buffer)


def _placed(prompt: ServedPrompt, leading: bool) -> list[PlacedEntry | PlacedChunk]:
    """Every run of a chunk at its place; those of the first chunk as they are after the anchor, if that is `leading`.

    A chunk is placed whole where nothing but ids that will be computed lies under its ends (nearly always: a token or
    two at the edges), since a part of it would have to be copied first.
    """
    runs = [s for s in prompt.documents if s.chunk is not None]
    lows = [prompt.documents[0].start, *(s.end for s in runs)]
    highs = [*(s.start for s in runs[1:]), len(prompt.token_ids)]
    first = takewhile(lambda pair: _goes_on(*pair), pairwise([runs[0], *runs])) if leading and runs else ()
    num_leading = len(list(first))
    return [
        s.chunk.placed(s.segment, low, high, number < num_leading)
        for number, (s, low, high) in enumerate(zip(runs, lows, highs, strict=False))
        if s.chunk
    ]


def _goes_on(before: ServedSegment, run: ServedSegment) -> bool:
    """Whether both are runs of one chunk at one place of the prompt."""
    places = (s.start - s.segment.chunk_start for s in (before, run))
    return before.record == run.record and abs(next(places) - next(places)) <= MERGING_TOKENS


def _created(chunk: FetchedChunk) -> int:
    """Tokens of a chunk that were computed in this request."""
    return len(chunk.record.token_ids) if chunk.hit is HitKind.ENCODED else chunk.computed_tokens


def _rows(segments: list[ServedSegment]) -> list[torch.Tensor]:
    return [torch.arange(s.start, s.end) for s in segments]


def _sensitivity(prompt: ServedPrompt) -> torch.Tensor | None:
    """Of all document tokens, float32 `[num_document_tokens]`; None if some document has none."""
    parts = [s.chunk.sensitivity_of(s.segment) for s in prompt.documents if s.chunk is not None]
    known = [part.float().cpu() for part in parts if part is not None]
    return torch.cat(known) if known and len(known) == len(parts) else None
