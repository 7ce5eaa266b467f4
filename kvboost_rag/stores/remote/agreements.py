"""What machines that share a store agree on: each chunk's encoding contexts, and what was deleted."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kvboost_rag.datamodels import ChunkRecord
from kvboost_rag.kv.keys import hash_fields, token_bytes
from kvboost_rag.stores.catalog.erasures import KEPT_S
from kvboost_rag.stores.disk import seal
from kvboost_rag.stores.disk.seal import SEAL_DIGITS
from kvboost_rag.stores.remote.backend import Backend

CLAIM = "c-"
TOMBSTONES = hash_fields("tombstones of a shared store")


@dataclass(frozen=True)
class Claim:
    """The encoding contexts that the first machine to choose gave a chunk.

    Attributes:
        behind: token ids of each neighbour, which need not be known on the machine that adopts them.
    """

    neighbours: tuple[str, ...]
    splits: tuple[int, ...]
    mixture: str
    forward_tokens: int
    behind: tuple[tuple[int, ...], ...]

    def is_of(self, record: ChunkRecord) -> bool:
        """Whether a record is encoded as claimed."""
        return self.adopted_by(record) == record

    def adopted_by(self, record: ChunkRecord) -> ChunkRecord:
        """The record encoded as claimed."""
        return replace(
            record,
            neighbours=self.neighbours,
            splits=self.splits,
            mixture=self.mixture,
            forward_tokens=self.forward_tokens,
        )


@dataclass(frozen=True)
class Deletion:
    """What one machine has deleted and the others have to.

    Attributes:
        digests: of the chunks' content hashes (`erasures.digest_of`): nothing of a text can be read from them.
        touched: namespaces whose exact blocks may hold tokens of these chunks.
        whole: namespaces that are deleted as a whole.
    """

    digests: tuple[str, ...] = ()
    touched: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()


class Agreements:
    """Claims lie under their chunk's key and go with it; deletions under one of their own, for `KEPT_S`.

    Claiming is compare-and-set: a claim is created only where there is none, and whoever comes second reads it. A
    damaged or unsigned one counts as none that can be adopted. Every method raises `RemoteError`.

    Args:
        run: makes attempts at a call that asks for a key (the second argument, where it is about one).
        secret: as for `RemoteStore`.
    """

    def __init__(self, backend: Backend, run: Callable[..., Any], secret: bytes | None) -> None:
        self._backend, self._run, self._secret = backend, run, secret

    def claim(self, record: ChunkRecord, behind: tuple[tuple[int, ...], ...]) -> Claim | None:
        """Claim the record's contexts; what was claimed first, by whomever. None: what lies there cannot be read."""
        self.link(record)
        name = CLAIM + _frame_of(record)
        ours = Claim(record.neighbours, record.splits, record.mixture, record.forward_tokens, behind)
        data = self._sealed(vars(ours))
        if self._run(lambda: self._backend.create(record.content_hash, name, data), record.content_hash):
            return ours
        found = self._read(self._run(lambda: self._backend.get(record.content_hash, [name]), record.content_hash)[0])
        return _claim_of(found) if found is not None else None

    def link(self, record: ChunkRecord) -> None:
        """Say that `record` is encoded after its neighbours: deleting one of them has to reach its KV."""
        for neighbour in record.neighbours:
            key = _dependents_key(neighbour)
            self._run(partial(self._backend.create, key, record.content_hash, b"-"), key)

    def dependents(self, content_hash: str) -> list[str]:
        """Chunks that any machine encoded after this one."""
        return self._run(lambda: self._backend.names(_dependents_key(content_hash)), _dependents_key(content_hash))

    def unlink(self, content_hash: str) -> None:
        """Forget the chunk's dependents."""
        self._run(lambda: self._backend.delete(_dependents_key(content_hash)), _dependents_key(content_hash))

    def bury(self, deletion: Deletion) -> str:
        """Tell the other machines; the name of the tombstone. Tombstones that are too old go."""
        now = time.time()
        name = f"{int(now * 1000):015d}-{secrets.token_hex(8)}"
        data = self._sealed(vars(deletion))
        self._run(lambda: self._backend.create(TOMBSTONES, name, data))
        for old in self._run(lambda: self._backend.names(TOMBSTONES)):
            if now - int(old.partition("-")[0]) / 1000 > KEPT_S:
                self._run(partial(self._backend.remove, TOMBSTONES, old))
        return name

    def deletions(self, seen: Collection[str]) -> Iterator[tuple[str, Deletion | None]]:
        """Tombstones that are not among `seen`, oldest first; None for one that cannot be read."""
        for name in sorted(set(self._run(lambda: self._backend.names(TOMBSTONES))) - set(seen)):
            data = self._run(partial(self._backend.get, TOMBSTONES, [name]))[0]
            if data is None:  # named, but not written yet: next time
                continue
            found = self._read(data)
            yield name, _deletion_of(found) if found is not None else None

    def _sealed(self, body: Mapping[str, object]) -> bytes:
        text = json.dumps(body, separators=(",", ":")).encode()
        return seal.seal([text], self._secret) + text

    def _read(self, data: bytes | None) -> dict[str, Any] | None:
        if data is None or seal.fault(data[:SEAL_DIGITS], [data[SEAL_DIGITS:]], self._secret) is not None:
            return None
        try:
            return dict(json.loads(data[SEAL_DIGITS:]))
        except (ValueError, TypeError, RecursionError):
            return None


def _claim_of(body: Mapping[str, Any]) -> Claim | None:
    try:
        behind = tuple(tuple(map(int, ids)) for ids in body["behind"])
        neighbours, splits = tuple(map(str, body["neighbours"])), tuple(map(int, body["splits"]))
        claim = Claim(neighbours, splits, str(body["mixture"]), int(body["forward_tokens"]), behind)
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    return claim if len(behind) == len(neighbours) else None


def _deletion_of(body: Mapping[str, Any]) -> Deletion | None:
    try:
        return Deletion(*(_texts(body[name]) for name in ("digests", "touched", "whole")))
    except (KeyError, TypeError):
        return None


def _texts(values: Iterable[Any]) -> tuple[str, ...]:
    return tuple(map(str, values))


def _frame_of(record: ChunkRecord) -> str:
    """Records with another anchor are encoded otherwise anyway: they have claims of their own."""
    ids = (token_bytes(record.anchor_ids), token_bytes(record.separator_ids))
    return hash_fields("claim", *ids)[:32]


def _dependents_key(content_hash: str) -> str:
    return hash_fields("dependents", content_hash.encode())
