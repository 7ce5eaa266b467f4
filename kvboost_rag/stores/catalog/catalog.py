"""What is remembered of chunks whether or not their KV is held: text, token ids, encoding context, sources."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvboost_rag.datamodels import ChunkRecord
from kvboost_rag.kv.keys import content_hash as hash_of
from kvboost_rag.kv.keys import encoding_contexts, record_context_hash
from kvboost_rag.stores.catalog import rows
from kvboost_rag.stores.catalog.contexts import without
from kvboost_rag.stores.catalog.database import Database
from kvboost_rag.stores.catalog.erasures import Erasures
from kvboost_rag.stores.catalog.schema import SCHEMA, SCHEMA_VERSION
from kvboost_rag.stores.catalog.sources import Sources, note_change

if TYPE_CHECKING:
    from kvboost_rag.stores.catalog.chunk_arrays import ChunkArrays

logger = logging.getLogger(__name__)

PAGE = 1000

Tokens = Mapping[str, tuple[int, ...]]
"""Token ids by content hash."""


@dataclass(frozen=True)
class CatalogVersion:
    """Changes when the catalog's chunks do, also when another process changed them.

    Attributes:
        last_seq: `texts(after=last_seq)` gives what was added since.
        removals: grows with each removed chunk; an index of texts drops hits whose `get` is None, or is built anew.
    """

    last_seq: int
    removals: int


class Catalog:
    """Remembers `ChunkRecord`s in SQLite: in a file that several processes may share, or in memory.

    The first record of a content hash wins, so that all writers encode a chunk after the same context. Rows read
    are checked against their digests: a damaged row counts as absent (`damaged`).

    Args:
        database: a path, `":memory:"`, or a `Database` opened with (at least) `schema.SCHEMA`.
        secret: sign rows with HMAC-SHA256 and believe only rows signed with it.

    Attributes:
        sources: which document has which chunks.
        erasures: what was deleted, and is perhaps still held somewhere.
        damaged: content hashes of the damaged (or unsigned) rows met so far.

    Raises:
        DamagedDatabaseError: the file is not a readable database, or has an earlier schema version.
        StoreError: the file has a later schema version.
    """

    def __init__(self, database: str | Path | Database = ":memory:", secret: bytes | None = None) -> None:
        if not isinstance(database, Database):
            database = Database(database, SCHEMA, SCHEMA_VERSION)
            if database.is_new:
                database.finish_creation()
        self.database = database
        self.sources = Sources(database)
        self.erasures = Erasures(database)
        self.damaged: set[str] = set()
        self._secret = secret

    def arrays(self, kind: str, fingerprint: str, namespace: str, dtype: Any) -> ChunkArrays:
        """What was computed from chunks, such as embeddings: arrays of one kind, model and namespace."""
        from kvboost_rag.stores.catalog.chunk_arrays import ChunkArrays

        return ChunkArrays(self.database, kind, fingerprint, namespace, dtype)

    def add(self, record: ChunkRecord) -> ChunkRecord:
        """Remember `record` unless its content hash is known; returns the record that counts from now on."""
        return self.add_many([record])[0]

    def add_many(self, records: Sequence[ChunkRecord]) -> list[ChunkRecord]:
        """`add` for many in one transaction. They may name each other as neighbours.

        Raises:
            ValueError: a record's content hash is not that of its token ids, or a neighbour is not known, is of
                another model or namespace, or is the chunk itself. Nothing is added then.
        """
        with self.database.transaction() as db:
            distinct = {r.content_hash: r for r in records}
            known = self.get_many(distinct)
            new = [r for r in distinct.values() if r.content_hash not in known]
            for record in new:
                rows.insert(db, record)
                self.erasures.revive(db, record.content_hash)
            for record in new:
                rows.set_context(db, record, self._secret)
        known.update((r.content_hash, r) for r in new)
        return [known[r.content_hash] for r in records]

    def restore(self, record: ChunkRecord, neighbour_tokens: Sequence[tuple[int, ...]]) -> None:
        """`add` from a chunk file, which also holds its neighbours' token ids; unknown ones are kept as removed chunks.

        Raises:
            ValueError: as in `add_many`.
        """
        with self.database.transaction() as db:
            if self.get(record.content_hash) is not None:
                return
            for neighbour, ids in zip(record.neighbours, neighbour_tokens, strict=True):
                rows.insert_removed(db, record, neighbour, ids)
            rows.insert(db, record)
            rows.set_context(db, record, self._secret, removed_allowed=True)

    def replace(self, *records: ChunkRecord, stale: Iterable[str] = (), elsewhere: Tokens | None = None) -> None:
        """Give known chunks other encoding contexts; KV stored with the old ones becomes a miss (`context`).

        Args:
            stale: those whose KV is stored: it has to go (`maintenance.set_contexts` sees to that).
            elsewhere: token ids of neighbours that only other machines may know; kept like removed chunks'.

        Raises:
            KeyError: a chunk is not known. Nothing is changed then.
            ValueError: as in `add_many`.
        """
        with self.database.transaction() as db:
            for record in records:
                if not rows.is_live(db, record.content_hash):
                    raise KeyError(record.content_hash)
                for neighbour in set(record.neighbours).intersection(elsewhere or ()):
                    rows.insert_removed(db, record, neighbour, (elsewhere or {})[neighbour], elsewhere=True)
                rows.set_context(db, record, self._secret, removed_allowed=bool(elsewhere))
            rows.purge(db)
            self.erasures.begin(db, stale)

    def get(self, content_hash: str) -> ChunkRecord | None:
        """The record of a chunk, or None."""
        return self.get_many([content_hash]).get(content_hash)

    def get_many(self, content_hashes: Iterable[str]) -> dict[str, ChunkRecord]:
        """Records of those chunks that are known."""
        wanted, found = list(content_hashes), {}
        for start in range(0, len(wanted), PAGE):
            for key, record in rows.select(self.database, wanted[start : start + PAGE], self._secret):
                if record is not None:
                    found[key] = record
                elif key not in self.damaged:
                    logger.error("the catalog's row of chunk %s is damaged; it counts as unknown", key[:16])
                    self.damaged.add(key)
        return found

    def known(self, content_hashes: Iterable[str]) -> set[str]:
        """Those content hashes that are known; their rows are not checked as `get_many` does."""
        wanted = list(content_hashes)
        found: set[str] = set()
        for start in range(0, len(wanted), PAGE):
            page = wanted[start : start + PAGE]
            marks = ",".join("?" * len(page))
            sql = f"SELECT content_hash FROM chunks WHERE content_hash IN ({marks}) AND NOT removed"
            found.update(row[0] for row in self.database.read(sql, page))
        return found

    def contexts(self, record: ChunkRecord) -> tuple[tuple[int, ...], ...]:
        """Token ids of each of the record's encoding contexts: the anchor, then its neighbours in order, separated.

        Raises:
            KeyError: a neighbour's token ids are not in the catalog.
        """
        return encoding_contexts(record, self.neighbour_tokens(record))

    def context_hash(self, record: ChunkRecord) -> str:
        """What KV must have been encoded after to be the record's (`kv.keys.record_context_hash`); raises as above."""
        return record_context_hash(record, self.neighbour_tokens(record))

    def neighbour_tokens(self, record: ChunkRecord) -> tuple[tuple[int, ...], ...]:
        """Token ids of each neighbour, removed ones included. Raises KeyError as `contexts` does."""
        ids = rows.tokens(self.database, record.neighbours)
        for neighbour in record.neighbours:
            if neighbour not in ids or hash_of(record.fingerprint, record.namespace, ids[neighbour]) != neighbour:
                raise KeyError(neighbour)
        return tuple(ids[neighbour] for neighbour in record.neighbours)

    def texts(self, fingerprint: str, namespace: str, after: int = 0) -> Iterator[tuple[int, str, str]]:
        """`(seq, content_hash, text)` of the namespace's chunks added after `after`, oldest first."""
        while True:
            page = self.database.read(
                "SELECT seq, content_hash, text FROM chunks WHERE namespace = ? AND fingerprint = ? AND seq > ? "
                f"AND NOT removed ORDER BY seq LIMIT {PAGE}",
                (namespace, fingerprint, after),
            )
            yield from (row for row in page if isinstance(row[2], str))
            if len(page) < PAGE:
                return
            after = page[-1][0]

    def version(self) -> CatalogVersion:
        """Cheap to ask before each request; see `CatalogVersion`."""
        sql = "SELECT (SELECT coalesce(max(seq), 0) FROM chunks), (SELECT removals FROM catalog_state)"
        return CatalogVersion(*self.database.read(sql)[0])

    def forget(
        self, content_hashes: Iterable[str], sources: Iterable[tuple[str, str]] = (), entries: Iterable[str] = ()
    ) -> tuple[str, ...]:
        """Forget chunks, with all that was computed from them, in one transaction.

        Chunks that were encoded after them get an encoding context without them. The keys of all entries that must not
        be served or kept any more are pending erasures from then on; `maintenance.forget` deletes them.

        Args:
            sources: `(namespace, source_id)` to forget as well.
            entries: keys of other stored entries that have to go.

        Returns:
            Content hashes of the chunks that were encoded after forgotten ones.
        """
        gone = dict.fromkeys(content_hashes)
        with self.database.transaction() as db:
            dependents = {d: None for chunk in gone for d in self.dependents(chunk) if d not in gone}
            known = self.get_many(dependents)
            for record in known.values():
                rows.set_context(db, without(record, gone), self._secret, True)
            for namespace, source_id in sources:
                note_change(db)
                db.execute("DELETE FROM sources WHERE namespace = ? AND source_id = ?", (namespace, source_id))
            # A damaged record cannot be given another context; its chunk is registered again when it is next needed.
            unusable = [d for d in dependents if d not in known]
            rows.remove(db, [*gone, *unusable])
            rows.purge(db)
            self.erasures.bury(db, [*gone, *unusable])
            self.erasures.begin(db, {**gone, **dependents, **dict.fromkeys(entries)})
        return tuple(dependents)

    def forget_namespaces(self, namespaces: Iterable[str], entries: Iterable[str] = ()) -> tuple[str, ...]:
        """Forget all chunks and sources of these namespaces in one transaction; returns the chunks' content hashes."""
        with self.database.transaction() as db:
            gone = [chunk for namespace in namespaces for chunk in rows.remove_namespace(db, namespace)]
            rows.purge(db)
            self.erasures.bury(db, gone)
            self.erasures.begin(db, dict.fromkeys([*gone, *entries]))
        return tuple(gone)

    def elsewhere(self) -> set[str]:
        """Content hashes of chunks that are not known here, but on another machine that shares the store."""
        return {row[0] for row in self.database.read("SELECT content_hash FROM chunks WHERE removed = 2")}

    def dependents(self, content_hash: str) -> tuple[str, ...]:
        """Content hashes of the chunks that were encoded after this one."""
        sql = "SELECT DISTINCT chunk FROM contexts WHERE neighbour = ? ORDER BY chunk"
        return tuple(row[0] for row in self.database.read(sql, (content_hash,)))

    def orphan_arrays(self) -> list[str]:
        """Keys of arrays whose chunk is not known; kinds that begin with `prompt/` are about prompts, not chunks."""
        sql = (
            "SELECT DISTINCT key FROM arrays WHERE kind NOT LIKE 'prompt/%' AND NOT EXISTS "
            "(SELECT 1 FROM chunks WHERE content_hash = key AND NOT removed) ORDER BY key"
        )
        return [row[0] for row in self.database.read(sql)]

    def purge(self) -> None:
        """Drop what nothing refers to any more."""
        with self.database.transaction() as db:
            rows.purge(db)
            db.executemany("DELETE FROM arrays WHERE key = ?", [(key,) for key in self.orphan_arrays()])

    def namespaces(self) -> tuple[str, ...]:
        """Namespaces that have chunks, sources or arrays."""
        sql = "SELECT namespace FROM chunks UNION SELECT namespace FROM sources UNION SELECT namespace FROM arrays"
        return tuple(row[0] for row in self.database.read(sql))

    def fingerprints(self) -> tuple[str, ...]:
        """Fingerprints of the models that have chunks."""
        sql = "SELECT DISTINCT fingerprint FROM chunks WHERE NOT removed ORDER BY fingerprint"
        return tuple(row[0] for row in self.database.read(sql))

    def models_of(self, namespace: str) -> tuple[str, ...]:
        """Models whose chunks, removed ones included, a namespace has."""
        sql = "SELECT DISTINCT fingerprint FROM chunks WHERE namespace = ?"
        return tuple(row[0] for row in self.database.read(sql, (namespace,)))

    def hashes(self, namespace: str | None = None, created_before: float | None = None) -> list[str]:
        """Content hashes of all chunks, or of one namespace's, or of those remembered before a time (epoch seconds)."""
        scope = "AND namespace = ? " if namespace is not None else ""
        found = self.database.read(
            f"SELECT content_hash FROM chunks WHERE NOT removed {scope}AND created < ? ORDER BY seq",
            (*([namespace] if namespace is not None else []), 9e99 if created_before is None else created_before),
        )
        return [row[0] for row in found]

    def __len__(self) -> int:
        # Both counts come from an index; one with `NOT removed` would read every row.
        both = "SELECT (SELECT count(*) FROM chunks) - (SELECT count(*) FROM chunks WHERE removed)"
        return int(self.database.read(both)[0][0])

    def close(self) -> None:
        """Release the file."""
        self.database.close()
