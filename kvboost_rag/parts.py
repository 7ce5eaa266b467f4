"""Everything an engine is made of, constructed in one place."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from kvboost_rag.chunks.donors import Donors
from kvboost_rag.chunks.fetcher import ChunkFetcher
from kvboost_rag.chunks.identity import ChunkIdentity
from kvboost_rag.chunks.prefix_cache import PrefixCache
from kvboost_rag.chunks.registry import ChunkRegistry
from kvboost_rag.config import ConfigError, EncodingConfig, ReuseConfig
from kvboost_rag.encode.encoder import Encoder, has_experts
from kvboost_rag.forward.probe import ProbeReport, probe
from kvboost_rag.indexing.index import DocumentIndex
from kvboost_rag.indexing.similar_chunks import SimilarChunks
from kvboost_rag.indexing.warmer import Warmer
from kvboost_rag.kv.keys import model_fingerprint
from kvboost_rag.models.load import LoadedModel
from kvboost_rag.models.profile import ModelProfile, ProfileNotice, load_profile
from kvboost_rag.observe.idle import IdleJobs
from kvboost_rag.observe.metrics import Metrics
from kvboost_rag.observe.recorder import Recorder
from kvboost_rag.observe.shadow import Shadow, ShadowSample
from kvboost_rag.prompt.tokens import PromptTokens
from kvboost_rag.repair import strategy_named
from kvboost_rag.serving.afterwards import Afterwards
from kvboost_rag.serving.decode import Decoder
from kvboost_rag.serving.limits import reuse_limit
from kvboost_rag.serving.pipeline import Pipeline, PlainPrefill
from kvboost_rag.serving.requests import RequestMaker
from kvboost_rag.serving.server import Server
from kvboost_rag.serving.service import Service
from kvboost_rag.serving.worker import Worker
from kvboost_rag.stores import Store, open_store
from kvboost_rag.stores.catalog.arrays_file import ArraysFile

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settings:
    """What `KVBoost` was given beside the model; see there."""

    store: Any = None
    config: ReuseConfig | None = None
    encoding: EncodingConfig | None = None
    metrics: Metrics | bool = False
    profile: ModelProfile | Literal["auto"] | None = "auto"


@dataclass(frozen=True)
class Chosen:
    """What settings, environment, profile and probe came to."""

    profile: ModelProfile | None
    config: ReuseConfig
    encoding: EncodingConfig
    probe: ProbeReport


@dataclass(frozen=True)
class Parts:
    """The parts of one engine. Nothing is set in any of them after they are constructed."""

    chosen: Chosen
    store: Store
    arrays: ArraysFile
    metrics: Recorder
    worker: Worker
    shadow: Shadow
    later: IdleJobs
    fetcher: ChunkFetcher
    warmer: Warmer
    index: DocumentIndex
    requests: RequestMaker
    service: Service

    def close(self) -> None:
        """As `KVBoost.close`."""
        if self.worker.is_inherited:
            return
        self.shadow.close()
        self.later.close()
        if self.worker.close():
            self.arrays.close()
            self.store.close()


def build(loaded: LoadedModel, settings: Settings) -> Parts:
    """Make the parts of an engine for a loaded model.

    Raises:
        ConfigError: settings that cannot be used, alone or with this model.
    """
    config = settings.config or ReuseConfig()
    fingerprint = model_fingerprint(loaded.model, loaded.tokenizer)
    profile = _usable(load_profile(fingerprint) if settings.profile == "auto" else settings.profile)
    calibrated = profile.defaults if profile is not None else None
    encoding = (settings.encoding or EncodingConfig()).resolve(calibrated=calibrated)
    if encoding.groups and has_experts(loaded.model):
        raise ConfigError(f"groups=True: {loaded.name} has experts, so a chunk would not come back with the same bits")
    report = probe(loaded.model)
    metrics = _recorder(settings.metrics, loaded.name)
    worker = Worker(f"kvboost-{loaded.name}")
    shadow = Shadow(loaded.name, lambda: worker.is_idle, partial(_record_shadow, metrics))
    later = IdleJobs(f"kvboost-later-{loaded.name}", lambda: worker.is_idle)
    requests = RequestMaker(config, calibrated, shadow)
    store = open_store(settings.store, device=str(loaded.model.device))
    metrics.watch(store)
    fetcher = _fetcher(loaded, fingerprint, report, store, encoding, metrics)
    arrays = ArraysFile(store.catalog.database.path)
    similar = SimilarChunks(fetcher.registry, arrays, encoding.embedder)
    donors = Donors(fetcher, arrays, encoding.donor_rules)
    warmer = Warmer(fetcher, similar, donors, encoding, lambda: config.resolve().donors, worker.call)
    index = DocumentIndex(fetcher.registry, warmer, config.namespace)
    decoder = Decoder(loaded.model, fetcher.registry.tokens, loaded.eos_token_ids)
    server = Server(loaded.model, fetcher, _pipeline(loaded, report, donors, encoding), decoder)
    notice = ProfileNotice(profile, fingerprint, loaded.name, settings.profile == "auto" and report.reusable)
    service = Service(server, worker, Afterwards(server, worker, metrics, shadow, later), notice)
    chosen = Chosen(profile, config, encoding, report)
    return Parts(chosen, store, arrays, metrics, worker, shadow, later, fetcher, warmer, index, requests, service)


def _fetcher(
    loaded: LoadedModel,
    fingerprint: str,
    report: ProbeReport,
    store: Store,
    encoding: EncodingConfig,
    metrics: Recorder,
) -> ChunkFetcher:
    tokens = PromptTokens(loaded.tokenizer)
    identity = ChunkIdentity.of(fingerprint, tokens, encoding, reuse_limit(loaded.model, report))
    encoder = Encoder(loaded.model, report.layout) if report.layout is not None else None
    return ChunkFetcher(ChunkRegistry(store, tokens, identity), encoder, metrics)


def _usable(profile: ModelProfile | None) -> ModelProfile | None:
    """The profile, unless it names a strategy that there is not: a model must start all the same."""
    if profile is not None:
        try:
            strategy_named(profile.defaults.repair, profile.defaults.repair_options)
        except ConfigError as error:
            logger.warning("the profile of %s is ignored: %s", profile.model, error)
            return None
    return profile


def _recorder(metrics: Metrics | bool, name: str) -> Recorder:
    if isinstance(metrics, Recorder):
        return metrics
    return Metrics(name) if metrics else Recorder()


def _record_shadow(metrics: Recorder, sample: ShadowSample) -> None:
    metrics.record_shadow(sample.kl_mean, sample.agreement)


def _pipeline(loaded: LoadedModel, report: ProbeReport, donors: Donors, encoding: EncodingConfig) -> PlainPrefill:
    if not report.reusable:
        logger.warning("%s is served by plain prefill: %s", loaded.name, report.reason)
        return PlainPrefill()
    registry = donors.registry
    prefixes = PrefixCache(registry.store, loaded.model, registry.fingerprint, encoding.block_tokens)
    return Pipeline(loaded.model, report, donors, prefixes)
