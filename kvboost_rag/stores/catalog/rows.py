"""The catalog's tables and what is done to their rows inside a transaction."""

from __future__ import annotations

import logging
import sqlite3
import sys
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence

from kvboost_rag.datamodels import ChunkRecord
from kvboost_rag.kv.keys import content_hash, hash_fields, token_bytes
from kvboost_rag.stores.catalog.database import Database

logger = logging.getLogger(__name__)

SCHEMA_VERSION = 2

# A removed chunk that others were encoded behind stays as a row without text (`removed` = 1) until the last of them
# gets another context. `seq` grows with every added or revived chunk, so that readers can ask for what is new.
SCHEMA = """
CREATE TABLE IF NOT EXISTS chunks (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    content_hash TEXT NOT NULL UNIQUE,
    fingerprint TEXT NOT NULL,
    namespace TEXT NOT NULL,
    text TEXT NOT NULL,
    token_ids BLOB NOT NULL,
    anchor TEXT NOT NULL,
    created REAL NOT NULL,
    removed INTEGER NOT NULL DEFAULT 0);

CREATE INDEX IF NOT EXISTS chunks_by_namespace ON chunks (namespace, fingerprint, seq);

CREATE INDEX IF NOT EXISTS live_chunks ON chunks (namespace, seq, content_hash, created) WHERE NOT removed;

CREATE INDEX IF NOT EXISTS removed_chunks ON chunks (content_hash) WHERE removed;

CREATE TABLE IF NOT EXISTS anchors (
    hash TEXT PRIMARY KEY,
    token_ids BLOB NOT NULL,
    separator_ids BLOB NOT NULL) WITHOUT ROWID;

CREATE TABLE IF NOT EXISTS contexts (
    chunk TEXT NOT NULL,
    place INTEGER NOT NULL,
    neighbour TEXT NOT NULL,
    PRIMARY KEY (chunk, place)) WITHOUT ROWID;

CREATE INDEX IF NOT EXISTS contexts_by_neighbour ON contexts (neighbour);

CREATE TABLE IF NOT EXISTS forwards (
    chunk TEXT PRIMARY KEY,
    num_tokens INTEGER NOT NULL) WITHOUT ROWID;

CREATE TABLE IF NOT EXISTS sources (
    namespace TEXT NOT NULL,
    source_id TEXT NOT NULL,
    fingerprint TEXT NOT NULL,
    place INTEGER NOT NULL,
    chunk TEXT NOT NULL,
    PRIMARY KEY (namespace, source_id, fingerprint, place)) WITHOUT ROWID;

CREATE INDEX IF NOT EXISTS sources_by_chunk ON sources (chunk);

CREATE TABLE IF NOT EXISTS catalog_state (id INTEGER PRIMARY KEY CHECK (id = 1), removals INTEGER NOT NULL);

INSERT OR IGNORE INTO catalog_state VALUES (1, 0)
"""


def is_live(db: sqlite3.Connection, chunk: str) -> bool:
    """Whether a chunk is known and not removed."""
    return db.execute("SELECT 1 FROM chunks WHERE content_hash = ? AND NOT removed", (chunk,)).fetchone() is not None


def insert(db: sqlite3.Connection, record: ChunkRecord) -> None:
    """Add a chunk without its neighbours, in place of a removed or damaged row of the same hash.

    Raises:
        ValueError: the content hash is not that of the token ids.
    """
    _check_hash(record)
    drop_context(db, record.content_hash)
    db.execute("DELETE FROM chunks WHERE content_hash = ?", (record.content_hash,))
    db.execute(
        "INSERT INTO chunks (content_hash, fingerprint, namespace, text, token_ids, anchor, created) "
        "VALUES (?, ?, ?, ?, ?, '', ?)",
        (
            record.content_hash,
            record.fingerprint,
            record.namespace,
            record.text,
            pack(record.token_ids),
            time.time(),
        ),
    )
    set_anchor(db, record)


def insert_removed(db: sqlite3.Connection, dependent: ChunkRecord, chunk: str, token_ids: tuple[int, ...]) -> None:
    """Keep only the token ids of a chunk that `dependent` was encoded behind, unless the chunk is known."""
    if content_hash(dependent.fingerprint, dependent.namespace, token_ids) != chunk:
        raise ValueError(f"token ids of neighbour {chunk[:16]} do not have its hash")
    db.execute(
        "INSERT OR IGNORE INTO chunks "
        "(content_hash, fingerprint, namespace, text, token_ids, anchor, created, removed) "
        "VALUES (?, ?, ?, '', ?, '', ?, 1)",
        (chunk, dependent.fingerprint, dependent.namespace, pack(token_ids), time.time()),
    )


def set_anchor(db: sqlite3.Connection, record: ChunkRecord) -> None:
    """Store the record's anchor and separator once for all chunks that share them."""
    anchor = _anchor_hash(record)
    db.execute(
        "INSERT OR IGNORE INTO anchors VALUES (?, ?, ?)", (anchor, pack(record.anchor_ids), pack(record.separator_ids))
    )
    db.execute("UPDATE chunks SET anchor = ? WHERE content_hash = ?", (anchor, record.content_hash))


def _anchor_hash(record: ChunkRecord) -> str:
    return hash_fields("anchor", token_bytes(record.anchor_ids), token_bytes(record.separator_ids))


def set_context(db: sqlite3.Connection, record: ChunkRecord, removed_allowed: bool = False) -> None:
    """Store the record's neighbours, and the length of its forward.

    Raises:
        ValueError: a neighbour is not a known chunk of the same model and namespace, or is the chunk itself.
    """
    for place, neighbour in enumerate(record.neighbours):
        row = db.execute(
            "SELECT fingerprint, namespace, removed FROM chunks WHERE content_hash = ?", (neighbour,)
        ).fetchone()
        if neighbour == record.content_hash or row is None or (row[2] and not removed_allowed):
            raise ValueError(f"neighbour {neighbour[:16]} of {record.content_hash[:16]} is not another known chunk")
        if row[:2] != (record.fingerprint, record.namespace):
            raise ValueError(f"neighbour {neighbour[:16]} of {record.content_hash[:16]} has another model or namespace")
        db.execute("INSERT INTO contexts VALUES (?, ?, ?)", (record.content_hash, place, neighbour))
    if record.forward_tokens:
        db.execute("INSERT INTO forwards VALUES (?, ?)", (record.content_hash, record.forward_tokens))


def drop_context(db: sqlite3.Connection, chunk: str) -> None:
    """Forget which chunks `chunk` was encoded behind."""
    db.execute("DELETE FROM contexts WHERE chunk = ?", (chunk,))
    db.execute("DELETE FROM forwards WHERE chunk = ?", (chunk,))


def remove(db: sqlite3.Connection, chunks: Iterable[str]) -> None:
    """Take chunks out, their text and links at once, their token ids when nothing depends on them."""
    for chunk in chunks:
        if is_live(db, chunk):
            db.execute("UPDATE catalog_state SET removals = removals + 1")
        drop_context(db, chunk)
        db.execute("DELETE FROM sources WHERE chunk = ?", (chunk,))
        db.execute("UPDATE chunks SET removed = 1, text = '', anchor = '' WHERE content_hash = ?", (chunk,))
    purge(db)


def purge(db: sqlite3.Connection) -> None:
    """Drop removed chunks that nothing depends on any more."""
    db.execute(
        "DELETE FROM chunks WHERE removed AND NOT EXISTS (SELECT 1 FROM contexts WHERE neighbour = content_hash)"
    )


def purge_anchors(db: sqlite3.Connection) -> None:
    """Drop anchors that no chunk uses."""
    db.execute("DELETE FROM anchors WHERE hash NOT IN (SELECT anchor FROM chunks)")


def select(database: Database, chunks: Sequence[str]) -> Iterator[ChunkRecord]:
    """Records of known chunks; a row that does not have its hashes (a damaged file) counts as absent."""
    marks = ",".join("?" * len(chunks))
    neighbours: dict[str, list[str]] = {}
    for chunk, neighbour in database.read(
        f"SELECT chunk, neighbour FROM contexts WHERE chunk IN ({marks}) ORDER BY chunk, place", chunks
    ):
        neighbours.setdefault(chunk, []).append(neighbour)
    found = database.read(
        "SELECT content_hash, fingerprint, namespace, text, c.token_ids, anchor, a.token_ids, a.separator_ids, "
        "coalesce(f.num_tokens, 0) FROM chunks c LEFT JOIN forwards f ON f.chunk = content_hash "
        f"JOIN anchors a ON a.hash = anchor WHERE content_hash IN ({marks}) AND NOT removed",
        chunks,
    )
    for chunk, fingerprint, namespace, text, token_blob, anchor, anchor_blob, separator_blob, forward in found:
        ids, behind = unpack(token_blob), tuple(neighbours.get(chunk, ()))
        record = ChunkRecord(
            chunk, fingerprint, namespace, text, ids, unpack(anchor_blob), behind, unpack(separator_blob), forward
        )
        if content_hash(fingerprint, namespace, ids) == chunk and _anchor_hash(record) == anchor:
            yield record
        else:
            logger.error("the catalog's row of chunk %s is damaged; it counts as unknown", chunk[:16])


def tokens(database: Database, chunks: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Token ids of known and of removed chunks."""
    marks = ",".join("?" * len(chunks))
    found = database.read(f"SELECT content_hash, token_ids FROM chunks WHERE content_hash IN ({marks})", chunks)
    return {chunk: unpack(blob) for chunk, blob in found}


def pack(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian int32, half of what a key's int64 takes."""
    ids = array("i", token_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def unpack(blob: bytes) -> tuple[int, ...]:
    """The inverse of `pack`; a blob of a damaged length loses its last bytes and then fails its hash."""
    ids = array("i")
    ids.frombytes(blob[: len(blob) // 4 * 4])
    if sys.byteorder == "big":
        ids.byteswap()
    return tuple(ids)


def _check_hash(record: ChunkRecord) -> None:
    if content_hash(record.fingerprint, record.namespace, record.token_ids) != record.content_hash:
        raise ValueError(
            f"content_hash {record.content_hash[:16]} is not that of the record's model, namespace and token ids; "
            "use kv.keys.content_hash"
        )
