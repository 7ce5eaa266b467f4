"""What was deleted, and whether every tier has let go of it: written in the transaction that forgets."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable

from kvboost_rag.kv.keys import hash_fields
from kvboost_rag.stores.catalog.database import Database

KEPT_S = 30 * 86_400.0
"""How long a tombstone keeps late writers out, in seconds."""


class Erasures:
    """A journal of keys whose stored entries have to go. Get it as `Catalog.erasures`.

    A key is pending from the transaction that forgot it until its entries are gone from every tier and the catalog's
    log is empty, so that a deletion which was interrupted is finished by whoever comes next
    (`maintenance.finish_erasures`). A tombstone stays for a while: a process that was still encoding the chunk must not
    bring it back. It holds a digest of the key, which is itself a digest: nothing of a text can be read from it.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def begin(self, db: sqlite3.Connection, keys: Iterable[str]) -> None:
        """Say in the caller's transaction that the entries of `keys` have to go."""
        db.executemany("INSERT OR IGNORE INTO erasures VALUES (?)", ((key,) for key in keys))

    def bury(self, db: sqlite3.Connection, chunks: Iterable[str]) -> None:
        """Say in the caller's transaction that `chunks` are not known any more. Old tombstones go."""
        now = time.time()
        db.executemany("INSERT OR REPLACE INTO tombstones VALUES (?, ?)", ((digest_of(chunk), now) for chunk in chunks))
        db.execute("DELETE FROM tombstones WHERE abs(erased - ?) > ?", (now, KEPT_S))

    def pending(self) -> list[str]:
        """Keys whose entries may still be somewhere."""
        return [row[0] for row in self._database.read("SELECT key FROM erasures")]

    def finish(self, keys: Iterable[str]) -> None:
        """The entries of `keys` are gone."""
        with self._database.transaction() as db:
            db.executemany("DELETE FROM erasures WHERE key = ?", ((key,) for key in keys))

    def seen(self) -> set[str]:
        """Names of other machines' deletions that were carried out here."""
        return {row[0] for row in self._database.read("SELECT name FROM deletions_seen")}

    def note_seen(self, name: str) -> None:
        """A deletion of that name was carried out here."""
        with self._database.transaction() as db:
            db.execute("INSERT OR IGNORE INTO deletions_seen VALUES (?)", (name,))

    def revive(self, db: sqlite3.Connection, key: str) -> None:
        """Say in the caller's transaction that a chunk is known again."""
        db.execute("DELETE FROM tombstones WHERE digest = ?", (digest_of(key),))

    def lift(self, key: str) -> None:
        """KV of a deleted chunk, whose text came back without being indexed, may be stored again."""
        with self._database.transaction() as db:
            self.revive(db, key)

    def erased_at(self, key: str) -> float | None:
        """When `key` was deleted (epoch seconds), if it has not become known again."""
        found = self._database.read("SELECT erased FROM tombstones WHERE digest = ?", (digest_of(key),))
        return float(found[0][0]) if found else None

    def __contains__(self, key: object) -> bool:
        """Whether `key` was deleted and has not become known again."""
        return bool(self._database.read("SELECT 1 FROM tombstones WHERE digest = ?", (digest_of(key),)))


def digest_of(key: object) -> str:
    """What is remembered of a deleted chunk's key."""
    return hash_fields("tombstone", str(key).encode())
