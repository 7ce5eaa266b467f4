"""Makes the parts of an engine that belong to one state of its model."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kvboost_rag.chunks.donors import Donors
from kvboost_rag.chunks.fetcher import ChunkFetcher
from kvboost_rag.chunks.identity import ChunkIdentity
from kvboost_rag.chunks.prefix_cache import PrefixCache
from kvboost_rag.chunks.registry import ChunkRegistry
from kvboost_rag.chunks.turns import ServedTurns
from kvboost_rag.config import ConfigError, EncodingConfig, ReuseConfig
from kvboost_rag.encode.encoder import Encoder
from kvboost_rag.forward.probe import ProbeReport, forget_probe, probe
from kvboost_rag.indexing.index import DocumentIndex
from kvboost_rag.indexing.similar_chunks import SimilarChunks
from kvboost_rag.indexing.warmer import Warmer
from kvboost_rag.models.adapters import AdapterNames
from kvboost_rag.models.load import LoadedModel
from kvboost_rag.models.ranks import Ranks
from kvboost_rag.models.watch import ModelState, ModelWatch
from kvboost_rag.observe.recorder import Recorder
from kvboost_rag.prompt.tokens import PromptTokens
from kvboost_rag.serving.decode import Decoder
from kvboost_rag.serving.faults import Faults
from kvboost_rag.serving.limits import reuse_limit
from kvboost_rag.serving.pipeline import Pipeline, PlainPrefill
from kvboost_rag.serving.server import Server
from kvboost_rag.serving.variants import Variant, Variants
from kvboost_rag.serving.worker import Worker
from kvboost_rag.stores import Store
from kvboost_rag.stores.heads import WHOLE, Heads

logger = logging.getLogger(__name__)


@dataclass
class VariantMaker:
    """What all states of a model share, and how the rest is made of it."""

    loaded: LoadedModel
    config: ReuseConfig
    encoding: EncodingConfig
    tokens: PromptTokens
    store: Store
    metrics: Recorder
    worker: Worker
    decoder: Decoder
    faults: Faults
    ranks: Ranks = field(default_factory=Ranks)
    _probed: int = field(default=0, init=False)

    def variants(self, watch: ModelWatch) -> Variants:
        """The states that `watch` sees, each with its parts."""
        return Variants(watch, self._make)

    def _make(self, variants: Variants, state: ModelState, adapters: AdapterNames) -> Variant:
        loaded, encoding, config = self.loaded, self.encoding, self.config
        report = self._probe(state)
        identity = ChunkIdentity.of(state.fingerprint, self.tokens, encoding, reuse_limit(loaded.model, report))
        registry = ChunkRegistry(self.store, self.tokens, identity, variants.fingerprints)
        encoder = Encoder(loaded.model, report.layout) if report.layout is not None else None
        heads = self._heads(report)
        fetcher = ChunkFetcher(registry, encoder, self.metrics, None, heads, self.ranks)
        similar = SimilarChunks(registry, encoding.embedder, encoding.siblings)
        donors = Donors(fetcher, encoding.donor_rules)
        run_as = partial(variants.run_as, state.fingerprint, adapters)
        warmer = Warmer(
            fetcher, similar, donors, encoding, lambda: config.resolve().donors, partial(self._between_requests, run_as)
        )
        pipeline = self._pipeline(report, donors)
        return Variant(
            state=state,
            adapters=adapters,
            probe=report,
            registry=registry,
            fetcher=fetcher,
            similar=similar,
            donors=donors,
            warmer=warmer,
            index=DocumentIndex(registry, warmer, config.namespace),
            server=Server(loaded.model, fetcher, pipeline, self.decoder, self.faults),
        )

    def _between_requests(self, run: Callable[[Callable[[], Any]], Any], job: Callable[[], Any]) -> Any:
        return self.worker.call(lambda: run(job))

    def _probe(self, state: ModelState) -> ProbeReport:
        if state.reason is not None:
            return ProbeReport(False, state.reason)
        if state.weights != self._probed:
            forget_probe(self.loaded.model)
            self._probed = state.weights
        report = probe(self.loaded.model)
        if self.ranks.size > 1 and report.layout is not None:
            if len({group.num_kv_heads for group in report.layout.groups}) > 1:
                return ProbeReport(False, "its layers have different numbers of heads, and several ranks share them")
            if self.encoding.sensitivity or (self.encoding.quantization or "none") != "none":
                raise ConfigError("several ranks keep KV by heads: neither quantised nor with context sensitivity")
        return report

    def _heads(self, report: ProbeReport) -> Heads:
        """The heads whose KV lives here."""
        counts = {group.num_kv_heads for group in report.layout.groups} if report.layout is not None else set()
        if len(counts) != 1:
            return WHOLE
        (count,) = counts
        return Heads(self.ranks.index * count, count, self.ranks.size * count)

    def _pipeline(self, report: ProbeReport, donors: Donors) -> PlainPrefill:
        if not report.reusable:
            logger.warning("%s is served by plain prefill: %s", self.loaded.name, report.reason)
            return PlainPrefill()
        registry = donors.registry
        prefixes = PrefixCache(
            self.store,
            self.loaded.model,
            registry.fingerprint,
            self.encoding.block_tokens,
            donors.fetcher.heads,
            self.ranks,
        )
        return Pipeline(self.loaded.model, report, donors, prefixes, ServedTurns(prefixes))
