"""Chunks that are not stored, made out of near-duplicates that are."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvboost_rag.chunks.fetched import FetchedChunk, entry_of
from kvboost_rag.chunks.fetcher import ChunkFetcher
from kvboost_rag.datamodels import ChunkKV, ChunkRecord, HitKind
from kvboost_rag.encode.donor import encode_from_donor
from kvboost_rag.encode.similarity import DonorIndex, DonorPlan, DonorRules
from kvboost_rag.kv import quantization
from kvboost_rag.kv.assemble import PlacedChunk
from kvboost_rag.stores.catalog.catalog import CatalogVersion

logger = logging.getLogger(__name__)

BATCH = 256
"""Chunks whose signatures are brought up to date between two looks at the clock or the limit."""


@dataclass
class _Signed:
    index: DonorIndex
    version: CatalogVersion


class Donors:
    """Finds donors for chunks that are not stored, and makes their KV out of them.

    Contract:
    - KV made here serves one request and is never put into the store: a chunk's own KV stays a pure function of its
      tokens, its encoding context and the model. It is reported as `HitKind.DONOR`.
    - A donor is a chunk of the same namespace and model whose KV is stored and was encoded after the same context. A
      document that is given with a call takes over its donor's context, so that there can be such a donor.
    - Signatures lie beside the catalog and survive a restart; what is missing or damaged is computed from the catalog.
    - Methods may be called from any thread; `make` runs the model.
    """

    def __init__(self, fetcher: ChunkFetcher, rules: DonorRules | None = None) -> None:
        self.fetcher, self.registry = fetcher, fetcher.registry
        self.rules = rules or DonorRules()
        self._by_namespace: dict[str, _Signed] = {}
        self._lock = threading.RLock()
        self._unavailable = False

    def given(self, text: str, namespace: str) -> ChunkRecord:
        """As `ChunkRegistry.given`; a text that is not indexed and has a donor is encoded after the same context.

        Raises:
            ValueError: the text cannot be a chunk.
        """
        record, catalog = self.registry.describe(text, namespace), self.registry.store.catalog
        if not catalog.known([record.content_hash]) and (donor := self._donor_of(record)) is not None:
            group = catalog.get_many(donor.neighbours)
            if len(group) == len(set(donor.neighbours)):
                behind = [[group[key] for key in context if key != record.content_hash] for context in donor.contexts]
                record = self.registry.with_contexts(record, behind)
        return self.registry.as_indexed(record)

    def make(self, record: ChunkRecord) -> FetchedChunk | None:
        """The chunk's KV out of a donor's, or None if there is no donor worth it."""
        encoder, identity = self.fetcher.encoder, self.registry.identity
        if encoder is None or identity.sensitivity:  # a chunk's sensitivity cannot be taken from another text's
            return None
        job, check = self.registry.check(record)
        plan = self._plan(record, lambda donor: donor.contexts == record.contexts)
        if plan is None or plan.num_reused < self.rules.min_saving * job.num_tokens:
            return None
        donor = self._load(plan.donor)
        # With several contexts the donor's KV is a mixture of them, and so is what is computed after each of them.
        stored = self.rules.context == "stored" and len(job.parts) == 1
        context = self._stored_context(record) if stored else []
        if donor is None or context is None:
            return None
        made = [encode_from_donor(encoder.model, encoder.layout, part, plan, donor, context) for part in job.parts]
        kv = job.combined([part.kv for part in made], encoder.layout)
        tensors, meta = quantization.encode(kv, identity.quantization)
        entry = entry_of(record, check, tensors, meta | {"donor": plan.donor})
        forwarded = sum(part.forwarded_tokens for part in made)
        return FetchedChunk(record, entry, HitKind.DONOR, forwarded, False, None, made[0].computed_tokens)

    def update(self, namespace: str, limit: int | None = None) -> bool:
        """Sign the namespace's chunks that are not signed yet, at most `limit` of them; True if none is left."""
        with self._lock:
            signed = self._signed(namespace)
            if signed is None:
                return True
            catalog = self.registry.store.catalog
            version, last_seq = catalog.version(), signed.version.last_seq
            pending: list[str] = []
            for seq, key, _ in catalog.texts(self.registry.fingerprint, namespace, after=last_seq):
                if limit is not None and len(pending) >= limit:
                    break
                last_seq = seq
                if key not in signed.index:
                    pending.append(key)
            else:
                last_seq = version.last_seq
            for start in range(0, len(pending), BATCH):
                found = catalog.get_many(pending[start : start + BATCH])
                signed.index.add({key: known.token_ids for key, known in found.items()})
            if version.removals != signed.version.removals:
                signed.index.keep_only(catalog.hashes(namespace))
            signed.version = CatalogVersion(last_seq, version.removals)
            return last_seq >= version.last_seq

    def _signed(self, namespace: str) -> _Signed | None:
        """What is known of a namespace's chunks; None if donors cannot be looked for, which is said once."""
        if namespace not in self._by_namespace and not self._unavailable:
            arrays = self.registry.store.catalog.arrays
            table = arrays(self.rules.signature_kind, self.registry.fingerprint, namespace, np.uint32)
            try:
                self._by_namespace[namespace] = _Signed(DonorIndex(self.rules, table), CatalogVersion(0, -1))
            except ImportError as error:
                logger.warning("chunks that are not stored are encoded whole: %s", error)
                self._unavailable = True
        return self._by_namespace.get(namespace)

    def _donor_of(self, record: ChunkRecord) -> ChunkRecord | None:
        plan = self._plan(record, lambda donor: record.content_hash not in donor.neighbours)
        return None if plan is None else self.registry.store.catalog.get(plan.donor)

    def _plan(self, record: ChunkRecord, fits: Callable[[ChunkRecord], bool]) -> DonorPlan | None:
        """The best donor among the stored chunks that fit."""
        self.update(record.namespace, BATCH)
        store = self.registry.store

        def token_ids_of(key: str) -> Sequence[int] | None:
            donor = store.catalog.get(key) if key != record.content_hash and key in store else None
            if donor is None or _frame(donor) != _frame(record) or not fits(donor):
                return None
            return donor.token_ids

        with self._lock:
            signed = self._signed(record.namespace)
            return None if signed is None else signed.index.find(record.token_ids, token_ids_of)

    def _load(self, key: str) -> ChunkKV | None:
        record = self.registry.store.catalog.get(key)
        fetched = None if record is None else self.fetcher.load(record)
        return None if fetched is None else fetched.kv

    def _stored_context(self, record: ChunkRecord) -> list[PlacedChunk] | None:
        """Stored KV of the chunks in the encoding context, at their places; None if one is missing."""
        placed, start = [], len(record.anchor_ids)
        for key, ids in zip(record.neighbours, self.registry.store.catalog.neighbour_tokens(record), strict=True):
            kv = self._load(key)
            if kv is None:
                return None
            placed.append(PlacedChunk(kv, start))
            start += len(ids) + len(record.separator_ids)
        return placed


def _frame(record: ChunkRecord) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return record.anchor_ids, record.separator_ids
