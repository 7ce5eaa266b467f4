"""Which chunks each source document has: reference counts for documents that share text."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from kvboost_rag.stores.catalog.database import Database


class SourceLinks:
    """The part of the catalog that maps source ids (file names, document ids) to chunks.

    A chunk that several sources share is theirs until the last of them lets go of it.
    """

    database: Database

    def link(self, fingerprint: str, namespace: str, source_id: str, content_hashes: Sequence[str]) -> tuple[str, ...]:
        """Say that a source now has exactly these chunks, in order, for the model `fingerprint`.

        Returns:
            Chunks it had before and that no source has any more. They are still known: delete them, or keep them.
        """
        with self.database.transaction() as db:
            before = self.chunks_of(namespace, source_id, fingerprint)
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
        with self.database.transaction() as db:
            before = self.chunks_of(namespace, source_id)
            db.execute("DELETE FROM sources WHERE namespace = ? AND source_id = ?", (namespace, source_id))
            return self._unreferenced(before)

    def chunks_of(self, namespace: str, source_id: str, fingerprint: str | None = None) -> tuple[str, ...]:
        """Content hashes of a source's chunks in order, for one model or (None) all of them."""
        found = self.database.read(
            "SELECT chunk FROM sources WHERE namespace = ? AND source_id = ? "
            "AND fingerprint = coalesce(?, fingerprint) ORDER BY fingerprint, place",
            (namespace, source_id, fingerprint),
        )
        return tuple(row[0] for row in found)

    def sources(self, namespace: str | None = None) -> list[tuple[str, str]]:
        """`(namespace, source_id)` of all sources, or of one tenant's."""
        return self.database.read(
            "SELECT DISTINCT namespace, source_id FROM sources WHERE namespace = coalesce(?, namespace) "
            "ORDER BY namespace, source_id",
            (namespace,),
        )

    def sources_of(self, content_hash: str) -> tuple[str, ...]:
        """Source ids that have a chunk."""
        found = self.database.read(
            "SELECT DISTINCT source_id FROM sources WHERE chunk = ? ORDER BY source_id", (content_hash,)
        )
        return tuple(row[0] for row in found)

    def state(self) -> str:
        """A digest of which chunks are known and whose they are: equal as long as nothing of that changed."""
        digest = hashlib.blake2b(digest_size=16)
        for query in (
            "SELECT * FROM sources ORDER BY namespace, source_id, fingerprint, place",
            "SELECT content_hash FROM chunks WHERE NOT removed ORDER BY content_hash",
        ):
            digest.update(repr(self.database.read(query)).encode())
        return digest.hexdigest()

    def _unreferenced(self, chunks: Iterable[str]) -> tuple[str, ...]:
        gone = dict.fromkeys(chunks)
        return tuple(c for c in gone if not self.database.read("SELECT 1 FROM sources WHERE chunk = ? LIMIT 1", (c,)))
