"""The store, as the connector sees it: chunks found by ids, their entries read ahead of the request that wants them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from kvboost_rag.chunks.token_search import TokenIndex, TokenRun
from kvboost_rag.datamodels import ChunkRecord, EntryCheck, StoreEntry
from kvboost_rag.stores import CatalogVersion, Store
from vllm_kvboost.reference import NotServable

PAGE = 500


@dataclass
class _Known:
    index: TokenIndex
    version: CatalogVersion


class ChunkSource:
    """Chunks of one model in one store. Methods may be called from several threads."""

    def __init__(self, store: Store, fingerprint: str, min_tokens: int) -> None:
        self.store = store
        self.fingerprint = fingerprint
        self._min_tokens = min_tokens
        self._known: dict[str, _Known] = {}
        self._lock = threading.Lock()
        self._readers = ThreadPoolExecutor(2, thread_name_prefix="kvboost-read")

    def find(self, token_ids: Sequence[int], namespace: str) -> tuple[TokenRun, ...]:
        """Runs of known chunks in a prompt, ascending."""
        with self._lock:
            return tuple(self._up_to_date(namespace).find(token_ids))

    def refuse_foreign(self, spec: str) -> None:
        """Raise NotServable if the store holds chunks, and none of them is of this model."""
        held = self.store.catalog.fingerprints()
        if held and self.fingerprint not in held:
            raise NotServable(
                f"the store {spec} holds no chunks of this model in this dtype: its fingerprint is "
                f"{self.fingerprint[:12]}, those in the store are {', '.join(f[:12] for f in held)}; "
                "warm it with the same model files and dtype"
            )

    def _up_to_date(self, namespace: str) -> TokenIndex:
        catalog = self.store.catalog
        version = catalog.version()
        known = self._known.get(namespace)
        if known is None or known.version.removals != version.removals:
            known = self._known[namespace] = _Known(TokenIndex(self._min_tokens), CatalogVersion(0, version.removals))
        if known.version != version:
            hashes = [key for _, key, _ in catalog.texts(self.fingerprint, namespace, after=known.version.last_seq)]
            for at in range(0, len(hashes), PAGE):
                for record in catalog.get_many(hashes[at : at + PAGE]).values():
                    known.index.add(record.content_hash, record.token_ids)
            known.version = version
        return known.index

    def entry(self, record: ChunkRecord) -> StoreEntry | None:
        """A chunk's stored KV, checked, or None (a miss, counted by the store)."""
        context = self.store.catalog.context_hash(record)
        return self.store.get(
            record.content_hash, EntryCheck(record.namespace, self.fingerprint, record.token_ids, context)
        )

    def entries(self, keys: Iterable[str]) -> dict[str, StoreEntry]:
        """Entries of chunks by content hash; what is missing or damaged is left out."""
        wanted = list(dict.fromkeys(keys))
        records = self.store.catalog.get_many(wanted)
        found = {key: self.entry(records[key]) for key in wanted if key in records}
        return {key: entry for key, entry in found.items() if entry is not None}

    def read_ahead(self, keys: Iterable[str]) -> Reading:
        """Begin to read entries; they are pinned in the store until `Reading.release`."""
        return Reading(self, tuple(dict.fromkeys(keys)))

    def close(self) -> None:
        """Stop reading; what is asked for afterwards is not read."""
        self._readers.shutdown(wait=True, cancel_futures=True)

    def submit(self, keys: Sequence[str]) -> Future[dict[str, StoreEntry]]:
        """`entries` in a reader thread."""
        return self._readers.submit(self.entries, keys)


class Reading:
    """Entries of one request's chunks on their way into memory."""

    def __init__(self, source: ChunkSource, keys: tuple[str, ...]) -> None:
        self.keys = keys
        self.started = time.monotonic()
        self._source = source
        for key in keys:
            source.store.pin(key)
        self._future = source.submit(keys)

    @property
    def is_done(self) -> bool:
        return self._future.done()

    @property
    def waited_ms(self) -> float:
        return (time.monotonic() - self.started) * 1000

    def entries(self) -> dict[str, StoreEntry]:
        """What was read, by content hash; empty while it is being read, and where reading failed."""
        if not self._future.done() or self._future.cancelled() or self._future.exception() is not None:
            return {}
        return self._future.result()

    def release(self) -> None:
        """The request is over."""
        self._future.cancel()
        for key in self.keys:
            self._source.store.unpin(key)
