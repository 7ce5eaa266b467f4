"""One request through all stages, and plain prefill where reuse has nothing to offer or fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import isfinite
from typing import TYPE_CHECKING

from kvboost_rag.chunks.fetcher import ChunkFetcher
from kvboost_rag.chunks.lookup import STORE_FAULTS, locate, locate_without_store
from kvboost_rag.chunks.served import ServedPrompt
from kvboost_rag.config import ConfigError, ResolvedConfig
from kvboost_rag.datamodels import GenerationResult
from kvboost_rag.models.ranks import RanksDiverged, RanksError
from kvboost_rag.observe.timing import StageClock, gpus_of
from kvboost_rag.serving.callers import CallersError, NothingComputed, as_they_were_raised
from kvboost_rag.serving.decode import Decoder
from kvboost_rag.serving.faults import Faults
from kvboost_rag.serving.lanes import is_crowded, reserve
from kvboost_rag.serving.limits import answer_room
from kvboost_rag.serving.pipeline import PlainPrefill
from kvboost_rag.serving.report import build_result
from kvboost_rag.serving.requests import Request
from kvboost_rag.serving.rewritten import RewrittenNotice
from kvboost_rag.serving.worker import Cancelled
from kvboost_rag.stores.catalog.database import waiting_at_most

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

STORE_PATIENCE_S = 2.0
"""What one request waits for other processes that write to its catalog, before it goes on without what it wanted."""


@dataclass(frozen=True)
class Channel:
    """Between a request and who waits for its answer.

    Attributes:
        on_text: gets pieces of text.
        cancelled: set when nobody waits any more.
        meanwhile: given the prepared prompt, what is to be called after each token.
    """

    on_text: Callable[[str], None]
    cancelled: threading.Event
    meanwhile: Callable[[ServedPrompt], Callable[[], None]]


@dataclass
class Server:
    """Serves requests one after the other, in the engine's worker.

    Attributes:
        pipeline: the way from lookup to decoding; `PlainPrefill` for a model whose KV cannot be reused.
        faults: of all states of the model.
    """

    model: PreTrainedModel
    fetcher: ChunkFetcher
    pipeline: PlainPrefill
    decoder: Decoder
    faults: Faults = field(default_factory=Faults)
    _notice: RewrittenNotice = field(default_factory=RewrittenNotice)

    @cached_property
    def _gpus(self) -> tuple[torch.device, ...]:
        return gpus_of(self.model)

    @waiting_at_most(STORE_PATIENCE_S)
    def serve(self, request: Request, channel: Channel) -> GenerationResult:
        """Look up, load, realign, repair, decode.

        Raises:
            Cancelled: nobody waits any more, and no token was computed yet.
        """
        clock = StageClock(request.started, self._gpus)
        self.faults.num_requests += 1
        prompt = self.fetcher.ranks.first("prompt", lambda: self._locate_or_fall_back(request))
        clock.lap("segment_ms")
        room = answer_room(self.model, len(prompt.token_ids), request.params)
        request = replace(request, params=replace(request.params, max_new_tokens=room))
        reserve(len(prompt.token_ids), room)
        with self._pinned(prompt, request.config):
            if prompt.fallback_reason is None:
                prompt = self._prepare(prompt, request, room, clock)
            if channel.cancelled.is_set():
                raise Cancelled
            if prompt.cache is None and is_crowded():
                prompt = replace(prompt, cache=self.pipeline.empty_cache(len(prompt.token_ids) + room))
            result = self._decode(prompt, request, channel, clock)
        self._note_deviations(result)
        return result

    def logits(self, request: Request, continuation: Sequence[int]) -> torch.Tensor:
        """Logits after the prompt and after each token of `continuation`, float32 `[len + 1, vocab_size]`."""
        prompt = self.fetcher.ranks.first("prompt", lambda: self.locate(request))
        answer_room(self.model, len(prompt.token_ids) + len(continuation), request.params)
        clock = StageClock(request.started, self._gpus)
        with self._pinned(prompt, request.config):
            prompt = self._prepare(prompt, request, max(1, len(continuation)), clock)
            logits = self.decoder.score(prompt, continuation)
            self.pipeline.recycle(prompt)
            return logits

    def locate(self, request: Request) -> ServedPrompt:
        """The request's prompt as segments, known documents among them."""
        return locate(
            self.fetcher.registry,
            request.prompt,
            request.documents,
            request.config.namespace,
            self.pipeline.given(request),
            request.template,
        )

    def _locate_or_fall_back(self, request: Request) -> ServedPrompt:
        """The located prompt; where the catalog cannot be asked, one for plain prefill that says why."""
        registry, config = self.fetcher.registry, request.config
        try:
            prompt = self.locate(request)
        except STORE_FAULTS as error:
            reason = self.faults.note(error, config)
            return locate_without_store(registry.tokens, request.prompt, request.documents, request.template).plain(
                reason
            )
        if self.pipeline.reusable and config.reuse == "blend":
            self._notice.check(prompt, registry, config.namespace)
        return prompt

    def _pinned(self, prompt: ServedPrompt, config: ResolvedConfig) -> AbstractContextManager[None]:
        """The request's chunks stay in the store until it is done."""
        found = prompt.documents if config.reuse == "blend" else []
        return self.fetcher.pinned(s.record for s in found if s.record is not None)

    def _prepare(self, prompt: ServedPrompt, request: Request, room: int, clock: StageClock) -> ServedPrompt:
        """Reuse on all ranks, or plain prefill on all of them."""
        ranks = self.fetcher.ranks
        try:
            ready = self.pipeline.prepare(prompt, request, room, clock)
        except Exception as error:
            if isinstance(error, RanksError) and not isinstance(error, RanksDiverged):
                raise
            if not isinstance(error, RanksDiverged):  # that was told to all of them
                with suppress(RanksDiverged):  # they were somewhere else, and know by now
                    ranks.all("prepared", False)
            return prompt.plain(self.faults.note(error, request.config))
        if ranks.all("prepared", True):
            return ready
        return prompt.plain("another rank could not use its KV")

    def _decode(self, prompt: ServedPrompt, request: Request, channel: Channel, clock: StageClock) -> GenerationResult:
        """Generate; a fault before the first token is answered by plain prefill, unless it is the caller's."""

        def run(prompt: ServedPrompt) -> GenerationResult:
            meanwhile = channel.meanwhile(prompt)

            def on_token() -> None:
                clock.first_token()
                meanwhile()

            decoded, rows = self.decoder.run(prompt, request.params, channel.on_text, on_token, channel.cancelled)
            return build_result(prompt, rows, decoded, clock)

        try:
            result = run(prompt)
        except NothingComputed as raised:
            return self._decide(raised.error, run, prompt, request.config)
        except CallersError as raised:
            raise raised.error from None
        except Exception as error:
            alone = self.fetcher.ranks.size == 1  # the others are in the middle of the same forward
            if prompt.cache is None or clock.ttft_ms is not None or isinstance(error, ConfigError) or not alone:
                raise
            reason = self.faults.note(error, request.config)
        else:
            self.pipeline.recycle(prompt)
            return result
        # Behind the handler: until then the error's traceback keeps all that the failed forward had computed.
        with as_they_were_raised():
            return run(prompt.plain(reason))

    def _decide(
        self,
        error: Exception,
        run: Callable[[ServedPrompt], GenerationResult],
        prompt: ServedPrompt,
        config: ResolvedConfig,
    ) -> GenerationResult:
        """Before the model ran: the caller's settings if plain prefill fails too, else a fault of reuse."""
        if prompt.cache is None or config.strict:
            raise error from None
        with as_they_were_raised():
            result = run(prompt.plain(f"{type(error).__name__}: {error}"))
        self.faults.note(error, config)
        return result

    def _note_deviations(self, result: GenerationResult) -> None:
        """Tell eviction how much each chunk depends on what stands around it."""
        for segment in result.segments:
            if segment.content_hash is not None and segment.deviation is not None and isfinite(segment.deviation):
                with suppress(Exception):  # advice for later; the answer is ready
                    self.fetcher.store.note_deviation(segment.content_hash, segment.deviation)
