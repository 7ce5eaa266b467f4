"""KVBoost: the stages in order, nothing else."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from kvboost_rag.chunks.lookup import Messages, document_texts
from kvboost_rag.config import EncodingConfig, GenerationParams, ReuseConfig
from kvboost_rag.datamodels import GenerationResult, StreamEvent, WarmReport
from kvboost_rag.indexing.warm import WarmProgress, nothing_warmed
from kvboost_rag.models.load import LoadedModel, load_model, with_digests
from kvboost_rag.models.profile import ModelProfile
from kvboost_rag.observe.metrics import Metrics
from kvboost_rag.parts import ModelParts, Settings, build
from kvboost_rag.repair import RepairStrategy
from kvboost_rag.serving.limits import context_tokens
from kvboost_rag.serving.session import Session, whole
from kvboost_rag.serving.stats import EngineStats
from kvboost_rag.serving.worker import Stream

if TYPE_CHECKING:
    import torch


class KVBoost(ModelParts):
    """Answers prompts on a local model, taking documents' KV from a store.

    Args:
        loaded: model and tokenizer (`from_pretrained` loads them).
        store: what `stores.open_store` takes: a `Store` (made by it where budgets matter), a folder (memory over disk),
            `"memory"` or None. On a CUDA model the hottest chunks stay on the device, in a tier above these.
        config: defaults of every call; keywords of a call beat them.
        encoding: how chunks are encoded and kept.
        metrics: True for Prometheus metrics in prometheus_client's own registry, or a `Metrics`.
        profile: what calibration found (`auto`: what is saved); used where no argument or variable says otherwise.
        params: decoding of calls that give none; its `assistant_model` or lookup also of those that name neither.

    Attributes:
        store, metrics, …: the engine's parts; those of `parts.ModelParts` follow the model.

    A model that the probe refuses is served by plain prefill; `engine.probe.reason` says why. One worker thread serves
    all in turn; methods may be called from any thread. Adapters and weights may be changed between requests.
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
        params: GenerationParams | None = None,
    ) -> None:
        parts = self._parts = build(loaded, Settings(store, config, encoding, metrics, profile, params))
        self.model, self.tokenizer, self.name = loaded.model, loaded.tokenizer, loaded.name
        self.config, self.encoding, self.profile = parts.config, parts.encoding, parts.profile
        self.tokens, self.store, self.metrics, self.shadow = parts.tokens, parts.store, parts.metrics, parts.shadow

    @classmethod
    def from_pretrained(cls, model: Any, **options: Any) -> KVBoost:
        """Load a model and make an engine of it: `model` and further options are those of `models.load.load_model`."""
        own = {name: options.pop(name) for name in inspect.signature(cls).parameters if name in options}
        return cls(with_digests(load_model(model, **options)), **own)

    @property
    def context_tokens(self) -> int | None:
        """Tokens that prompt and answer may have together, or None where the model does not say."""
        return context_tokens(self.model)

    def warm(
        self,
        documents: Sequence[Any],
        *,
        neighbours: Literal["auto"] | int | Sequence[Sequence[Any]] | None = "auto",
        embeddings: Any = None,
        namespace: str | None = None,
        progress: Callable[[WarmProgress], None] | None = None,
        encode: bool = True,
        adapter: str | Sequence[str] | None = None,
    ) -> WarmReport:
        """Compute and store the KV of documents; those already stored cost nothing.

        Args:
            documents: chunk texts (or objects with `page_content` or `text`).
            neighbours: what each document is encoded after. `auto`: similar chunks of the namespace and what stands
                before it in its document, as `EncodingConfig` says; a number: so many; None or 0: no chunks; or for
                each the texts, nearest last (or several such lists). Chosen once and kept, unless texts are given.
            embeddings: vectors of the documents, `[num_documents, dim]`, if you have them. Those of a model
                (`embeddings.ModelVectors.made_by`) are compared with all of its own, plain ones with plain ones only.
            namespace: default: the config's.
            progress: called after each chunk.
            encode: False makes the documents known and no more: they are encoded elsewhere, or when first needed.
            adapter: as in `ReuseConfig`.

        Raises:
            TypeError, ValueError: a document, embeddings or neighbours that cannot be used; nothing is encoded then.
        """
        texts, namespace = document_texts(documents), self.config.namespace_or_own(namespace)
        variant = self._parts.variant(self.config.override(adapter=adapter).adapters)
        if not variant.probe.reusable:
            return nothing_warmed(len(texts), variant.probe.reason)
        return variant.warmer.warm(texts, namespace, neighbours, embeddings, progress, encode)

    def register(self, documents: Sequence[Any], *, namespace: str | None = None) -> int:
        """Make documents known: each is encoded when it first stands in a prompt. Returns how many are known now; those
        that cannot be chunks (empty, too long) are passed over."""
        texts, namespace = document_texts(documents), self.config.namespace_or_own(namespace)
        return self.registry.register_all(texts, namespace) if self.probe.reusable else 0

    def prefetch(self, documents: Sequence[Any], *, namespace: str | None = None) -> int:
        """Read documents' stored KV into memory in the background; returns at once how many are known."""
        return self.fetcher.prefetch(document_texts(documents), self.config.namespace_or_own(namespace))

    def generate(self, prompt: str | Messages, **options: Any) -> GenerationResult:
        """The whole answer to a prompt and how it came about; see `stream` for the options."""
        return whole(self.stream(prompt, **options))

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
            cancelled: an event that stops the generation, or takes it out of the queue, when it is set.
            config: fields of `ReuseConfig` (`reuse`, `namespace`, …); of `params` `max_new_tokens`, `seed`, `stop`, ….

        Yields:
            Text deltas; the last event carries the result.

        Raises:
            TypeError, ValueError: bad input, before any work starts; `ContextOverflowError` if the prompt is too long.
        """
        request = self._parts.requests.make(prompt, documents, params, repair, template, **config)
        return self._parts.service.stream(request, cancelled)

    def logits(self, prompt: str | Messages, continuation: Sequence[int] = (), **options: Any) -> torch.Tensor:
        """Logits after the prompt and after each token id of a given continuation, float32 `[len(continuation) + 1,
        vocab_size]`: how far reuse is from full prefill. Prompt and options as in `stream`."""
        return self._parts.service.logits(self._parts.requests.make(prompt, **options), continuation)

    def token_ids(self, prompt: str | Messages, **options: Any) -> tuple[int, ...]:
        """A prompt's ids as serving it would have them: for counting, too. Prompt and options as in `stream`."""
        return self._parts.service.token_ids(self._parts.requests.make(prompt, **options))

    def profile_notice(self) -> str | None:
        """What the model runs on where that is not a profile it passed; None if that was said already."""
        return self._parts.service.notice.take()

    def session(self, messages: Messages | str = (), **options: Any) -> Session:
        """A conversation (messages or plain text) whose turns reuse what those before left; options as in `stream`."""
        return Session(self.stream, messages, **options)

    def evict(self, documents: Sequence[Any], *, namespace: str | None = None) -> int:
        """Forget documents: text, KV in every tier, exact blocks that may hold them. Returns how many were known."""
        texts, namespace = document_texts(documents), self.config.namespace_or_own(namespace)
        return self._parts.variants.resting.warmer.evict(texts, namespace)

    def refresh(self) -> bool:
        """Read the whole model again, for changes that no request notices (docs/models.md); True if there were any."""
        return self._parts.worker.call(self._parts.variants.refresh)

    def stats(self) -> EngineStats:
        """Counters and bytes held; cheap."""
        return EngineStats.of(self._parts.faults, self.store, self.shadow, self._parts.service.settler.num_tokens)

    def finish_background(self) -> None:
        """Wait until turns are settled, and what donors stood in for is encoded."""
        self._parts.service.wait()

    def stop_settling(self) -> int:
        """Leave served turns as far as they are settled; returns how many were not done."""
        return self._parts.service.settler.cancel()

    def close(self) -> None:
        """Finish the running request, drop queued ones, close the store. Does nothing twice, or in a forked child."""
        self._parts.close()

    def __enter__(self) -> KVBoost:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
