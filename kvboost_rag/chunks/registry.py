"""The chunks that are known: their texts, token ids and encoding contexts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from kvboost_rag.chunks.identity import ChunkIdentity
from kvboost_rag.datamodels import ChunkRecord, EntryCheck
from kvboost_rag.encode.encoder import ChunkJob
from kvboost_rag.kv.keys import content_hash, encoding_contexts, record_context_hash
from kvboost_rag.prompt.segments import KnownTexts, canonical_text, split_prompt
from kvboost_rag.prompt.tokens import PromptTokens
from kvboost_rag.stores import StoreError, maintenance
from kvboost_rag.stores.base import Store
from kvboost_rag.stores.catalog.catalog import CatalogVersion


@dataclass
class _Known:
    texts: KnownTexts = field(default_factory=KnownTexts)
    version: CatalogVersion = field(default_factory=lambda: CatalogVersion(0, 0))
    models: set[str] = field(default_factory=set)


class ChunkRegistry:
    """Makes texts known as chunks of one model, and knows them again in prompts.

    The catalog fixes a chunk's encoding context when it is first registered, so that its KV is a pure function of
    (chunk tokens, encoding context, model). Thread-safe.

    Args:
        relatives: fingerprints of the same model in other states (other adapters, other weights): their texts are
            known here too, and become chunks of this state when they are met (`own`).
    """

    def __init__(
        self,
        store: Store,
        tokens: PromptTokens,
        identity: ChunkIdentity,
        relatives: Callable[[], Iterable[str]] = tuple,
    ) -> None:
        self.store = store
        self.tokens = tokens
        self.identity = identity
        self._relatives = relatives
        self._known: dict[str, _Known] = {}
        self._lock = threading.Lock()

    @property
    def fingerprint(self) -> str:
        """Of the model."""
        return self.identity.fingerprint

    def known_texts(self, namespace: str) -> KnownTexts:
        """Texts of the namespace's chunks, up to date with what this and other processes added and removed."""
        catalog = self.store.catalog
        with self._lock:
            version = catalog.version()
            known = self._known.setdefault(namespace, _Known())
            models = dict.fromkeys((*self._relatives(), self.fingerprint))
            if known.version != version or not known.models.issuperset(models):
                if known.version.removals != version.removals:
                    known.texts.keep_only(catalog.hashes(namespace))
                for model in models:  # its own last: their keys are the ones that count
                    after = known.version.last_seq if model in known.models else 0
                    for _, key, text in catalog.texts(model, namespace, after=after):
                        if model == self.fingerprint or known.texts.key_of(text) is None:
                            known.texts.add(text, key)
                known.version, known.models = version, set(models)
            return known.texts

    def text_ids(self, text: str, namespace: str) -> tuple[int, ...]:
        """Ids of a text as it is continued in a prompt: those of the tokenizer, but for documents that spell out
        control tokens.
        """
        try:
            known = self.known_texts(namespace)
        except (OSError, StoreError):  # counting must not fail because the catalog cannot be read
            known = KnownTexts()
        return self.tokens.prompt_ids(split_prompt(text, known) if text else (), rendered=True)[0]

    def own(self, record: ChunkRecord) -> ChunkRecord:
        """The chunk of this model with a relative's text: after the same chunks, and of the same sources."""
        if record.fingerprint == self.fingerprint:
            return record
        catalog, namespace = self.store.catalog, record.namespace
        key = content_hash(self.fingerprint, namespace, record.token_ids)
        known = catalog.get(key)
        if known is not None:
            return known
        behind = catalog.neighbour_tokens(record)
        neighbours = tuple(content_hash(self.fingerprint, namespace, ids) for ids in behind)
        copy = replace(record, content_hash=key, fingerprint=self.fingerprint, neighbours=neighbours)
        catalog.restore(copy, behind)
        for source in catalog.sources.of_chunk(record.content_hash):
            before = catalog.sources.chunks_of(namespace, source, self.fingerprint)
            catalog.sources.link(self.fingerprint, namespace, source, (*before, key))
        return copy

    def twins(self, content_hashes: Iterable[str]) -> list[str]:
        """The same texts as chunks of other models, or of this one in another state, that belong to no source which
        does not have these.
        """
        catalog, found = self.store.catalog, []
        for record in catalog.get_many(content_hashes).values():
            owners = set(catalog.sources.of_chunk(record.content_hash))
            others = (key for key in self._in_all_models(record) if key != record.content_hash)
            found += [key for key in others if owners.issuperset(catalog.sources.of_chunk(key))]
        return found

    def given(self, text: str, namespace: str) -> ChunkRecord:
        """The chunk that a document of one call is: as it is indexed, or else one that the catalog does not learn of.

        Its KV is stored under the same key either way, marked (`datamodels.GIVEN`) where nothing is indexed.

        Raises:
            ValueError: the text cannot be a chunk.
        """
        return self.as_indexed(self.describe(text, namespace))

    def as_indexed(self, record: ChunkRecord) -> ChunkRecord:
        """The catalog's record of the chunk, or else `record`, whose KV may be stored from now on."""
        catalog = self.store.catalog
        known = catalog.get(record.content_hash)
        if known is None and record.content_hash in catalog.erasures:  # deleted, but here it is again
            with suppress(StoreError):  # until it can be written, the KV is not kept
                catalog.erasures.lift(record.content_hash)
        return known or record

    def keys_of(self, text: str, namespace: str) -> list[str]:
        """Keys of the chunks that a text is, indexed or stored: here, in this model's other states, and in models
        without a source for it.

        Raises:
            ValueError: the text cannot be a chunk.
        """
        record = self.describe(text, namespace)
        related = [content_hash(model, namespace, record.token_ids) for model in {*self._relatives(), self.fingerprint}]
        indexed = self.store.catalog.known(related)
        known = [key for key in related if key in indexed or key in self.store]
        return [*known, *(key for key in self.twins(known) if key not in known)]

    def _in_all_models(self, record: ChunkRecord) -> list[str]:
        models = self.store.catalog.models_of(record.namespace)
        return [content_hash(model, record.namespace, record.token_ids) for model in models]

    def describe(self, text: str, namespace: str) -> ChunkRecord:
        """The record a text would be registered with, without neighbours.

        Raises:
            ValueError: the text is empty or has no tokens.
        """
        canonical = canonical_text(text)
        ids = self.tokens.document_ids(canonical) if canonical else ()
        if not ids:
            raise ValueError("a document without text cannot be a chunk")
        key, identity = content_hash(self.fingerprint, namespace, ids), self.identity
        return ChunkRecord(
            key,
            self.fingerprint,
            namespace,
            canonical,
            ids,
            anchor_ids=identity.anchor_ids,
            separator_ids=identity.separator_ids,
        )

    @property
    def max_chunk_tokens(self) -> int | None:
        """Longest chunk that fits after the anchor; None = no limit known."""
        limit = self.identity.max_positions
        return None if limit is None else limit - len(self.identity.anchor_ids)

    def with_contexts(self, record: ChunkRecord, contexts: Sequence[Sequence[ChunkRecord]]) -> ChunkRecord:
        """`record` encoded after each of `contexts`, as far as they fit; equal ones count once."""
        chosen = list(dict.fromkeys(self._fitting(record, context) for context in contexts)) or [()]
        neighbours = tuple(key for context in chosen for key in context)
        splits = tuple(map(len, chosen)) if len(chosen) > 1 else ()
        return self.identity.current(replace(record, neighbours=neighbours, splits=splits))

    def _fitting(self, record: ChunkRecord, neighbours: Sequence[ChunkRecord]) -> tuple[str, ...]:
        """As many of `neighbours` (nearest last) as fit into the model's context, nearest first."""
        room = None if self.max_chunk_tokens is None else self.max_chunk_tokens - len(record.token_ids)
        chosen: list[str] = []
        for neighbour in reversed(neighbours):
            if neighbour.content_hash in (record.content_hash, *chosen):
                continue
            if room is not None:
                room -= len(neighbour.token_ids) + len(record.separator_ids)
                if room < 0:
                    break
            chosen.insert(0, neighbour.content_hash)
        return tuple(chosen)

    def register(self, text: str, namespace: str) -> ChunkRecord:
        """Make a text known without neighbours, unless it is known already; returns the record that counts."""
        return self.store.catalog.add(self.describe(text, namespace))

    def register_all(self, texts: Sequence[str], namespace: str) -> int:
        """`register` for all that can be chunks; returns how many of the texts are known now."""
        known, count, limit = self.known_texts(namespace), 0, self.max_chunk_tokens
        for text in texts:
            if known.key_of(text) is None:
                try:
                    record = self.describe(text, namespace)
                except ValueError:
                    continue
                if limit is not None and len(record.token_ids) > limit:
                    continue
                self.store.catalog.add(record)
            count += 1
        return count

    def check(self, record: ChunkRecord) -> tuple[ChunkJob, EntryCheck]:
        """What encodes the chunk, and what an entry must be to stand for it."""
        record = self.identity.current(record)
        tokens = self.store.catalog.neighbour_tokens(record)
        job = self.identity.job(record, encoding_contexts(record, tokens))
        context = record_context_hash(record, tokens)
        setting = self.identity.quantization
        return job, EntryCheck(record.namespace, record.fingerprint, record.token_ids, context, setting)

    def settle_mixture(self, record: ChunkRecord) -> ChunkRecord:
        """The record as this engine encodes it; the catalog says so too, if another engine's weights stood there."""
        current = self.identity.current(record)
        if current != record:
            maintenance.set_contexts(self.store, [current])
        return current

    def forget(
        self, content_hashes: Sequence[str], sources: Sequence[tuple[str, str]] = (), namespaces: Sequence[str] = ()
    ) -> maintenance.Removed:
        """Drop chunks and all that was computed from them, and `(namespace, source_id)` (`maintenance.forget`)."""
        catalog, before = self.store.catalog, self.store.catalog.version().removals
        removed = maintenance.forget(self.store, content_hashes, sources, namespaces)
        after = catalog.version().removals
        with self._lock:
            for known in self._known.values():
                # Up to date but for this call: then there is no need to compare with the whole catalog.
                if known.version.removals == before and after - before == removed.num_chunks:
                    for key in content_hashes:
                        known.texts.remove(key)
                    known.version = CatalogVersion(known.version.last_seq, after)
        return removed
