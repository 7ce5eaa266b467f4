"""Everything an engine is made of, constructed in one place."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from kvboost_rag.chunks.donors import Donors
from kvboost_rag.chunks.fetcher import ChunkFetcher
from kvboost_rag.chunks.registry import ChunkRegistry
from kvboost_rag.config import ConfigError, EncodingConfig, GenerationParams, ReuseConfig
from kvboost_rag.encode.encoder import has_experts
from kvboost_rag.forward.probe import ProbeReport
from kvboost_rag.indexing.index import DocumentIndex
from kvboost_rag.indexing.similar_chunks import SimilarChunks
from kvboost_rag.models.adapters import AdapterNames
from kvboost_rag.models.load import LoadedModel
from kvboost_rag.models.profile import ModelProfile, ProfileNotice, load_profile
from kvboost_rag.models.ranks import Ranks
from kvboost_rag.models.unwrap import input_device
from kvboost_rag.models.watch import ModelWatch
from kvboost_rag.observe.idle import IdleJobs
from kvboost_rag.observe.metrics import Metrics
from kvboost_rag.observe.recorder import Recorder
from kvboost_rag.observe.shadow import Shadow, ShadowSample
from kvboost_rag.prompt.tokens import PromptTokens
from kvboost_rag.repair import strategy_named
from kvboost_rag.serving.afterwards import Afterwards
from kvboost_rag.serving.batch import Batch
from kvboost_rag.serving.decode import Decoder
from kvboost_rag.serving.drafting import Drafting
from kvboost_rag.serving.faults import Faults
from kvboost_rag.serving.limits import batch_tokens
from kvboost_rag.serving.requests import RequestMaker
from kvboost_rag.serving.service import Service
from kvboost_rag.serving.settling import Settler
from kvboost_rag.serving.variant_maker import VariantMaker
from kvboost_rag.serving.variants import Variant, Variants
from kvboost_rag.serving.worker import Worker
from kvboost_rag.stores import Store, open_store

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settings:
    """What `KVBoost` was given beside the model; see there."""

    store: Any = None
    config: ReuseConfig | None = None
    encoding: EncodingConfig | None = None
    metrics: Metrics | bool = False
    profile: ModelProfile | Literal["auto"] | None = "auto"
    params: GenerationParams | None = None


@dataclass(frozen=True)
class Parts:
    """The parts of one engine, those of each state of its model in `variants`. Nothing is set in any of them after
    they are constructed.
    """

    profile: ModelProfile | None
    config: ReuseConfig
    encoding: EncodingConfig
    tokens: PromptTokens
    store: Store
    metrics: Recorder
    faults: Faults
    worker: Worker
    shadow: Shadow
    later: IdleJobs
    requests: RequestMaker
    variants: Variants
    service: Service

    def variant(self, adapters: AdapterNames | None) -> Variant:
        """The parts for these adapters, or (None) for the model as it stands."""
        return self.worker.call(lambda: self.variants.run(adapters, lambda variant: variant))

    def close(self) -> None:
        """As `KVBoost.close`."""
        if self.worker.is_inherited:
            return
        self.shadow.close()
        self.later.close()
        self.service.settler.close()
        if self.worker.close():
            self.store.close()


class ModelParts:
    """The parts of an engine that belong to its model as it was last seen between requests: its weights, and the
    adapters that were active.
    """

    _parts: Parts

    @property
    def is_alive(self) -> bool:
        """Whether requests are taken."""
        return self._parts.worker.is_open

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer."""
        return self._parts.variants.resting.server.decoder.eos_token_ids

    @property
    def probe(self) -> ProbeReport:
        """Whether its KV can be reused, and why not."""
        return self._parts.variants.resting.probe

    @property
    def registry(self) -> ChunkRegistry:
        """The known chunks."""
        return self._parts.variants.resting.registry

    @property
    def fetcher(self) -> ChunkFetcher:
        """Their KV."""
        return self._parts.variants.resting.fetcher

    @property
    def index(self) -> DocumentIndex:
        """Documents by source id: add, update, delete."""
        return self._parts.variants.resting.index

    @property
    def similar(self) -> SimilarChunks:
        """What chooses encoding contexts."""
        return self._parts.variants.resting.similar

    @property
    def donors(self) -> Donors:
        """What finds near-duplicates."""
        return self._parts.variants.resting.donors


def build(loaded: LoadedModel, settings: Settings) -> Parts:
    """Make the parts of an engine for a loaded model.

    Raises:
        ConfigError: settings that cannot be used, alone or with this model.
    """
    config = settings.config or ReuseConfig()
    watch = ModelWatch(loaded.model, loaded.tokenizer, loaded.digests)
    fingerprint = watch.state().fingerprint
    profile = _usable(load_profile(fingerprint) if settings.profile == "auto" else settings.profile)
    calibrated = profile.defaults if profile is not None else None
    encoding = (settings.encoding or EncodingConfig()).resolve(calibrated=calibrated)
    if encoding.groups and has_experts(loaded.model):
        raise ConfigError(f"groups=True: {loaded.name} has experts, so a chunk would not come back with the same bits")
    tokens, metrics, worker = (
        PromptTokens(loaded.tokenizer, encoding.min_chunk_tokens),
        _recorder(settings.metrics, loaded.name),
        Worker(f"kvboost-{loaded.name}"),
    )
    shadow = Shadow(loaded.name, lambda: worker.is_idle, partial(_record_shadow, metrics))
    later = IdleJobs(f"kvboost-later-{loaded.name}", lambda: worker.is_idle)
    requests = RequestMaker(config, calibrated, shadow, Drafting(loaded.model, tokens, settings.params))
    store = open_store(settings.store, device=str(input_device(loaded.model)))
    metrics.watch(store)
    decoder, faults = Decoder(loaded.model, tokens, loaded.eos_token_ids), Faults()
    later = IdleJobs(f"kvboost-later-{loaded.name}", lambda: worker.is_idle)
    ranks = Ranks.of(loaded.model)
    maker = VariantMaker(loaded, config, encoding, tokens, store, metrics, worker, decoder, faults, ranks)
    variants = maker.variants(watch)
    wanted = settings.profile == "auto" and variants.resting.probe.reusable
    notice = ProfileNotice(profile, fingerprint, loaded.name, wanted)
    settler = Settler(variants, worker, metrics)
    batch = Batch(loaded.model, worker, batch_tokens(variants.resting.probe))
    service = Service(
        variants, worker, batch, Afterwards(variants, worker, metrics, shadow, later), notice, settler, ranks
    )
    chosen, kept = (profile, config, encoding, tokens), (store, metrics, faults)
    return Parts(*chosen, *kept, worker, shadow, later, requests, variants, service)


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
