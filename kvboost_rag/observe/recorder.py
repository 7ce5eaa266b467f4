"""What the stages report. `Recorder` itself forgets it: what an engine has that was asked for no metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvboost_rag.datamodels import GenerationResult
    from kvboost_rag.stores.base import Store


class Recorder:
    """Takes note of requests, chunks and comparisons. Thread-safe."""

    def record(self, result: GenerationResult) -> None:
        """One finished request."""

    def record_encoded(self, meta: Mapping[str, str]) -> None:
        """One encoded chunk, by the meta strings that `quantization.encode` returned."""

    def record_decision(self, load: bool) -> None:
        """One choice between loading a chunk from disk and computing it again."""

    def record_shadow(self, kl: float, agreement: float) -> None:
        """One comparison of a served answer with full prefill: mean KL in nats, share of agreeing tokens."""

    def record_settled(self, num_tokens: int) -> None:
        """Tokens of served turns that were recomputed while the engine was idle."""

    def watch(self, store: Store) -> None:
        """A store whose bytes, lookups and evictions are of interest."""
