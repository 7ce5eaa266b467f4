"""One call of `generate`, `stream` or `logits`, with every choice made before it is queued."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvboost_rag.chunks.lookup import Messages, document_texts
from kvboost_rag.config import CalibratedDefaults, GenerationParams, ResolvedConfig, ReuseConfig
from kvboost_rag.config.generation import DRAFTS
from kvboost_rag.models.ranks import Ranks
from kvboost_rag.observe.shadow import Shadow
from kvboost_rag.repair import RepairStrategy, strategy_named
from kvboost_rag.serving.drafting import Drafting

_DECODING = ("max_new_tokens", "do_sample", "temperature", "top_p", "repetition_penalty", "seed", "stop", *DRAFTS)
"""Fields of `GenerationParams` that a call may name itself; its `top_k` is a setting of reuse."""


@dataclass(frozen=True)
class Request:
    """One call, checked.

    Attributes:
        started: when the caller called, `time.perf_counter()`.
    """

    prompt: str | Messages
    documents: list[str]
    params: GenerationParams
    config: ResolvedConfig
    strategy: RepairStrategy
    template: dict[str, Any]
    started: float

    def on(self, ranks: Ranks) -> Request:
        """As several ranks can serve it together: nothing that depends on one's time, disk or random numbers."""
        if ranks.size == 1:
            return self
        config = replace(self.config, donors=False, settle=False, shadow_rate=0.0, disk_load="always")
        params = self.params
        if params.do_sample and params.seed is None:
            params = replace(params, seed=ranks.first("seed", lambda: random.getrandbits(62)))
        return replace(self, config=config, params=params)

    def off(self) -> Request:
        """The same, answered by the plain model."""
        return replace(self, config=replace(self.config, reuse="off"))


class RequestMaker:
    """Makes requests of an engine's settings and what a call says.

    Raises:
        ConfigError: the engine's own settings name a strategy that there is not.
    """

    def __init__(
        self, config: ReuseConfig, calibrated: CalibratedDefaults | None, shadow: Shadow, drafting: Drafting
    ) -> None:
        self._config, self._drafting = config, drafting
        self._calibrated = calibrated
        self._shadow = shadow
        if config.repair is not None:
            strategy_named(config.repair)

    def make(
        self,
        prompt: str | Messages,
        documents: Sequence[Any] | None = None,
        params: GenerationParams | None = None,
        repair: str | RepairStrategy | None = None,
        template: dict[str, Any] | None = None,
        **config: Any,
    ) -> Request:
        """The request of a call; the arguments are those of `KVBoost.stream`.

        Raises:
            TypeError, ValueError: documents that are no texts, or a setting that cannot be used.
        """
        started = time.perf_counter()
        decoding = {name: config.pop(name) for name in _DECODING if name in config}
        if decoding := {name: value for name, value in decoding.items() if value is not None}:
            params = replace(_undrafted(params or self._drafting.defaults, decoding), **decoding)
        params = self._drafting.for_call(params)
        resolved, strategy = self._resolve(repair, config)
        return Request(prompt, document_texts(documents), params, resolved, strategy, template or {}, started)

    def _resolve(
        self, repair: str | RepairStrategy | None, config: dict[str, Any]
    ) -> tuple[ResolvedConfig, RepairStrategy]:
        own = repair if isinstance(repair, RepairStrategy) else None
        # With a name, whatever it is, the profile's ratio does not count: it was measured with the profile's strategy.
        name = repair if own is None else own.name
        resolved = self._config.override(repair=name, **config).resolve(calibrated=self._calibrated)
        if self._shadow.tripped and resolved.reuse == "blend":
            resolved = replace(resolved, reuse="exact")
        return resolved, own or strategy_named(resolved.repair, resolved.repair_options)


def _undrafted(params: GenerationParams, named: Mapping[str, Any]) -> GenerationParams:
    """Without what guesses ahead, where a call names something else that does."""
    return replace(params, prompt_lookup_num_tokens=None, assistant_model=None) if named.keys() & DRAFTS else params
