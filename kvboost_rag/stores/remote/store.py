"""Chunk KV in a service that many machines share."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

from kvboost_rag.datamodels import EntryCheck, StoreEntry
from kvboost_rag.stores.base import EntryInfo, Store, StoreError
from kvboost_rag.stores.disk import chunk_file
from kvboost_rag.stores.disk.chunk_file import ChunkFileError
from kvboost_rag.stores.disk.seal import secret_from_environment
from kvboost_rag.stores.payload import own
from kvboost_rag.stores.remote.agreements import Agreements
from kvboost_rag.stores.remote.backend import TIMEOUT_S, Backend, RemoteError
from kvboost_rag.stores.remote.guard import Guard
from kvboost_rag.stores.remote.room import Room
from kvboost_rag.stores.remote.values import (
    Manifest,
    ManifestError,
    digest,
    parts_of,
    read_manifest,
    variant,
    write_manifest,
)

MANIFEST = "m-"
PART = "p-"
BATCH_PARTS = 4
"""Parts asked for at once."""

T = TypeVar("T")


class RemoteStore(Store):
    """One immutable value per chunk, encoding context and codec.

    A value is the bytes of a chunk file in parts named by their digests; its manifest is written last. It is served
    only if every part is there and has its digest, and the whole its seal. A service that is slow, gone or full costs
    misses (`unreachable`) and entries not kept; after some failures it is not asked for a while (`Guard`). Nothing is
    evicted from here: that is the service's business (`maxmemory-policy`, life-cycle rules).

    Its catalog is empty: what is known of chunks is kept by each machine (`SharedStore`).

    Args:
        secret: as for `DiskStore`.
        most_bytes: values larger than this are neither written nor read.
        in_flight_bytes: of values being read at the same time; one that would wait longer than `TIMEOUT_S` for the
            others is a miss (`busy`).
    """

    tier = "remote"

    def __init__(
        self,
        backend: Backend,
        *,
        secret: bytes | None = None,
        guard: Guard | None = None,
        most_bytes: int = 4 << 30,
        in_flight_bytes: int = 1 << 30,
    ) -> None:
        super().__init__()
        self.backend = backend
        self._secret = secret if secret is not None else secret_from_environment()
        self._guard = guard or Guard()
        self.agreements = Agreements(backend, self._run, self._secret)
        self._most_bytes = most_bytes
        self.room = Room(in_flight_bytes, TIMEOUT_S)
        self._written = 0

    def lookup(self, key: str, check: EntryCheck) -> tuple[StoreEntry | None, str | None]:
        name = variant(check.context_hash, check.setting or "")
        if check.setting is None and not self._has(key, name):
            return self._judge(key, check, *self._load_any(key))
        return self._judge(key, check, *self._load(key, name))

    def load(self, key: str) -> tuple[StoreEntry | None, str | None]:
        """Of several values of a chunk none: without a check nobody knows which is wanted. Counted as a lookup."""
        entry, reason = self._load_any(key)
        with self._lock:
            self.stats.lookups += 1
            self.stats.hits += entry is not None
            self.stats.misses += entry is None
            if reason is not None:
                self.stats.rejected[reason] += 1
        return entry, reason

    def _load_any(self, key: str) -> tuple[StoreEntry | None, str | None]:
        try:
            variants = self._variants(key)
        except RemoteError:
            return None, "unreachable"
        return self._load(key, variants[0]) if len(variants) == 1 else (None, None)

    def _load(self, key: str, name: str) -> tuple[StoreEntry | None, str | None]:
        try:
            manifest = self._manifest(key, name)
            if manifest is None:
                return None, None
            with self.room.of(manifest.num_bytes):
                parts = self._parts(key, manifest)
                if parts is None:
                    return None, "truncated"
                entry, _ = chunk_file.load(b"".join(parts), self._secret)
            return entry, None
        except TimeoutError:
            return None, "busy"
        except RemoteError as error:
            self._warn_once("", "unreachable", "the remote store does not answer: %s; chunks are computed", error)
            return None, "unreachable"
        except (ManifestError, ChunkFileError) as error:
            return None, error.reason

    def put(self, entry: StoreEntry) -> bool:
        reason = None
        try:
            pieces = chunk_file.dump(own(entry), 0.0, secret=self._secret)  # the same bytes whoever writes them
            size = chunk_file.num_bytes(pieces)
            if size > self._most_bytes:
                reason = "too_large"
            else:
                self._write(entry, pieces, size)
        except RemoteError as error:
            reason = "unreachable"
            self._warn_once("", "unwritten", "the remote store does not take chunks: %s", error)
        with self._lock:
            if reason is not None:
                self.stats.put_failures[reason] += 1
                return False
            self.stats.puts += 1
            return True

    def _write(self, entry: StoreEntry, pieces: list[Any], size: int) -> None:
        name = variant(entry.context_hash, entry.meta.get("setting", ""))
        try:
            exists = self._manifest(entry.key, name) is not None
        except ManifestError:  # it can only be replaced together with what it named
            self._run(lambda: self.backend.delete(entry.key), entry.key)
            exists = False
        digests = []
        for part in parts_of(pieces):
            digests.append(digest(part))
            if self._run(partial(self.backend.create, entry.key, PART + digests[-1], part), entry.key):
                self._written += len(part)
        if not exists:
            head = {
                "namespace": entry.namespace,
                "fingerprint": entry.fingerprint,
                "num_tokens": len(entry.token_ids),
                "context_hash": entry.context_hash,
                "created": time.time(),
                "meta": dict(entry.meta),
            }
            data = write_manifest(Manifest(size, tuple(digests), head), self._secret)
            self._run(lambda: self.backend.create(entry.key, MANIFEST + name, data), entry.key)

    def delete(self, key: str, reason: str = "deleted") -> bool:
        """Remove all values of `key`.

        Raises:
            StoreError: the service cannot be reached: nobody knows whether they are gone.
        """
        try:
            removed = self._run(lambda: self.backend.delete(key), key)
        except RemoteError as error:
            raise StoreError(f"cannot delete {key[:16]} from the remote store: {error}") from error
        if removed:
            with self._lock:
                self.stats.evictions[reason] += 1
        return removed

    def __contains__(self, key: object) -> bool:
        """Whether a whole value is there, as far as can be said: one that vanishes meanwhile is a miss."""
        return isinstance(key, str) and self.info(key) is not None

    def is_here(self, key: str) -> bool:
        return False

    def info(self, key: str) -> EntryInfo | None:
        try:
            for name in self._variants(key):
                manifest = self._manifest(key, name)
                if manifest is not None and self._is_whole(key, manifest):
                    return _info_of(key, manifest)
        except (RemoteError, ManifestError):
            return None
        return None

    def entries(self) -> Iterator[EntryInfo]:
        """Every value of every chunk: as many requests as there are.

        Raises:
            StoreError: the service cannot be reached.
        """
        try:
            for key in self._run(lambda: list(self.backend.keys())):
                yield from self._entries_of(key)
        except RemoteError as error:
            raise StoreError(f"the remote store cannot be listed: {error}") from error

    def _entries_of(self, key: str) -> Iterator[EntryInfo]:
        for name in self._variants(key):
            try:
                manifest = self._manifest(key, name)
            except ManifestError:
                continue
            if manifest is not None:
                yield _info_of(key, manifest)

    def faults(self) -> Iterator[tuple[str, str]]:
        """Key and fault of every value that `get` would not give: `corrupt`, `unsigned`, `truncated`.

        Raises:
            StoreError: the service cannot be reached.
        """
        try:
            for key in self._run(lambda: list(self.backend.keys())):
                for name in self._variants(key):
                    try:
                        manifest = self._manifest(key, name)
                    except ManifestError as error:
                        yield key, error.reason
                        continue
                    if manifest is not None and not self._is_whole(key, manifest):
                        yield key, "truncated"
        except RemoteError as error:
            raise StoreError(f"the remote store cannot be listed: {error}") from error

    @property
    def bytes_held(self) -> Mapping[str, int]:
        """What this process has written: what the service still holds only it knows."""
        return {self.tier: self._written}

    def tier_of(self, key: str) -> str | None:
        return self.tier if key in self else None

    def close(self) -> None:
        super().close()
        self.backend.close()

    def _variants(self, key: str) -> list[str]:
        names = self._run(lambda: self.backend.names(key), key)
        return [name.removeprefix(MANIFEST) for name in names if name.startswith(MANIFEST)]

    def _has(self, key: str, name: str) -> bool:
        try:
            return name in self._variants(key)
        except RemoteError:
            return False

    def _manifest(self, key: str, name: str) -> Manifest | None:
        data = self._run(lambda: self.backend.get(key, [MANIFEST + name]), key)[0]
        return None if data is None else read_manifest(data, self._secret)

    def _is_whole(self, key: str, manifest: Manifest) -> bool:
        names = set(self._run(lambda: self.backend.names(key), key))
        return all(PART + part in names for part in manifest.digests)

    def _parts(self, key: str, manifest: Manifest) -> list[bytes] | None:
        """All parts, or None if one is missing or is not what the manifest says."""
        if manifest.num_bytes > self._most_bytes:
            return None
        parts: list[bytes] = []
        for start in range(0, len(manifest.digests), BATCH_PARTS):
            wanted = manifest.digests[start : start + BATCH_PARTS]
            found = self._run(partial(self.backend.get, key, [PART + part for part in wanted]), key)
            for part, expected in zip(found, wanted, strict=True):
                if part is None or digest(part) != expected:
                    return None
                parts.append(part)
        return parts

    def _run(self, call: Callable[[], T], key: str = "") -> T:
        return self._guard.run(call, self.backend.place(key) if key else "")


def _info_of(key: str, manifest: Manifest) -> EntryInfo:
    head: Any = manifest.head
    return EntryInfo(
        key,
        head["namespace"],
        head["fingerprint"],
        head["num_tokens"],
        manifest.num_bytes,
        head["created"],
        head["created"],
        head["meta"],
        head["context_hash"],
    )
