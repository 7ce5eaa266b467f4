"""The rows that a disk store keeps of its files, in the catalog's database: who holds how many bytes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kvboost_rag.stores.base import EntryInfo
from kvboost_rag.stores.catalog import schema
from kvboost_rag.stores.catalog.database import Database
from kvboost_rag.stores.eviction import EntryUse

# Triggers keep the sum of all bytes, held and reserved, in the same transaction as the rows, so that processes that
# share the folder share one exact account.
SCHEMA = (
    schema.SCHEMA.strip()
    + """;

CREATE TABLE IF NOT EXISTS files (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    key TEXT NOT NULL UNIQUE,
    namespace TEXT NOT NULL,
    fingerprint TEXT NOT NULL,
    num_tokens INTEGER NOT NULL,
    num_bytes INTEGER NOT NULL,
    created REAL NOT NULL,
    meta TEXT NOT NULL,
    context_hash TEXT NOT NULL,
    last_used REAL NOT NULL,
    hits INTEGER NOT NULL DEFAULT 0,
    frequency REAL NOT NULL DEFAULT 1.0,
    deviation REAL);

CREATE TABLE IF NOT EXISTS reservations (
    id INTEGER PRIMARY KEY AUTOINCREMENT, owner TEXT NOT NULL, key TEXT NOT NULL, num_bytes INTEGER NOT NULL);

CREATE TABLE IF NOT EXISTS disk_state (id INTEGER PRIMARY KEY CHECK (id = 1), num_bytes INTEGER NOT NULL);

INSERT OR IGNORE INTO disk_state VALUES (1, 0);

CREATE TRIGGER IF NOT EXISTS file_added AFTER INSERT ON files BEGIN
    UPDATE disk_state SET num_bytes = num_bytes + NEW.num_bytes; END;

CREATE TRIGGER IF NOT EXISTS file_removed AFTER DELETE ON files BEGIN
    UPDATE disk_state SET num_bytes = num_bytes - OLD.num_bytes; END;

CREATE TRIGGER IF NOT EXISTS bytes_reserved AFTER INSERT ON reservations BEGIN
    UPDATE disk_state SET num_bytes = num_bytes + NEW.num_bytes; END;

CREATE TRIGGER IF NOT EXISTS bytes_released AFTER DELETE ON reservations BEGIN
    UPDATE disk_state SET num_bytes = num_bytes - OLD.num_bytes; END
"""
)


_KINDS = {"key": "text", "namespace": "text", "fingerprint": "text", "meta": "text", "context_hash": "text"}
_KINDS |= {"num_tokens": "integer", "num_bytes": "integer", "hits": "integer"}
_KINDS |= {"created": "real", "last_used": "real", "frequency": "real"}


@dataclass(frozen=True)
class Reservation:
    """Bytes set aside for a file that is being written; `key` is empty in the row of one that is kept for the next."""

    id: int
    owner: str
    key: str
    num_bytes: int


class FileTable:
    """Rows of files and reservations. Every method may run inside the caller's `database.transaction()`."""

    def __init__(self, database: Database) -> None:
        self.database = database

    def total_bytes(self) -> int:
        """Bytes of all files, and those reserved for files being written."""
        return int(self.database.read("SELECT num_bytes FROM disk_state")[0][0])

    def held_bytes(self) -> int:
        """Bytes of all files, and of those being written, without what is only set aside for the next."""
        kept = "SELECT coalesce(sum(num_bytes), 0) FROM reservations WHERE key = ''"
        return int(self.database.read(f"SELECT num_bytes - ({kept}) FROM disk_state")[0][0])

    def drop_damaged(self) -> int:
        """Drop rows whose columns hold what was never written there; returns how many."""
        with self.database.transaction() as db:
            wrong = " OR ".join(f"typeof({column}) != '{kind}'" for column, kind in _KINDS.items())
            count = db.execute(f"DELETE FROM files WHERE {wrong}").rowcount
            if count:
                self.recount()
            return count

    def recount(self) -> None:
        """Sum the account anew from the rows."""
        with self.database.transaction() as db:
            db.execute(
                "UPDATE disk_state SET num_bytes = (SELECT coalesce(sum(num_bytes), 0) FROM files)"
                " + (SELECT coalesce(sum(num_bytes), 0) FROM reservations)"
            )

    def bytes_of(self, key: str) -> int | None:
        """Bytes of one file, or None if there is no such row."""
        found = self.database.read("SELECT num_bytes FROM files WHERE key = ?", (key,))
        return int(found[0][0]) if found else None

    def reserve(self, owner: str, key: str, num_bytes: int) -> Reservation:
        """Set bytes aside."""
        with self.database.transaction() as db:
            cursor = db.execute(
                "INSERT INTO reservations (owner, key, num_bytes) VALUES (?, ?, ?)", (owner, key, num_bytes)
            )
            return Reservation(int(cursor.lastrowid or 0), owner, key, num_bytes)

    def release(self, reservation: Reservation) -> None:
        """Give reserved bytes back."""
        with self.database.transaction() as db:
            db.execute("DELETE FROM reservations WHERE id = ?", (reservation.id,))

    def reservations(self) -> list[Reservation]:
        """All that are open, of all processes."""
        return [Reservation(*row) for row in self.database.read("SELECT id, owner, key, num_bytes FROM reservations")]

    def add(self, info: EntryInfo) -> int:
        """Note a file, in place of an earlier one of the same key; returns the row's `seq`."""
        with self.database.transaction() as db:
            db.execute("DELETE FROM files WHERE key = ?", (info.key,))
            cursor = db.execute(
                "INSERT INTO files (key, namespace, fingerprint, num_tokens, num_bytes, created, meta, "
                "context_hash, last_used) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    info.key,
                    info.namespace,
                    info.fingerprint,
                    info.num_tokens,
                    info.num_bytes,
                    info.created,
                    json.dumps(dict(info.meta)),
                    info.context_hash,
                    info.last_used,
                ),
            )
            return int(cursor.lastrowid or 0)

    def remove(self, key: str) -> bool:
        """Forget a file; whether it was known."""
        with self.database.transaction() as db:
            return db.execute("DELETE FROM files WHERE key = ?", (key,)).rowcount > 0

    def infos(self, key: str | None = None) -> Iterator[EntryInfo]:
        """All files, or the one of `key` if there is a row."""
        found = self.database.read(
            "SELECT key, namespace, fingerprint, num_tokens, num_bytes, created, last_used, meta, context_hash "
            "FROM files " + ("" if key is None else "WHERE key = ?"),
            () if key is None else (key,),
        )
        for key, namespace, fingerprint, tokens, size, created, last_used, meta, context in found:
            yield EntryInfo(key, namespace, fingerprint, tokens, size, created, last_used, _parsed(meta), context)

    def uses_after(self, seq: int) -> tuple[int, list[tuple[str, EntryUse]]]:
        """Files added after `seq` (by any process), those unused longest first, and the last `seq`."""
        found = self.database.read(
            "SELECT seq, key, num_bytes, created, last_used, hits, deviation, frequency FROM files WHERE seq > ?",
            (seq,),
        )
        now = time.time()  # a clock that ran ahead would have entries live for ever
        uses = [
            (key, EntryUse(size, min(created, now), min(used, now), 0, 0, hits, deviation, frequency))
            for _, key, size, created, used, hits, deviation, frequency in sorted(found, key=lambda row: row[4])
        ]
        return max((row[0] for row in found), default=seq), uses

    def save_uses(self, uses: Mapping[str, EntryUse]) -> None:
        """Write use counts down, so that eviction knows them after a restart."""
        with self.database.transaction() as db:
            db.executemany(
                "UPDATE files SET last_used = ?, hits = ?, frequency = ?, deviation = ? WHERE key = ?",
                [(u.last_used, u.hits, u.frequency, u.deviation, key) for key, u in uses.items()],
            )


def _parsed(meta: object) -> dict[str, str]:
    """Of a damaged row: nothing."""
    try:
        found = json.loads(meta)  # type: ignore[arg-type]
    except (TypeError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
