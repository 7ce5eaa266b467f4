"""KVBoost: the stages in order, nothing else."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from kvboost_rag.chunks.donors import Donors
from kvboost_rag.chunks.library import ChunkIdentity, ChunkLibrary
from kvboost_rag.chunks.lookup import Messages, document_texts
from kvboost_rag.chunks.prefix_cache import PrefixCache
from kvboost_rag.config import (
    CalibratedDefaults,
    ConfigError,
    EncodingConfig,
    GenerationParams,
    ReuseConfig,
    check_namespace,
)
from kvboost_rag.datamodels import GenerationResult, HitKind, StreamEvent, WarmReport
from kvboost_rag.encode.encoder import Encoder, has_experts
from kvboost_rag.forward.probe import ProbeReport, probe
from kvboost_rag.indexing.index import DocumentIndex
from kvboost_rag.indexing.similar_chunks import SimilarChunks
from kvboost_rag.indexing.warm import WarmProgress, neighbour_choice, nothing_encoded, register_documents, warm
from kvboost_rag.kv.keys import model_fingerprint
from kvboost_rag.models.load import LoadedModel, load_model
from kvboost_rag.models.profile import ModelProfile, load_profile, say_once
from kvboost_rag.observe.divergence import kl_per_token
from kvboost_rag.observe.idle import IdleJobs
from kvboost_rag.observe.metrics import Metrics
from kvboost_rag.observe.shadow import MAX_ANSWER_TOKENS, Shadow, ShadowSample, ShadowStats
from kvboost_rag.prompt.tokens import PromptTokens
from kvboost_rag.repair import STRATEGIES, NoRepair, RepairStrategy
from kvboost_rag.serving.decode import Decoder
from kvboost_rag.serving.pipeline import Pipeline
from kvboost_rag.serving.server import Request, Server, context_tokens, reuse_limit
from kvboost_rag.serving.worker import Stream, Worker
from kvboost_rag.stores import Store, open_store
from kvboost_rag.stores.catalog.arrays_file import ArraysFile

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineStats:
    """Counters since the engine was made. `fallbacks` by reason; `bytes_held` by tier."""

    requests: int
    fallbacks: dict[str, int]
    store_lookups: int
    store_hits: int
    store_misses: int
    rejected: dict[str, int]
    evictions: dict[str, int]
    bytes_held: dict[str, int]
    num_chunks_known: int
    shadow: ShadowStats


class KVBoost:
    """Answers prompts on a local model, taking documents' KV from a store.

    Args:
        loaded: model and tokenizer (`from_pretrained` loads them).
        store: what `stores.open_store` takes: a `Store` (made by it where budgets matter), a folder (memory over disk),
            `"memory"` or None. On a CUDA model the hottest chunks stay on the device, in a tier above these.
        config: defaults of every call; keywords of a call beat them.
        encoding: how chunks are encoded and kept.
        metrics: True for Prometheus metrics in prometheus_client's own registry, or a `Metrics`.
        profile: what calibration found for the model; `auto` reads what `kvboost-rag calibrate` saved, None goes
            without. Used where neither arguments nor environment say otherwise.

    Attributes:
        index: documents by source id: add, update, delete.

    A model that the probe refuses is served by plain prefill; `engine.probe.reason` says why. One worker thread
    serves all callers in turn; every method may be called from any thread.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        store: Any = None,
        config: ReuseConfig | None = None,
        encoding: EncodingConfig | None = None,
        metrics: Metrics | bool = False,
        profile: ModelProfile | Literal["auto"] | None = "auto",
    ) -> None:
        self.model, self.tokenizer, self.name = loaded.model, loaded.tokenizer, loaded.name
        self.config = config or ReuseConfig()
        fingerprint = model_fingerprint(self.model, self.tokenizer)
        self._profile_given = profile != "auto"
        self.profile = load_profile(fingerprint) if profile == "auto" else profile
        self.encoding = (encoding or EncodingConfig()).resolve(calibrated=self._calibrated)
        if self.encoding.groups and has_experts(self.model):
            raise ConfigError(
                f"groups=True: {self.name} has experts, so a chunk would not come back with the same bits"
            )
        self.tokens = PromptTokens(self.tokenizer)
        self.probe: ProbeReport = probe(self.model)
        self.store: Store = open_store(store, device=str(self.model.device))
        self.metrics = Metrics(self.name) if metrics is True else metrics or None
        if self.metrics is not None:
            self.metrics.watch(self.store)
        self._worker = Worker(f"kvboost-{self.name}")
        self.shadow = Shadow(self.name, lambda: self._worker.is_idle, self._record_shadow)
        self._later = IdleJobs(f"kvboost-later-{self.name}", lambda: self._worker.is_idle)
        identity = ChunkIdentity.of(fingerprint, self.tokens, self.encoding, reuse_limit(self.model, self.probe))
        encoder = Encoder(self.model, self.probe.layout) if self.probe.layout is not None else None
        self.library = ChunkLibrary(self.store, encoder, self.tokens, identity)
        self.library.metrics = self.metrics
        self._arrays = ArraysFile(self.store.catalog.database.path)
        self.similar = SimilarChunks(self.library, self._arrays, self.encoding.embedder)
        self.donors = Donors(self.library, self._arrays, self.encoding.donor_rules)
        self.index = DocumentIndex(self.library, self.warm, self._forget, self.config.namespace)
        pipeline: Pipeline | None = None
        if self.probe.layout is None:
            logger.warning("%s is served by plain prefill: %s", self.name, self.probe.reason)
        else:
            prefixes = PrefixCache(self.store, self.model, fingerprint, self.encoding.block_tokens)
            pipeline = Pipeline(self.model, self.probe.layout, self.donors, prefixes)
        decoder = Decoder(self.model, self.tokens, loaded.eos_token_ids)
        self._server = Server(self.model, self.probe, self.library, pipeline, decoder)

    @classmethod
    def from_pretrained(
        cls,
        model: Any,
        *,
        store: Any = None,
        config: ReuseConfig | None = None,
        encoding: EncodingConfig | None = None,
        metrics: Metrics | bool = False,
        profile: ModelProfile | Literal["auto"] | None = "auto",
        **load: Any,
    ) -> KVBoost:
        """Load a model and make an engine of it; `model` and `load` are those of `models.load.load_model`."""
        loaded = load_model(model, **load)
        return cls(loaded, store=store, config=config, encoding=encoding, metrics=metrics, profile=profile)

    @property
    def context_tokens(self) -> int | None:
        """Tokens that prompt and answer may have together, or None where the model does not say."""
        return context_tokens(self.model)

    def warm(
        self,
        documents: Sequence[Any],
        *,
        neighbours: Literal["auto"] | int | Sequence[Sequence[str]] | None = "auto",
        embeddings: Any = None,
        namespace: str | None = None,
        progress: Callable[[WarmProgress], None] | None = None,
        encode: bool = True,
    ) -> WarmReport:
        """Compute and store the KV of documents; those already stored cost nothing.

        Args:
            documents: chunk texts (or objects with `page_content` or `text`).
            neighbours: what each document is encoded behind. `auto`: the most similar chunks, as many as
                `EncodingConfig.neighbours` says; a number: so many; None or 0: no chunks; or for each document the
                texts, nearest last. Chosen for a chunk once and then kept, unless texts are given.
            embeddings: vectors of the documents, `[num_documents, dim]`, if you have them; else they are embedded.
            namespace: whose chunks; default: the config's.
            progress: called after each chunk.
            encode: False leaves it at making the documents known with their encoding contexts: they are encoded by
                another process, or when they first stand in a prompt.

        Raises:
            TypeError, ValueError: a document that cannot be a chunk, or embeddings or neighbours that do not fit the
                documents; nothing has been encoded then.
        """
        texts = document_texts(documents)
        namespace = self._namespace_of(namespace)
        if not self.probe.reusable:
            logger.warning("nothing was warmed: %s", self.probe.reason)
            return WarmReport(len(texts), 0, 0, len(texts), 0, 0, 0, 0.0)
        count, given = neighbour_choice(neighbours, self.encoding.neighbours or 0)
        records = register_documents(self.library, texts, given, namespace)
        if count:
            records = self.similar.assign(records, count, embeddings, namespace, self.encoding.groups)
        if self.config.resolve().donors:  # now, so that no request has to wait for it
            self.donors.update(namespace)
        if not encode:
            return nothing_encoded(records)
        # Chunk by chunk, so that requests are served in between.
        return warm(self.library, records, progress, run=self._worker.call)

    def register(self, documents: Sequence[Any], *, namespace: str | None = None) -> int:
        """Make documents known without encoding them: each is encoded when it first stands in a prompt.

        Returns:
            How many of them are known now; those that cannot be chunks (empty, too long) are passed over.
        """
        namespace = self._namespace_of(namespace)
        if not self.probe.reusable:
            return 0
        return self.library.register_all(document_texts(documents), namespace)

    def prefetch(self, documents: Sequence[Any], *, namespace: str | None = None) -> int:
        """Say that documents will stand in a prompt soon: their stored KV is read into memory in the background.

        Returns:
            How many of them are known. Returns at once, and never computes anything.
        """
        namespace = self._namespace_of(namespace)
        known = self.library.known_texts(namespace)
        keys = [key for text in document_texts(documents) if (key := known.key_of(text)) is not None]
        self.store.prefetch(dict.fromkeys(keys))
        return len(keys)

    def generate(self, prompt: str | Messages, **options: Any) -> GenerationResult:
        """Answer a prompt; see `stream` for the options.

        Returns:
            The whole answer and how it came about.
        """
        result = None
        with closing(self.stream(prompt, **options)) as events:  # Ctrl-C here stops the generation as well
            for event in events:
                result = event.result
        if result is None:
            raise RuntimeError("the request ended without a result")
        return result

    def stream(
        self,
        prompt: str | Messages,
        *,
        documents: Sequence[Any] | None = None,
        params: GenerationParams | None = None,
        repair: str | RepairStrategy | None = None,
        template: dict[str, Any] | None = None,
        cancelled: threading.Event | None = None,
        **config: Any,
    ) -> Stream[StreamEvent]:
        """Answer a prompt piece by piece. Closing the iterator stops the generation.

        Args:
            prompt: text, or chat messages (`[{"role": …, "content": …}]`) for the tokenizer's chat template.
            documents: texts that may stand in the prompt and are to be reused, indexed or not; they add no text.
            params: decoding parameters.
            repair: name of a strategy, or a strategy with parameters of its own.
            template: arguments for the chat template (`tools`, …).
            cancelled: an event that stops the generation when it is set, from whatever thread; a request that is still
                queued then is never served.
            config: fields of `ReuseConfig` for this call (`reuse`, `recompute_ratio`, `namespace`, …).

        Yields:
            Text deltas; the last event carries the result.

        Raises:
            TypeError, ValueError: bad input, before any work starts; `ContextOverflowError` if the prompt is too long.
        """
        request = self._request(prompt, documents, params, repair, template, **config)
        return Stream(self._worker, partial(self._serve, request), cancelled)

    def _request(
        self,
        prompt: str | Messages,
        documents: Sequence[Any] | None = None,
        params: GenerationParams | None = None,
        repair: str | RepairStrategy | None = None,
        template: dict[str, Any] | None = None,
        **config: Any,
    ) -> Request:
        started = time.perf_counter()
        strategy = repair if isinstance(repair, RepairStrategy) else None
        # A strategy of the caller's own is no name that a config knows; without any, the profile's ratio would count.
        name = repair if strategy is None else strategy.name if strategy.name in STRATEGIES else NoRepair.name
        resolved = self.config.override(repair=name, **config).resolve(calibrated=self._calibrated)
        if self.shadow.tripped and resolved.reuse == "blend":
            resolved = replace(resolved, reuse="exact")
        if strategy is None:
            if resolved.repair not in STRATEGIES:
                raise ConfigError(f"repair={resolved.repair!r} is not available; known: {', '.join(STRATEGIES)}")
            strategy = STRATEGIES[resolved.repair](**resolved.repair_options)
        return Request(
            prompt, document_texts(documents), params or GenerationParams(), resolved, strategy, template or {}, started
        )

    def _namespace_of(self, namespace: str | None) -> str:
        return self.config.namespace if namespace is None else check_namespace(namespace)

    @property
    def _calibrated(self) -> CalibratedDefaults | None:
        return self.profile.defaults if self.profile is not None else None

    def _serve(self, request: Request, emit: Callable[[StreamEvent], None], cancelled: threading.Event) -> None:
        """One request, in the worker, and what others learn from it."""
        self._announce(request)
        result = self._server.serve(request, lambda text: emit(StreamEvent(text)), cancelled)
        if self.metrics is not None:
            self.metrics.record(result)
        if result.reuse == "blend":
            self.shadow.offer(
                lambda: self._compare_with_full(request, result.token_ids[:MAX_ANSWER_TOKENS]),
                request.config.shadow_rate,
                request.config.shadow_max_kl,
            )
        self._encode_later(result)
        emit(StreamEvent("", result))

    def _encode_later(self, result: GenerationResult) -> None:
        """What a donor stood in for gets its own KV when nobody is waiting."""
        for key in {s.content_hash for s in result.segments if s.hit is HitKind.DONOR and s.content_hash}:
            self._later.offer(key, partial(self._encode_now, key))

    def _encode_now(self, content_hash: str) -> None:
        record = self.store.catalog.get(content_hash)
        if record is not None:
            self._worker.call(partial(self.library.fetch, record))

    def profile_notice(self) -> str | None:
        """What the model runs on where that is not a profile it passed; None if that was said in this process."""
        if self._profile_given or not self.probe.reusable:
            return None
        return say_once(self.profile, self.library.fingerprint, self.name)

    def _announce(self, request: Request) -> None:
        """Log the notice when it begins to matter, unless somebody showed it already."""
        if request.config.reuse != "off" and (notice := self.profile_notice()):
            logger.warning(notice)

    def logits(self, prompt: str | Messages, continuation: Sequence[int] = (), **options: Any) -> torch.Tensor:
        """Logits behind the prompt and behind each token of a given continuation: how far reuse is from full prefill.

        Args:
            prompt, options: as in `stream`.
            continuation: token ids, teacher-forced.

        Returns:
            Float32 `[len(continuation) + 1, vocab_size]`.
        """
        return self._logits(self._request(prompt, **options), continuation)

    def _logits(self, request: Request, continuation: Sequence[int]) -> torch.Tensor:
        return self._worker.call(lambda: self._server.logits(request, continuation))

    def _compare_with_full(self, request: Request, answer: Sequence[int]) -> ShadowSample:
        """A served request once more, by reuse and by full prefill, along the answer that was given."""
        ours = self._logits(request, answer[:-1])
        full = self._logits(replace(request, config=replace(request.config, reuse="off")), answer[:-1])
        kl = kl_per_token(full, ours)
        agreement = float((full.argmax(-1) == ours.argmax(-1)).float().mean())
        return ShadowSample(float(kl[0]), float(kl.mean()), agreement)

    def _record_shadow(self, sample: ShadowSample) -> None:
        if self.metrics is not None:
            self.metrics.record_shadow(sample.kl_mean, sample.agreement)

    def evict(self, documents: Sequence[Any], *, namespace: str | None = None) -> int:
        """Forget documents: their text, their KV in every tier, and exact blocks, which may hold their tokens.

        Returns:
            How many were known.
        """
        namespace = self._namespace_of(namespace)
        keys = [self.library.describe(text, namespace).content_hash for text in document_texts(documents)]
        return self._forget(keys, namespace)

    def _forget(self, content_hashes: Sequence[str], namespace: str) -> int:
        known = self._worker.call(lambda: self.library.forget(content_hashes))
        self.similar.forget(content_hashes, namespace)
        return known

    def stats(self) -> EngineStats:
        """Counters and bytes held; cheap."""
        stats = self.store.stats
        return EngineStats(
            requests=self._server.counts["requests"],
            fallbacks={
                k.removeprefix("fallback:"): n for k, n in self._server.counts.items() if k.startswith("fallback:")
            },
            store_lookups=stats.lookups,
            store_hits=stats.hits,
            store_misses=stats.misses,
            rejected=dict(stats.rejected),
            evictions=dict(stats.evictions),
            bytes_held=dict(self.store.bytes_held),
            num_chunks_known=len(self.store.catalog),
            shadow=self.shadow.stats(),
        )

    def finish_background(self) -> None:
        """Wait until the work that was left for later is done: KV of chunks that a donor stood in for."""
        self._later.wait()

    def close(self) -> None:
        """Finish the running request, drop queued ones, flush and close the store.

        Closing twice does nothing, and neither does closing in a forked child, where all that is the parent's.
        """
        if self._worker.is_inherited:
            return
        self.shadow.close()
        self._later.close()
        if self._worker.close():
            self._arrays.close()
            self.store.close()

    def __enter__(self) -> KVBoost:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
