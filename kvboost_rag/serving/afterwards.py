"""What others learn from a served request, and what is left to do when nobody waits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from kvboost_rag.datamodels import GenerationResult, HitKind
from kvboost_rag.observe.divergence import kl_per_token
from kvboost_rag.observe.idle import IdleJobs
from kvboost_rag.observe.recorder import Recorder
from kvboost_rag.observe.shadow import MAX_ANSWER_TOKENS, Shadow, ShadowSample
from kvboost_rag.serving.requests import Request
from kvboost_rag.serving.variants import Variant, Variants
from kvboost_rag.serving.worker import Worker

if TYPE_CHECKING:
    import torch


class Afterwards:
    """Metrics, comparisons with full prefill, and KV for what a donor stood in for."""

    def __init__(self, variants: Variants, worker: Worker, metrics: Recorder, shadow: Shadow, later: IdleJobs) -> None:
        self._variants = variants
        self._worker = worker
        self._metrics = metrics
        self._shadow = shadow
        self._later = later

    def note(self, request: Request, result: GenerationResult) -> None:
        """A request was served. Returns at once."""
        self._metrics.record(result)
        if result.reuse == "blend":
            compare = partial(self._compare_with_full, request, result.token_ids[:MAX_ANSWER_TOKENS])
            self._shadow.offer(compare, request.config.shadow_rate, request.config.shadow_max_kl)
        # What a donor stood in for gets its own KV when nobody is waiting.
        for key in {s.content_hash for s in result.segments if s.hit is HitKind.DONOR and s.content_hash}:
            self._later.offer(key, partial(self._encode_now, request, key))

    def wait(self) -> None:
        """Until the KV of what donors stood in for is there."""
        self._later.wait()

    def _encode_now(self, request: Request, content_hash: str) -> None:
        def encode(variant: Variant) -> None:
            for document in variant.server.locate(request).documents:
                if document.record is not None and document.record.content_hash == content_hash:
                    variant.fetcher.fetch(document.record)
                    return

        self._worker.call(lambda: self._variants.run(request.config.adapters, encode))

    def _compare_with_full(self, request: Request, answer: Sequence[int]) -> ShadowSample:
        """A served request once more, by reuse and by full prefill, along the answer that was given."""
        ours, full = (
            self._worker.call(partial(self._logits, asked, answer[:-1])) for asked in (request, request.off())
        )
        kl = kl_per_token(full, ours)
        agreement = float((full.argmax(-1) == ours.argmax(-1)).float().mean())
        return ShadowSample(float(kl[0]), float(kl.mean()), agreement)

    def _logits(self, request: Request, answer: Sequence[int]) -> torch.Tensor:
        return self._variants.run(request.config.adapters, lambda variant: variant.server.logits(request, answer))
