"""The way in: requests from any thread to the worker, answers back."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from kvboost_rag.chunks.lookup import STORE_FAULTS, locate_without_store
from kvboost_rag.datamodels import GenerationResult, StreamEvent
from kvboost_rag.models.profile import ProfileNotice
from kvboost_rag.models.ranks import Ranks
from kvboost_rag.serving.afterwards import Afterwards
from kvboost_rag.serving.batch import Batch
from kvboost_rag.serving.history import token_ids
from kvboost_rag.serving.requests import Request
from kvboost_rag.serving.server import Channel
from kvboost_rag.serving.settling import Settler
from kvboost_rag.serving.variants import Variant, Variants
from kvboost_rag.serving.worker import Stream, Worker

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Service:
    """Serves checked requests in their turn.

    Attributes:
        notice: what the model runs on, said when that begins to matter unless somebody showed it already.
    """

    variants: Variants
    worker: Worker
    batch: Batch
    afterwards: Afterwards
    notice: ProfileNotice
    settler: Settler
    ranks: Ranks = field(default_factory=Ranks)

    def stream(self, request: Request, cancelled: threading.Event | None = None) -> Stream[StreamEvent]:
        """As `KVBoost.stream`."""
        alone = request.config.adapters is not None or self.ranks.size > 1  # ranks take requests in one order
        seeded = request.params.seed is not None
        return Stream(self.batch.door(alone, seeded), partial(self._serve, request), cancelled)

    def logits(self, request: Request, continuation: Sequence[int]) -> torch.Tensor:
        """As `KVBoost.logits`."""

        def score(variant: Variant) -> torch.Tensor:
            return variant.server.logits(request.on(self.ranks), continuation)

        return self.worker.call(lambda: self.variants.run(request.config.adapters, score))

    def token_ids(self, request: Request) -> tuple[int, ...]:
        """As `KVBoost.token_ids`."""
        registry = self.variants.resting.registry
        try:
            return token_ids(registry, request)
        except STORE_FAULTS:
            asked = request.prompt, request.documents, request.template
            return locate_without_store(registry.tokens, *asked).token_ids

    def _serve(self, request: Request, emit: Callable[[StreamEvent], None], cancelled: threading.Event) -> None:
        """One request, in the worker, and what others learn from it."""
        request = request.on(self.ranks)
        if request.config.reuse != "off" and (notice := self.notice.take()):
            logger.warning(notice)

        def serve(variant: Variant) -> tuple[Variant, GenerationResult]:
            channel = Channel(lambda text: emit(StreamEvent(text)), cancelled, self.settler.meanwhile(variant, request))
            return variant, variant.server.serve(request, channel)

        variant, result = self.variants.run(request.config.adapters, serve)
        self.afterwards.note(request, result)
        emit(StreamEvent("", result))
        self.settler.note(variant, request, result)

    def wait(self) -> None:
        """Until what was left for later is done."""
        self.worker.call(lambda: None)  # whose last request may not have said yet what it leaves
        self.afterwards.wait()
        self.settler.wait()
