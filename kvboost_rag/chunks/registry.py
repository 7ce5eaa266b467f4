"""The chunks that are known: their texts, token ids and encoding contexts."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kvboost_rag.chunks.identity import ChunkIdentity
from kvboost_rag.datamodels import ChunkRecord, EntryCheck
from kvboost_rag.encode.encoder import EncodingJob
from kvboost_rag.kv.keys import content_hash, context_hash
from kvboost_rag.prompt.segments import KnownTexts, canonical_text
from kvboost_rag.prompt.tokens import PromptTokens
from kvboost_rag.stores import maintenance
from kvboost_rag.stores.base import Store
from kvboost_rag.stores.catalog.catalog import CatalogVersion


@dataclass
class _Known:
    texts: KnownTexts = field(default_factory=KnownTexts)
    version: CatalogVersion = field(default_factory=lambda: CatalogVersion(0, 0))


class ChunkRegistry:
    """Makes texts known as chunks of one model, and knows them again in prompts.

    The catalog fixes a chunk's encoding context when it is first registered, so that its KV is a pure function of
    (chunk tokens, encoding context, model). Thread-safe.
    """

    def __init__(self, store: Store, tokens: PromptTokens, identity: ChunkIdentity) -> None:
        self.store = store
        self.tokens = tokens
        self.identity = identity
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
            if known.version != version:
                if known.version.removals != version.removals:
                    known.texts.keep_only(catalog.hashes(namespace))
                for _, key, text in catalog.texts(self.fingerprint, namespace, after=known.version.last_seq):
                    known.texts.add(text, key)
                known.version = version
            return known.texts

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
        """Longest chunk that fits behind the anchor; None = no limit known."""
        limit = self.identity.max_positions
        return None if limit is None else limit - len(self.identity.anchor_ids)

    def with_neighbours(self, record: ChunkRecord, neighbours: Sequence[ChunkRecord]) -> ChunkRecord:
        """`record` encoded behind `neighbours` (nearest last): as many as fit into the context, nearest first."""
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
        return replace(record, neighbours=tuple(chosen))

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

    def check(self, record: ChunkRecord) -> tuple[EncodingJob, EntryCheck]:
        """What encodes the chunk, and what an entry must be to stand for it."""
        job = EncodingJob(record.token_ids, self.store.catalog.context_ids(record), record.forward_tokens)
        check = EntryCheck(record.namespace, record.fingerprint, record.token_ids, context_hash(job.context_ids))
        return job, check

    def forget(self, content_hashes: Sequence[str]) -> maintenance.Removed:
        """Drop chunks and all that was computed from them (`maintenance.forget`)."""
        catalog, before = self.store.catalog, self.store.catalog.version().removals
        removed = maintenance.forget(self.store, content_hashes)
        after = catalog.version().removals
        with self._lock:
            for known in self._known.values():
                # Up to date but for this call: then there is no need to compare with the whole catalog.
                if known.version.removals == before and after - before == removed.num_chunks:
                    for key in content_hashes:
                        known.texts.remove(key)
                    known.version = CatalogVersion(known.version.last_seq, after)
        return removed
