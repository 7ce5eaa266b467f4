"""Which chunks each source document has: reference counts for documents that share text."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from kvboost_rag.stores.catalog.database import Database

PAGE = 500


class Sources:
    """Maps source ids (file names, document ids) to chunks. Get it as `Catalog.sources`.

    A chunk that several sources share is theirs until the last of them lets go of it.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def link(self, fingerprint: str, namespace: str, source_id: str, content_hashes: Sequence[str]) -> tuple[str, ...]:
        """Say that a source now has exactly these chunks, in order, for the model `fingerprint`.

        Returns:
            Chunks it had before and that no source has any more. They are still known: delete them, or keep them.
        """
        with self._database.transaction() as db:
            before = self.chunks_of(namespace, source_id, fingerprint)
            if before == tuple(content_hashes):
                return ()
            note_change(db)
            db.execute(
                "DELETE FROM sources WHERE namespace = ? AND source_id = ? AND fingerprint = ?",
                (namespace, source_id, fingerprint),
            )
            db.executemany(
                "INSERT INTO sources VALUES (?, ?, ?, ?, ?)",
                ((namespace, source_id, fingerprint, place, chunk) for place, chunk in enumerate(content_hashes)),
            )
            return self._unreferenced(before)

    def unlink(self, namespace: str, source_id: str) -> tuple[str, ...]:
        """Forget a source, for every model; returns the chunks that no source has any more."""
        with self._database.transaction() as db:
            before = self.chunks_of(namespace, source_id)
            note_change(db)
            db.execute("DELETE FROM sources WHERE namespace = ? AND source_id = ?", (namespace, source_id))
            return self._unreferenced(before)

    def chunks_of(self, namespace: str, source_id: str, fingerprint: str | None = None) -> tuple[str, ...]:
        """Content hashes of a source's chunks in order, for one model or (None) all of them."""
        found = self._database.read(
            "SELECT chunk FROM sources WHERE namespace = ? AND source_id = ? "
            "AND fingerprint = coalesce(?, fingerprint) ORDER BY fingerprint, place",
            (namespace, source_id, fingerprint),
        )
        return tuple(row[0] for row in found)

    def place(self, chunks: Sequence[str]) -> None:
        """Say that chunks stand in this order in one document, whether or not it is a source."""
        with self._database.transaction() as db:
            db.executemany("DELETE FROM places WHERE chunk = ?", ((chunk,) for chunk in chunks))
            rows = ((chunk, chunks[0], before) for before, chunk in pairwise(chunks))
            db.executemany("INSERT OR REPLACE INTO places VALUES (?, ?, ?)", rows)

    def places(self, fingerprint: str, namespace: str, chunks: Sequence[str]) -> dict[str, tuple[str, str]]:
        """For each of `chunks` that stands after others in a document: its first chunk, and the one just before.

        What `place` said counts first, then the sources; a chunk that several sources have is taken where the first of
        them, by name, has it.
        """
        same = "{0}.namespace = s.namespace AND {0}.source_id = s.source_id AND {0}.fingerprint = s.fingerprint"
        in_sources = (
            f"SELECT s.chunk, head.chunk, before.chunk FROM sources s "
            f"JOIN sources head ON {same.format('head')} AND head.place = 0 "
            f"JOIN sources before ON {same.format('before')} AND before.place = s.place - 1 "
            "WHERE s.namespace = ? AND s.fingerprint = ? AND s.chunk IN ({marks}) ORDER BY s.source_id, s.place"
        )
        found: dict[str, tuple[str, str]] = {}
        for start in range(0, len(chunks), PAGE):
            page = chunks[start : start + PAGE]
            marks = ",".join("?" * len(page))
            rows = self._database.read(f"SELECT chunk, head, before FROM places WHERE chunk IN ({marks})", page)
            rows += self._database.read(in_sources.replace("{marks}", marks), (namespace, fingerprint, *page))
            for chunk, head, before in rows:
                found.setdefault(chunk, (head, before))
        return found

    def all(self, namespace: str | None = None) -> list[tuple[str, str]]:
        """`(namespace, source_id)` of all sources, or of those of one namespace."""
        return self._database.read(
            "SELECT DISTINCT namespace, source_id FROM sources WHERE namespace = coalesce(?, namespace) "
            "ORDER BY namespace, source_id",
            (namespace,),
        )

    def of_chunk(self, content_hash: str) -> tuple[str, ...]:
        """Source ids that have a chunk."""
        found = self._database.read(
            "SELECT DISTINCT source_id FROM sources WHERE chunk = ? ORDER BY source_id", (content_hash,)
        )
        return tuple(row[0] for row in found)

    def only_of(self, chunks: Mapping[str, Iterable[str]]) -> list[str]:
        """Of chunks by source id (of one namespace) those that no other source has."""
        owners: dict[str, set[str]] = {}
        for source_id, keys in chunks.items():
            for key in keys:
                owners.setdefault(key, set()).add(source_id)
        return [key for key, owned in owners.items() if owned.issuperset(self.of_chunk(key))]

    def state(self) -> str:
        """Equal as long as nothing changed in which chunks are known and whose they are. Cheap, whatever their number.

        Removed chunks take their places in sources along.
        """
        found = self._database.read(
            "SELECT (SELECT num_changes FROM source_changes), (SELECT coalesce(max(seq), 0) FROM chunks), "
            "(SELECT removals FROM catalog_state)"
        )
        return "/".join(map(str, found[0]))

    def _unreferenced(self, chunks: Iterable[str]) -> tuple[str, ...]:
        gone = dict.fromkeys(chunks)
        return tuple(c for c in gone if not self._database.read("SELECT 1 FROM sources WHERE chunk = ? LIMIT 1", (c,)))


def note_change(db: sqlite3.Connection) -> None:
    """Count a change of what sources have, in the caller's transaction."""
    db.execute("UPDATE source_changes SET num_changes = num_changes + 1")
