"""Repair while idle: a served turn is recomputed left to right until its KV is what a full prefill gives.

The next turn then starts from exact KV of the whole conversation, documents included, and errors do not pile up.
What is computed are the prefix cache's own blocks, so a turn that comes earlier computes the missing ones itself, in
the same bits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial

from kvboost_rag.chunks.served import ServedPrompt
from kvboost_rag.datamodels import GenerationResult, HitKind, SegmentKind
from kvboost_rag.kv.buffer import KVBuffer
from kvboost_rag.models.hf_cache import BufferCache
from kvboost_rag.observe.idle import IdleJobs
from kvboost_rag.observe.recorder import Recorder
from kvboost_rag.serving.history import MERGING_TOKENS, past_tokens, token_ids, with_answer
from kvboost_rag.serving.lanes import is_crowded
from kvboost_rag.serving.pipeline import Pipeline
from kvboost_rag.serving.requests import Request
from kvboost_rag.serving.variants import Variant, Variants
from kvboost_rag.serving.worker import EngineClosed, Worker

logger = logging.getLogger(__name__)

MAX_PENDING = 32
"""Conversations that wait to be settled; of more, the next turn computes what is missing."""
APPROXIMATE = (HitKind.APPROXIMATE, HitKind.ENCODED, HitKind.DONOR)


class Settler:
    """Settles served turns, a block at a time, while the engine is idle.

    Contract: a waiting request waits for one block at the most. When something is deleted or the model is changed,
    turns that were served before are not settled any more.

    Attributes:
        num_tokens: settled so far.
    """

    def __init__(self, variants: Variants, worker: Worker, metrics: Recorder) -> None:
        self._variants, self._worker, self._metrics = variants, worker, metrics
        self._jobs = IdleJobs("kvboost-settle", lambda: worker.is_idle, MAX_PENDING)
        self.num_tokens = 0

    def note(self, variant: Variant, request: Request, result: GenerationResult) -> None:
        """Remember a served turn, if the request is one, and settle it when nobody waits. Called in the worker."""
        pipeline = variant.server.pipeline
        if not isinstance(pipeline, Pipeline) or not request.config.settle or result.reuse == "off":
            return
        if result.finish_reason == "cancelled":
            return
        try:
            self._note(variant, pipeline, request, result)
        except Exception as error:  # the answer is out; the next turn computes what is missing
            logger.warning("a turn is not settled: %s", error, exc_info=error)

    def _note(self, variant: Variant, pipeline: Pipeline, request: Request, result: GenerationResult) -> None:
        ids = token_ids(variant.registry, with_answer(request, result.text))
        if not self._is_turn(pipeline, request, result, ids):
            return
        length = len(ids) - MERGING_TOKENS
        said = ids[: min(length, pipeline.max_positions or length)]
        if pipeline.prefixes.whole(len(said)):
            removals = variant.registry.store.catalog.version().removals
            turn = _Turn(variant, pipeline, said, request.config.namespace, removals)
            self._jobs.offer(str(hash((variant.state.fingerprint, turn.namespace, said))), partial(self._steps, turn))

    def meanwhile(self, variant: Variant, request: Request) -> Callable[[ServedPrompt], Callable[[], None]]:
        """What makes of a prepared prompt what is called after each token of its answer (`ReuseConfig.settle_rows`)."""
        pipeline, rows = variant.server.pipeline, request.config.settle_rows

        def begin(prompt: ServedPrompt) -> Callable[[], None]:
            if not (isinstance(pipeline, Pipeline) and request.config.settle and rows and prompt.plan is not None):
                return lambda: None

            def load() -> _Turn:
                whole = pipeline.prefixes.whole(len(prompt.token_ids) - MERGING_TOKENS)
                removals = variant.registry.store.catalog.version().removals
                turn = _Turn(variant, pipeline, prompt.token_ids[:whole], request.config.namespace, removals)
                turn.load()
                return turn

            return _Meanwhile(load, rows, self._count)

        return begin

    def _count(self, num_tokens: int) -> None:
        self.num_tokens += num_tokens
        self._metrics.record_settled(num_tokens)

    def cancel(self) -> int:
        """Leave all turns as they are; returns how many were not settled yet."""
        return self._jobs.cancel()

    def wait(self) -> None:
        """Until all that was noted is settled."""
        self._jobs.wait()

    def close(self) -> None:
        """Drop what is left."""
        self._jobs.close()

    def _is_turn(self, pipeline: Pipeline, request: Request, result: GenerationResult, ids: tuple[int, ...]) -> bool:
        """Whether it is worth settling, and remembered if so: what stands before its last answer must be exact already.

        Otherwise (a history that was served elsewhere, documents that change in front of it) the same request would be
        answered in another way when it comes again.
        """
        documents = [s for s in result.segments if s.kind is SegmentKind.DOCUMENT and s.content_hash is not None]
        if not documents:
            return True
        before = past_tokens(pipeline.fetcher.registry, request, ids)
        if any(s.start < before and s.hit in APPROXIMATE for s in documents):
            return False
        ends = [s.start + s.num_tokens for s in documents[-1:]]
        ends += [result.usage.input_tokens - MERGING_TOKENS, len(ids) - MERGING_TOKENS]
        pipeline.turns.note(ids, (end for end in ends if 0 < end <= len(ids)), request.config.namespace)
        return True

    def _steps(self, turn: _Turn) -> Iterator[int]:
        """One block a step, in the worker; yields tokens computed."""
        state, adapters = turn.variant.state.fingerprint, turn.variant.adapters

        def run(job: Callable[[], int]) -> int:
            return self._worker.call(lambda: self._variants.run_as(state, adapters, job))

        with suppress(EngineClosed):  # nobody will ask for it
            run(turn.load)
            while num_tokens := run(turn.step):
                self._count(num_tokens)
                yield num_tokens


class _Turn:
    """One turn on its way to being settled. Methods run in the worker."""

    def __init__(
        self, variant: Variant, pipeline: Pipeline, token_ids: tuple[int, ...], namespace: str, removals: int
    ) -> None:
        self.variant, self.namespace = variant, namespace
        self._prefixes, self._layout = pipeline.prefixes, pipeline.layout
        self._ids, self._removals = token_ids, removals
        self._blocks: Iterator[int] = iter(())

    def load(self) -> int:
        """Take what is exact already; returns its length in tokens."""
        cache = BufferCache(KVBuffer(self._layout, len(self._ids)))
        loaded = self._prefixes.load(cache, self._ids, self.namespace)
        self._blocks = self._prefixes.steps(cache, self._ids, self.namespace)
        return loaded

    def step(self) -> int:
        """Compute the next block; returns its length, 0 when there is none."""
        # What was deleted must not come back in a block.
        unchanged = self._prefixes.store.catalog.version().removals == self._removals
        return next(self._blocks, 0) if unchanged else 0


class _Meanwhile:
    """Settles a prompt while its answer is decoded; the blocks are those that are computed afterwards otherwise.

    Args:
        load: gives the turn, with what of it is exact already.
        rows: for each token, on average: a block is paid for before the next one.
        count: told how many tokens a block had.
    """

    def __init__(self, load: Callable[[], _Turn], rows: int, count: Callable[[int], None]) -> None:
        self._load, self._rows, self._count = load, rows, count
        self._turn: _Turn | None = None
        self._paid, self._is_over = 0, False

    def __call__(self) -> None:
        """After a token, in the worker. A fault ends it, and not the answer."""
        self._paid += self._rows
        while self._paid > 0 and not self._is_over and not is_crowded():
            try:
                self._turn = self._turn or self._load()
                num_tokens = self._turn.step()
            except Exception as error:  # what is missing is computed afterwards
                logger.warning("a prompt is not settled while its answer is decoded: %s", error, exc_info=error)
                num_tokens = 0
            self._paid -= num_tokens
            self._is_over = not num_tokens
            self._count(num_tokens)
