"""The chunks of one model: what is known (catalog), what is held (store), and encoding what is missing."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace

import torch

from kvboost_rag.config import EncodingConfig
from kvboost_rag.datamodels import ChunkKV, ChunkRecord, DiskChoice, EntryCheck, HitKind, StoreEntry
from kvboost_rag.encode.encoder import Encoder, EncodingJob, context_sensitivity
from kvboost_rag.kv import quantization
from kvboost_rag.kv.keys import content_hash, context_hash
from kvboost_rag.observe.metrics import Metrics
from kvboost_rag.prompt.segments import KnownTexts, canonical_text
from kvboost_rag.prompt.tokens import PromptTokens
from kvboost_rag.stores import maintenance
from kvboost_rag.stores.base import Store
from kvboost_rag.stores.catalog.catalog import CatalogVersion
from kvboost_rag.stores.cost import CostModel

SENSITIVITY = "sensitivity"
"""Name of the tensor `[seq_len]` in a stored entry."""


@dataclass(frozen=True)
class FetchedChunk:
    """A chunk's KV as the store keeps it (encoded by `quantization`), and where it came from.

    Attributes:
        payload: tensors and meta strings of the stored entry, or of one that is like it.
        encoded_tokens: what was forwarded to get it (encoding context included), 0 for a hit.
        kept: whether the store holds it; False costs the next call another encoding.
        disk_choice: what was decided about a chunk on disk, None where there was nothing to decide.
        computed_tokens: of a donor hit: tokens of the chunk that no donor could give.
    """

    record: ChunkRecord
    payload: StoreEntry
    hit: HitKind
    encoded_tokens: int = 0
    kept: bool = True
    disk_choice: DiskChoice | None = None
    computed_tokens: int = 0

    @property
    def num_bytes(self) -> int:
        return self.payload.num_bytes

    @property
    def sensitivity(self) -> torch.Tensor | None:
        """Float16 `[seq_len]` (`encode.context_sensitivity`), or None if it is not stored with the chunk."""
        return self.payload.tensors.get(SENSITIVITY)

    @property
    def kv(self) -> ChunkKV:
        """Position-free KV in the model's dtype; decoded at each call."""
        return quantization.decode(self.payload.tensors, self.payload.meta)


@dataclass(frozen=True)
class ChunkIdentity:
    """What all chunks of one engine share.

    Attributes:
        fingerprint: of the model.
        anchor_ids, separator_ids: parts of every encoding context.
        max_positions: longest prompt that can be reused, or None.
        quantization: codec of stored KV.
        batch_size: chunks encoded in one forward.
        sensitivity: whether each chunk's context sensitivity is stored with it.
    """

    fingerprint: str
    anchor_ids: tuple[int, ...] = ()
    separator_ids: tuple[int, ...] = ()
    max_positions: int | None = None
    quantization: str = "none"
    batch_size: int = 1
    sensitivity: bool = False

    @classmethod
    def of(
        cls, fingerprint: str, tokens: PromptTokens, encoding: EncodingConfig, max_positions: int | None
    ) -> ChunkIdentity:
        """Tokenise what the settings give as text."""
        anchor: tuple[int, ...] = ()
        if encoding.anchor:
            anchor = tokens.default_anchor_ids(None if encoding.anchor == "auto" else encoding.anchor)
        separator = tokens.document_ids(encoding.separator) if encoding.separator else ()
        return cls(
            fingerprint,
            anchor,
            separator,
            max_positions,
            encoding.quantization or "none",
            encoding.batch_size,
            encoding.sensitivity,
        )


@dataclass
class _Known:
    texts: KnownTexts = field(default_factory=KnownTexts)
    version: CatalogVersion = field(default_factory=lambda: CatalogVersion(0, 0))


def entry_of(
    record: ChunkRecord, check: EntryCheck, tensors: dict[str, torch.Tensor], meta: dict[str, str]
) -> StoreEntry:
    """A chunk's KV in the form of the store."""
    return StoreEntry(
        record.content_hash,
        record.namespace,
        record.fingerprint,
        record.token_ids,
        check.context_hash,
        tensors,
        meta,
    )


class ChunkLibrary:
    """Registers chunks, finds their texts in prompts, and fetches their KV.

    KV is a pure function of (chunk tokens, encoding context, model), and the catalog fixes the context when a chunk
    is first registered. What is returned after encoding went through the store's codec, so that a miss gives the
    same bits as a hit.
    """

    def __init__(self, store: Store, encoder: Encoder | None, tokens: PromptTokens, identity: ChunkIdentity) -> None:
        self.store = store
        self.encoder = encoder
        self.tokens = tokens
        self.fingerprint = identity.fingerprint
        self.identity = identity
        self.metrics: Metrics | None = None
        self.costs = CostModel()
        self._known: dict[str, _Known] = {}
        self._lock = threading.Lock()

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

    @contextmanager
    def pinned(self, records: Iterable[ChunkRecord]) -> Iterator[None]:
        """Keep chunks from being evicted to make room for each other while the block runs."""
        keys = list(dict.fromkeys(record.content_hash for record in records))
        # A store that cannot pin may evict a chunk early: that costs time, not the answer.
        for key in keys:
            with suppress(Exception):
                self.store.pin(key)
        try:
            yield
        finally:
            for key in keys:
                with suppress(Exception):
                    self.store.unpin(key)

    def load(self, record: ChunkRecord) -> FetchedChunk | None:
        """The chunk's KV from the store, or None (a miss)."""
        entry = self.store.get(record.content_hash, self.check(record)[1])
        if entry is None or entry.meta.get("setting") != self.identity.quantization:
            return None  # KV of another codec has other bits than encoding the chunk here would give
        if self.identity.sensitivity and SENSITIVITY not in entry.tensors:
            return None
        return FetchedChunk(record, entry, HitKind.APPROXIMATE)

    def encode(self, record: ChunkRecord, again: bool = False) -> FetchedChunk:
        """Compute the chunk's KV, put it into the store, and return it as the store would.

        Args:
            again: the store holds it already, in a tier slower than computing; it is not written once more.
        """
        if self.encoder is None:
            raise RuntimeError("this model's KV cannot be reused, so its chunks are not encoded")
        job, check = self.check(record)
        start = time.perf_counter()
        entry = self._pack(record, self.encoder.encode(job), check, self.encoder.signature)
        self.encoder.synchronise()
        num_tokens = self._forwarded(record, job)
        self.costs.observe_encode(num_tokens, time.perf_counter() - start)
        if not again:
            return self._put(record, entry, job)
        self.store.promote(entry)
        self.store.touch(entry.key)
        return FetchedChunk(record, entry, HitKind.ENCODED, num_tokens)

    def encode_many(self, records: Sequence[ChunkRecord]) -> list[FetchedChunk]:
        """`encode` for several chunks, in one forward where there is more than one."""
        if self.encoder is None or len(records) < 2:
            return [self.encode(record) for record in records]
        checks = [self.check(record) for record in records]
        if all(record.forward_tokens for record in records):
            return self._encode_nested(records, checks)
        encoded = self.encoder.encode_batch([job for job, _ in checks])
        return [self.keep(record, kv, *check) for record, kv, check in zip(records, encoded, checks, strict=True)]

    def _encode_nested(
        self, records: Sequence[ChunkRecord], checks: Sequence[tuple[EncodingJob, EntryCheck]]
    ) -> list[FetchedChunk]:
        """Chunks of one group; what was forwarded is counted with the first."""
        encoder = self.encoder
        assert encoder is not None
        encoded = encoder.encode_nested([job for job, _ in checks])
        fetched = []
        for i, (record, kv, (job, check)) in enumerate(zip(records, encoded, checks, strict=True)):
            chunk = self._put(record, self._pack(record, kv, check, encoder.signature), job)
            shared = 0 if i == 0 else job.num_tokens
            fetched.append(replace(chunk, encoded_tokens=chunk.encoded_tokens - shared))
        return fetched

    def keep(self, record: ChunkRecord, kv: ChunkKV, job: EncodingJob, check: EntryCheck) -> FetchedChunk:
        """Put KV into the store that was computed in another way than by `encode`, whose last bits may be others."""
        return self._put(record, self._pack(record, kv, check, signature=""), job)

    def _pack(self, record: ChunkRecord, kv: ChunkKV, check: EntryCheck, signature: str) -> StoreEntry:
        """Freshly encoded KV as the store keeps it."""
        tensors, meta = quantization.encode(kv, self.identity.quantization)
        if self.identity.sensitivity:
            tensors[SENSITIVITY] = self._sensitivity(record, kv)
        if self.metrics is not None:
            self.metrics.record_encoded(meta)
        return entry_of(record, check, tensors, meta | {"setting": self.identity.quantization, "encoder": signature})

    def _put(self, record: ChunkRecord, entry: StoreEntry, job: EncodingJob) -> FetchedChunk:
        """A store that cannot keep it costs the next call another encoding."""
        return FetchedChunk(record, entry, HitKind.ENCODED, self._forwarded(record, job), self.store.put(entry))

    def _sensitivity(self, record: ChunkRecord, kv: ChunkKV) -> torch.Tensor:
        if self.encoder is None or not record.anchor_ids + record.neighbours:
            return torch.zeros(kv.seq_len, dtype=torch.float16)  # encoded alone, so nothing to compare with
        return context_sensitivity(kv, self.encoder.encode(self._lesser_job(record))).cpu()

    def _lesser_job(self, record: ChunkRecord) -> EncodingJob:
        """The chunk behind the anchor alone; one that has no neighbours anyway, behind nothing."""
        return EncodingJob(record.token_ids, record.anchor_ids if record.neighbours else ())

    def _forwarded(self, record: ChunkRecord, job: EncodingJob) -> int:
        return job.num_tokens + (self._lesser_job(record).num_tokens if self.identity.sensitivity else 0)

    def fetch(self, record: ChunkRecord) -> FetchedChunk:
        """The chunk's KV from the store, or else encoded now."""
        return self.load(record) or self.encode(record)

    def forget(self, content_hashes: Sequence[str]) -> int:
        """Drop chunks and all that was computed from them (`maintenance.forget`); returns how many were known."""
        catalog, before = self.store.catalog, self.store.catalog.version().removals
        num_chunks = maintenance.forget(self.store, content_hashes).num_chunks
        after = catalog.version().removals
        with self._lock:
            for known in self._known.values():
                # Up to date but for this call: then there is no need to compare with the whole catalog.
                if known.version.removals == before and after - before == num_chunks:
                    for key in content_hashes:
                        known.texts.remove(key)
                    known.version = CatalogVersion(known.version.last_seq, after)
        return num_chunks
