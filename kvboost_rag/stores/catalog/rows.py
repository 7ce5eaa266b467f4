"""What is done to the rows of chunks inside a transaction."""

from __future__ import annotations

import hmac
import sqlite3
import sys
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from kvboost_rag.datamodels import ChunkRecord
from kvboost_rag.kv.keys import content_hash, hash_fields, token_bytes
from kvboost_rag.stores.catalog.database import Database
from kvboost_rag.stores.catalog.sources import note_change


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


def insert_removed(
    db: sqlite3.Connection, dependent: ChunkRecord, chunk: str, token_ids: tuple[int, ...], elsewhere: bool = False
) -> None:
    """Keep only the token ids of a chunk that `dependent` was encoded after, unless the chunk is known.

    Args:
        elsewhere: the chunk is known on another machine.
    """
    if content_hash(dependent.fingerprint, dependent.namespace, token_ids) != chunk:
        raise ValueError(f"token ids of neighbour {chunk[:16]} do not have its hash")
    db.execute(
        "INSERT OR IGNORE INTO chunks "
        "(content_hash, fingerprint, namespace, text, token_ids, anchor, created, removed) "
        "VALUES (?, ?, ?, '', ?, '', ?, ?)",
        (chunk, dependent.fingerprint, dependent.namespace, pack(token_ids), time.time(), 2 if elsewhere else 1),
    )


def set_context(
    db: sqlite3.Connection, record: ChunkRecord, secret: bytes | None, removed_allowed: bool = False
) -> None:
    """Store the record's anchor, its contexts and the length of its forward, and the digest over all of it.

    Raises:
        ValueError: a neighbour is not a known chunk of the same model and namespace, or is the chunk itself.
    """
    chunk, anchor = record.content_hash, _anchor_hash(record)
    drop_context(db, chunk)
    db.execute(
        "INSERT OR IGNORE INTO anchors VALUES (?, ?, ?)", (anchor, pack(record.anchor_ids), pack(record.separator_ids))
    )
    for place, neighbour in enumerate(record.neighbours):
        row = db.execute(
            "SELECT fingerprint, namespace, removed FROM chunks WHERE content_hash = ?", (neighbour,)
        ).fetchone()
        if neighbour == chunk or row is None or (row[2] and not removed_allowed):
            raise ValueError(f"neighbour {neighbour[:16]} of {chunk[:16]} is not another known chunk")
        if row[:2] != (record.fingerprint, record.namespace):
            raise ValueError(f"neighbour {neighbour[:16]} of {chunk[:16]} has another model or namespace")
        db.execute("INSERT INTO contexts VALUES (?, ?, ?)", (chunk, place, neighbour))
    if record.splits:
        db.execute("INSERT INTO mixtures VALUES (?, ?, ?)", (chunk, pack(record.splits), record.mixture))
    if record.forward_tokens:
        db.execute("INSERT INTO forwards VALUES (?, ?)", (chunk, record.forward_tokens))
    digest = digest_of(record, secret)
    db.execute("UPDATE chunks SET anchor = ?, digest = ? WHERE content_hash = ?", (anchor, digest, chunk))


def drop_context(db: sqlite3.Connection, chunk: str) -> None:
    """Forget which chunks `chunk` was encoded after."""
    db.execute("DELETE FROM contexts WHERE chunk = ?", (chunk,))
    db.execute("DELETE FROM forwards WHERE chunk = ?", (chunk,))
    db.execute("DELETE FROM mixtures WHERE chunk = ?", (chunk,))


def remove(db: sqlite3.Connection, chunks: Iterable[str]) -> None:
    """Take chunks out with their links and arrays. Those that name them as neighbours must be dealt with first."""
    for chunk in chunks:
        if is_live(db, chunk):
            db.execute("UPDATE catalog_state SET removals = removals + 1")
        drop_context(db, chunk)
        db.execute("DELETE FROM sources WHERE chunk = ?", (chunk,))
        db.execute("DELETE FROM places WHERE chunk = ?1 OR head = ?1 OR before = ?1", (chunk,))
        db.execute("DELETE FROM arrays WHERE key = ?", (chunk,))
        db.execute("DELETE FROM chunks WHERE content_hash = ?", (chunk,))


def remove_namespace(db: sqlite3.Connection, namespace: str) -> list[str]:
    """Take all of a namespace out; returns its chunks. No other namespace's chunk can name them."""
    chunks = [r[0] for r in db.execute("SELECT content_hash FROM chunks WHERE namespace = ?", (namespace,))]
    note_change(db)
    db.execute("DELETE FROM sources WHERE namespace = ?", (namespace,))
    remove(db, chunks)
    db.execute("DELETE FROM arrays WHERE namespace = ?", (namespace,))
    return chunks


def purge(db: sqlite3.Connection) -> None:
    """Drop token ids of removed chunks that nothing names any more, and anchors that no chunk uses."""
    db.execute(
        "DELETE FROM chunks WHERE removed AND NOT EXISTS (SELECT 1 FROM contexts WHERE neighbour = content_hash)"
    )
    db.execute("DELETE FROM anchors WHERE NOT EXISTS (SELECT 1 FROM chunks WHERE anchor = hash)")


def select(
    database: Database, chunks: Sequence[str], secret: bytes | None = None
) -> Iterator[tuple[str, ChunkRecord | None]]:
    """Records of known chunks; None for a row that is damaged, or not signed where there is a secret."""
    marks = ",".join("?" * len(chunks))
    neighbours: dict[str, list[str]] = {}
    for chunk, neighbour in database.read(
        f"SELECT chunk, neighbour FROM contexts WHERE chunk IN ({marks}) ORDER BY chunk, place", chunks
    ):
        neighbours.setdefault(chunk, []).append(neighbour)
    found = database.read(
        "SELECT content_hash, digest, fingerprint, namespace, text, c.token_ids, a.token_ids, a.separator_ids, "
        "coalesce(f.num_tokens, 0), coalesce(m.splits, x''), coalesce(m.weights, '') FROM chunks c "
        "LEFT JOIN forwards f ON f.chunk = content_hash LEFT JOIN mixtures m ON m.chunk = content_hash "
        f"LEFT JOIN anchors a ON a.hash = anchor WHERE content_hash IN ({marks}) AND NOT removed",
        chunks,
    )
    for row in found:
        yield row[0], _record(row, tuple(neighbours.get(row[0], ())), secret)


def _record(row: Sequence[Any], neighbours: tuple[str, ...], secret: bytes | None) -> ChunkRecord | None:
    """SQLite's columns may hold anything; the digest says whether they are what was written."""
    chunk, digest, fingerprint, namespace, text, ids, anchor, separator, *how = row
    try:
        frame = unpack(anchor), neighbours, unpack(separator)
        forward, splits, mixture = how[0], unpack(how[1]), how[2]
        record = ChunkRecord(chunk, fingerprint, namespace, text, unpack(ids), *frame, forward, splits, mixture)
        _check_hash(record)
        return record if is_digest(digest, record, secret) else None
    except (TypeError, ValueError, AttributeError, OverflowError):
        return None


def digest_of(record: ChunkRecord, secret: bytes | None) -> bytes:
    """SHA-256 over all of a record (32 bytes), followed by its HMAC where there is a secret."""
    digest = bytes.fromhex(
        hash_fields(
            "catalog row",
            record.content_hash.encode(),
            record.fingerprint.encode(),
            record.namespace.encode(),
            record.text.encode(),
            *(token_bytes(ids) for ids in (record.token_ids, record.anchor_ids, record.separator_ids)),
            token_bytes((record.forward_tokens,)),
            token_bytes(record.splits),
            record.mixture.encode(),
            *(neighbour.encode() for neighbour in record.neighbours),
        )
    )
    return digest if secret is None else digest + hmac.digest(secret, digest, "sha256")


def is_digest(found: object, record: ChunkRecord, secret: bytes | None) -> bool:
    """Whether `found` is the record's digest, signed if there is a secret."""
    wanted = digest_of(record, secret)
    return isinstance(found, bytes) and hmac.compare_digest(found if secret else found[: len(wanted)], wanted)


def tokens(database: Database, chunks: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Token ids of known and of removed chunks."""
    marks = ",".join("?" * len(chunks))
    found = database.read(f"SELECT content_hash, token_ids FROM chunks WHERE content_hash IN ({marks})", chunks)
    return {chunk: unpack(blob) for chunk, blob in found if isinstance(blob, bytes)}


def pack(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian int32, half of what a key's int64 takes."""
    ids = array("i", token_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def unpack(blob: object) -> tuple[int, ...]:
    """The inverse of `pack`; a blob of a damaged length loses its last bytes and then fails its hash.

    Raises:
        TypeError: a damaged row holds something else there.
    """
    if not isinstance(blob, bytes):
        raise TypeError(f"token ids are {type(blob).__name__}")
    ids = array("i")
    ids.frombytes(blob[: len(blob) // 4 * 4])
    if sys.byteorder == "big":
        ids.byteswap()
    return tuple(ids)


def _anchor_hash(record: ChunkRecord) -> str:
    return hash_fields("anchor", token_bytes(record.anchor_ids), token_bytes(record.separator_ids))


def _check_hash(record: ChunkRecord) -> None:
    if content_hash(record.fingerprint, record.namespace, record.token_ids) != record.content_hash:
        raise ValueError(
            f"content_hash {record.content_hash[:16]} is not that of the record's model, namespace and token ids; "
            "use kv.keys.content_hash"
        )
