"""KV of chunks: loaded from the store, or computed where it is missing or where computing is faster."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

import torch

from kvboost_rag.chunks.fetched import LEADING, SENSITIVITY, FetchedChunk, entry_of, leading_parts
from kvboost_rag.chunks.registry import ChunkRegistry
from kvboost_rag.datamodels import GIVEN, ChunkKV, ChunkRecord, DiskChoice, EntryCheck, HitKind, StoreEntry
from kvboost_rag.encode.encoder import ChunkJob, Encoder, EncodingJob, context_sensitivity, encode_group
from kvboost_rag.kv import quantization
from kvboost_rag.models.ranks import Ranks
from kvboost_rag.observe.recorder import Recorder
from kvboost_rag.stores.cost import DISK, REMOTE, CostModel
from kvboost_rag.stores.heads import WHOLE, Heads


class ChunkFetcher:
    """Fetches the KV of registered chunks.

    What is returned after encoding went through the store's codec, so that a miss gives the same bits as a hit.

    Args:
        encoder: None for a model whose KV cannot be reused: nothing can be encoded then.
        costs: what loading and encoding have cost so far.
        heads: those whose KV lives here.
        ranks: what one of them does not hold, none of them loads.
    """

    def __init__(
        self,
        registry: ChunkRegistry,
        encoder: Encoder | None,
        metrics: Recorder,
        costs: CostModel | None = None,
        heads: Heads = WHOLE,
        ranks: Ranks | None = None,
    ) -> None:
        self.registry = registry
        self.store = registry.store
        self.identity = registry.identity
        self.encoder = encoder
        self.metrics = metrics
        self.costs = costs or CostModel()
        self.heads = heads
        self.ranks = ranks or Ranks()

    def fetch(self, record: ChunkRecord) -> FetchedChunk:
        """The chunk's KV from the store, or else encoded now."""
        return self.load(record) or self.encode(record)

    def load(self, record: ChunkRecord) -> FetchedChunk | None:
        """The chunk's KV from the store, or None (a miss)."""
        chunk = self._load(record)
        return chunk if self.ranks.all(f"load {record.content_hash[:16]}", chunk is not None) else None

    def check(self, record: ChunkRecord) -> tuple[ChunkJob, EntryCheck]:
        """As `ChunkRegistry.check`, the same on every rank."""
        return self.ranks.first(f"check {record.content_hash[:16]}", lambda: self.registry.check(record))

    def _settled(self, record: ChunkRecord) -> ChunkRecord:
        return self.ranks.first(f"mix {record.content_hash[:16]}", lambda: self.registry.settle_mixture(record))

    def _load(self, record: ChunkRecord) -> FetchedChunk | None:
        entry = self.heads.get(self.store, record.content_hash, self.check(record)[1])
        if entry is None:
            return None
        if self.identity.sensitivity and SENSITIVITY not in entry.tensors:
            return None
        if self.leads(record) and f"{LEADING}codec" not in entry.meta:
            return None
        return FetchedChunk(record, entry, HitKind.APPROXIMATE)

    def leads(self, record: ChunkRecord) -> bool:
        """Whether the chunk's KV after the anchor alone belongs to what is stored of it."""
        return self.heads.whole and self.identity.leads(record)

    def holds(self, record: ChunkRecord) -> bool:
        """Whether the store says that it holds what `load` would give, as KV of an indexed chunk; nothing is read."""
        if not self.heads.whole:  # parts are read to be compared: this is asked while indexing
            return self.load(record) is not None
        key, check = record.content_hash, self.registry.check(record)[1]
        info = self.store.info(key) if key in self.store else None
        return (
            info is not None
            and (info.namespace, info.fingerprint, info.context_hash)
            == (check.namespace, check.fingerprint, check.context_hash)
            and info.meta.get("setting") == self.identity.quantization
            and GIVEN not in info.meta  # its file would not tell the catalog of the chunk, should that be lost
            and (not self.identity.sensitivity or SENSITIVITY in info.meta)
            and (not self.leads(record) or f"{LEADING}codec" in info.meta)
        )

    def choose(self, record: ChunkRecord, always_load: bool = False) -> DiskChoice | None:
        """What to do about a chunk on disk or in a shared store, by what both ways have cost so far; None for one in
        memory or not held.

        Encoding again is chosen only where it gives the stored bits: if the chunk was computed alone, by the same
        software on the same kind of device. The decision is counted in the metrics.
        """
        tier = self.store.tier_of(record.content_hash)
        info = self.store.info(record.content_hash) if tier in (DISK, REMOTE) else None
        if tier is None or info is None or self.encoder is None:
            return None
        load = always_load or info.meta.get("encoder") != self.encoder.signature
        if not load:
            load = self.costs.decide(info.num_bytes, self.registry.check(record)[0].num_tokens, tier).load
        self.metrics.record_decision(load)
        return "load" if load else "recompute"

    def load_all(
        self, records: Mapping[str, ChunkRecord], choices: Mapping[str, DiskChoice | None]
    ) -> dict[str, FetchedChunk]:
        """What the store holds of `records` (by content hash), apart from what is chosen to be encoded again."""
        wanted = {key: record for key, record in records.items() if choices[key] != "recompute"}
        tiers = {key: DISK if self.store.is_here(key) else REMOTE for key in wanted if choices[key] == "load"}
        self.store.prefetch(wanted)
        found: dict[str, FetchedChunk] = {}
        num_bytes, seconds = Counter[str](), dict.fromkeys((DISK, REMOTE), 0.0)
        for key, record in wanted.items():
            start = time.perf_counter()
            chunk = self.load(record)
            if chunk is not None:
                found[key] = replace(chunk, disk_choice=choices[key])
                if key in tiers:
                    num_bytes[tiers[key]] += chunk.num_bytes
                    seconds[tiers[key]] += time.perf_counter() - start
        # Together, since they are read at the same time: one by one, the first would seem to take all of it.
        for tier, size in num_bytes.items():
            self.costs.observe_load(size, seconds[tier], tier)
        return found

    def prefetch(self, texts: Iterable[str], namespace: str) -> int:
        """Have the stored KV of known texts read into memory in the background; returns how many are known."""
        known = self.registry.known_texts(namespace)
        keys = [key for text in texts if (key := known.key_of(text)) is not None]
        self.store.prefetch(dict.fromkeys(keys))
        return len(keys)

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

    def encode(self, record: ChunkRecord, again: bool = False) -> FetchedChunk:
        """Compute the chunk's KV, put it into the store, and return it as the store would.

        Args:
            again: the store holds it already, in a tier slower than computing; it is not written once more.
        """
        if self.encoder is None:
            raise RuntimeError("this model's KV cannot be reused, so its chunks are not encoded")
        record = self._settled(record)
        job, check = self.check(record)
        start = time.perf_counter()
        entry = self._pack(
            record, job, [self.encoder.encode(part) for part in job.parts], check, self.encoder.signature
        )
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
        records = [self._settled(record) for record in records]
        checks = [self.check(record) for record in records]
        if all(record.forward_tokens for record in records):
            return self._encode_nested(records, checks)
        encoded = iter(self.encoder.encode_batch([part for job, _ in checks for part in job.parts]))
        return [
            self.keep(record, job, [next(encoded) for _ in job.parts], check)
            for record, (job, check) in zip(records, checks, strict=True)
        ]

    def _encode_nested(
        self, records: Sequence[ChunkRecord], checks: Sequence[tuple[ChunkJob, EntryCheck]]
    ) -> list[FetchedChunk]:
        """Chunks of one group; what was forwarded is counted with the first."""
        encoder = self.encoder
        assert encoder is not None
        directions = encode_group(encoder, [job for job, _ in checks])
        fetched = []
        for i, (record, parts, (job, check)) in enumerate(zip(records, directions.parts, checks, strict=True)):
            chunk = self._put(record, self._pack(record, job, parts, check, encoder.signature), job)
            shared = job.num_tokens - (directions.num_tokens if i == 0 else 0)
            fetched.append(replace(chunk, encoded_tokens=chunk.encoded_tokens - shared))
        return fetched

    def keep(self, record: ChunkRecord, job: ChunkJob, parts: Sequence[ChunkKV], check: EntryCheck) -> FetchedChunk:
        """Put KV into the store that was computed in another way than by `encode`, whose last bits may be others."""
        return self._put(record, self._pack(record, job, parts, check, signature=""), job)

    def _pack(
        self, record: ChunkRecord, job: ChunkJob, parts: Sequence[ChunkKV], check: EntryCheck, signature: str
    ) -> StoreEntry:
        """Freshly encoded KV as the store keeps it."""
        kv = job.combined(parts, self.encoder.layout) if self.encoder is not None else parts[0]
        tensors, meta = quantization.encode(kv, self.identity.quantization)
        if self.identity.sensitivity:
            tensors[SENSITIVITY] = self._sensitivity(record, parts)
            meta = meta | {SENSITIVITY: "float16"}
        if self.leads(record) and self.encoder is not None:
            alone = self.identity.leading_job(record)
            known = dict(zip(job.parts, parts, strict=True))
            more = leading_parts(known[alone] if alone in known else self.encoder.encode(alone))
            tensors, meta = tensors | more[0], meta | more[1]
        if not self.store.catalog.known([record.content_hash]):
            meta = meta | {GIVEN: "yes"}
        self.metrics.record_encoded(meta)
        return entry_of(record, check, tensors, meta | {"setting": self.identity.quantization, "encoder": signature})

    def _put(self, record: ChunkRecord, entry: StoreEntry, job: ChunkJob) -> FetchedChunk:
        """A store that cannot keep it costs the next call another encoding."""
        return FetchedChunk(
            record, entry, HitKind.ENCODED, self._forwarded(record, job), self.heads.put(self.store, entry)
        )

    def _sensitivity(self, record: ChunkRecord, parts: Sequence[ChunkKV]) -> torch.Tensor:
        """How far the last two contexts are apart, or the only one from less."""
        kv = parts[-1]
        if len(parts) > 1:
            return context_sensitivity(kv, parts[-2]).cpu()
        if self.encoder is None or not record.anchor_ids + record.neighbours:
            return torch.zeros(kv.seq_len, dtype=torch.float16)  # encoded alone, so nothing to compare with
        return context_sensitivity(kv, self.encoder.encode(self._lesser_job(record))).cpu()

    def _lesser_job(self, record: ChunkRecord) -> EncodingJob:
        """The chunk after the anchor alone; one that has no neighbours anyway, after nothing."""
        return EncodingJob(record.token_ids, record.anchor_ids if record.neighbours else ())

    def _forwarded(self, record: ChunkRecord, job: ChunkJob) -> int:
        twice = self.identity.sensitivity and len(job.parts) == 1
        alone = self.identity.leading_job(record)
        extra = [self._lesser_job(record)] * twice + [alone] * (self.leads(record) and alone not in job.parts)
        return job.num_tokens + sum(job.num_tokens for job in extra)
