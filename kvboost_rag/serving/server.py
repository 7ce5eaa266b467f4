"""One request through all stages, and plain prefill where reuse has nothing to offer or fails."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import isfinite
from typing import TYPE_CHECKING, Any

from kvboost_rag.chunks.library import ChunkLibrary
from kvboost_rag.chunks.lookup import STORE_FAULTS, LocatedPrompt, Messages, locate, locate_without_store
from kvboost_rag.config import ConfigError, GenerationParams, ResolvedConfig
from kvboost_rag.datamodels import ChunkRecord, GenerationResult
from kvboost_rag.forward.probe import ProbeReport
from kvboost_rag.observe.timing import StageClock, gpus_of
from kvboost_rag.repair import RepairStrategy
from kvboost_rag.serving.decode import ContextOverflowError, Decoder
from kvboost_rag.serving.pipeline import Pipeline, Prepared, plain
from kvboost_rag.serving.report import Outcome, build_result
from kvboost_rag.serving.rewritten import RewrittenNotice
from kvboost_rag.serving.worker import Cancelled
from kvboost_rag.stores.catalog.database import waiting_at_most

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

STORE_PATIENCE_S = 2.0
"""What one request waits for other processes that write to its catalog, before it goes on without what it wanted."""


@dataclass(frozen=True)
class Request:
    """One call of `generate` or `stream`, with every choice made."""

    prompt: str | Messages
    documents: list[str]
    params: GenerationParams
    config: ResolvedConfig
    strategy: RepairStrategy
    template: dict[str, Any]
    started: float


@dataclass
class Server:
    """Serves requests one after the other, in the engine's worker.

    Attributes:
        pipeline: None for a model whose KV cannot be reused.
        counts: requests, and fallbacks by the kind of fault.
    """

    model: PreTrainedModel
    probe: ProbeReport
    library: ChunkLibrary
    pipeline: Pipeline | None
    decoder: Decoder
    counts: Counter[str] = field(default_factory=Counter)
    _notice: RewrittenNotice = field(default_factory=RewrittenNotice)

    @cached_property
    def _gpus(self) -> tuple[torch.device, ...]:
        return gpus_of(self.model)

    @waiting_at_most(STORE_PATIENCE_S)
    def serve(self, request: Request, on_text: Callable[[str], None], cancelled: threading.Event) -> GenerationResult:
        """Segment, look up, load, realign, repair, decode.

        Raises:
            Cancelled: nobody waits any more, and no token was computed yet.
        """
        clock = StageClock(request.started, self._gpus)
        self.counts["requests"] += 1
        located, fault = self._locate_or_fall_back(request)
        if self.pipeline is not None and request.config.reuse == "blend" and fault is None:
            self._notice.check(located, self.library, request.config.namespace)
        clock.lap("segment_ms")
        room = self._room(len(located.token_ids), request.params)
        request = replace(request, params=replace(request.params, max_new_tokens=room))
        with self._pinned(located, request.config):
            if fault is None:
                prepared = self._prepare(located, request, room, clock)
            else:
                prepared = plain(self.model, located, fault)
            if cancelled.is_set():
                raise Cancelled
            result = build_result(self._decode(located, prepared, request, (on_text, cancelled), clock))
            self._recycle(prepared)
        self._note_deviations(result)
        return result

    def logits(self, request: Request, continuation: Sequence[int]) -> torch.Tensor:
        """Logits behind the prompt and behind each token of `continuation`, float32 `[len + 1, vocab_size]`."""
        located = self.locate(request)
        self._room(len(located.token_ids) + len(continuation), request.params)
        clock = StageClock(request.started, self._gpus)
        with self._pinned(located, request.config):
            prepared = self._prepare(located, request, max(1, len(continuation)), clock)
            logits = self.decoder.score(prepared.start, continuation)
            self._recycle(prepared)
            return logits

    def _recycle(self, prepared: Prepared) -> None:
        if self.pipeline is not None:
            self.pipeline.recycle(prepared)

    def locate(self, request: Request) -> LocatedPrompt:
        namespace = request.config.namespace
        return locate(
            self.library, request.prompt, request.documents, namespace, self._register(request), request.template
        )

    def _register(self, request: Request) -> Callable[[str], ChunkRecord] | None:
        if self.pipeline is None or request.config.reuse == "off":
            return None
        donors = request.config.donors and request.config.reuse == "blend"
        owner = self.pipeline.donors if donors else self.library
        return lambda text: owner.register(text, request.config.namespace)

    def _locate_or_fall_back(self, request: Request) -> tuple[LocatedPrompt, str | None]:
        """The located prompt, and the fault if the catalog could not be asked."""
        try:
            return self.locate(request), None
        except STORE_FAULTS as error:
            fault = self._fault(error, request.config)
            return locate_without_store(self.library.tokens, request.prompt, request.documents, request.template), fault

    def _pinned(self, located: LocatedPrompt, config: ResolvedConfig) -> AbstractContextManager[None]:
        """The request's chunks stay in the store until it is done."""
        chunks = located.documents if config.reuse == "blend" else []
        return self.library.pinned(record for _, record in chunks)

    def _room(self, prompt_tokens: int, params: GenerationParams) -> int:
        """Tokens that the answer may have."""
        limit = context_tokens(self.model)
        if limit is None:
            return params.max_new_tokens
        if prompt_tokens >= limit:
            raise ContextOverflowError(prompt_tokens, limit)
        return min(params.max_new_tokens, limit - prompt_tokens)

    def _prepare(self, located: LocatedPrompt, request: Request, room: int, clock: StageClock) -> Prepared:
        """Lookup, load, realign, repair; plain prefill where there is nothing to reuse or something fails."""
        config, pipeline = request.config, self.pipeline
        if pipeline is None or config.reuse == "off":
            return plain(self.model, located)
        limit = self.probe.max_positions
        if limit is not None and len(located.token_ids) + room > limit:
            return plain(self.model, located, f"the model's RoPE is constant up to {limit} positions only")
        try:
            if config.reuse == "exact":
                return pipeline.exact(located, config.namespace, room, clock)
            if not located.documents:
                return plain(self.model, located)
            return pipeline.blend(located, config, request.strategy, room, clock)
        except Exception as error:
            return plain(self.model, located, self._fault(error, config))

    def _decode(
        self,
        located: LocatedPrompt,
        prepared: Prepared,
        request: Request,
        channel: tuple[Callable[[str], None], threading.Event],
        clock: StageClock,
    ) -> Outcome:
        """Generate; a fault before the first token is answered by plain prefill."""
        on_text, cancelled = channel

        def run(start: Prepared) -> Outcome:
            decoded, rows = self.decoder.run(
                start.start,
                request.params,
                on_text,
                clock.first_token,
                cancelled,
            )
            return Outcome(located, start, rows, decoded, clock)

        try:
            return run(prepared)
        except Exception as error:
            if prepared.start.cache is None or clock.ttft_ms is not None or isinstance(error, ConfigError):
                raise
            reason = self._fault(error, request.config)
        # Behind the handler: until then the error's traceback keeps all that the failed forward had computed.
        return run(plain(self.model, located, reason))

    def _fault(self, error: Exception, config: ResolvedConfig) -> str:
        """Count a fault in reuse and log it, once a kind; re-raises in strict mode."""
        if config.strict:
            raise error
        reason = f"{type(error).__name__}: {error}"
        name = f"fallback:{type(error).__name__}"
        if not self.counts[name]:
            logger.warning("reuse failed, the request is served by plain prefill: %s", reason, exc_info=error)
        self.counts[name] += 1
        return reason

    def _note_deviations(self, result: GenerationResult) -> None:
        """Tell eviction how much each chunk depends on what stands around it."""
        for segment in result.segments:
            if segment.content_hash is not None and segment.deviation is not None and isfinite(segment.deviation):
                with suppress(Exception):  # advice for later; the answer is ready
                    self.library.store.note_deviation(segment.content_hash, segment.deviation)


def context_tokens(model: PreTrainedModel) -> int | None:
    """Tokens that prompt and answer may have together, or None where the model does not say."""
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return int(limit) if limit else None


def reuse_limit(model: PreTrainedModel, report: ProbeReport) -> int | None:
    """Longest prompt, answer included, whose KV can be reused, or None."""
    limits = [n for n in (context_tokens(model), report.max_positions) if n is not None]
    return min(limits, default=None)
