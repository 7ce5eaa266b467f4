"""The catalog's tables."""

from __future__ import annotations

SCHEMA_VERSION = 5

# `removed` = 1: only token ids are known, from the file of a chunk that was encoded after it (`Catalog.restore`); the
# row goes when nothing names it any more; 2: the same of a chunk that another machine knows (`Catalog.replace`).
# `seq` grows with every added chunk, so that readers can ask for what is new.
# `digest` covers the row with its anchor and context (`rows.digest_of`). `erasures`, `tombstones`: see `Erasures`.
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
    digest BLOB NOT NULL DEFAULT x'',
    removed INTEGER NOT NULL DEFAULT 0);

CREATE INDEX IF NOT EXISTS chunks_by_namespace ON chunks (namespace, fingerprint, seq);

CREATE INDEX IF NOT EXISTS live_chunks ON chunks (namespace, seq, content_hash, created) WHERE NOT removed;

CREATE INDEX IF NOT EXISTS chunks_by_anchor ON chunks (anchor);

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

CREATE TABLE IF NOT EXISTS mixtures (
    chunk TEXT PRIMARY KEY,
    splits BLOB NOT NULL,
    weights TEXT NOT NULL) WITHOUT ROWID;

CREATE TABLE IF NOT EXISTS places (
    chunk TEXT PRIMARY KEY,
    head TEXT NOT NULL,
    before TEXT NOT NULL) WITHOUT ROWID;

CREATE INDEX IF NOT EXISTS places_by_head ON places (head);

CREATE INDEX IF NOT EXISTS places_by_before ON places (before);

CREATE TABLE IF NOT EXISTS sources (
    namespace TEXT NOT NULL,
    source_id TEXT NOT NULL,
    fingerprint TEXT NOT NULL,
    place INTEGER NOT NULL,
    chunk TEXT NOT NULL,
    PRIMARY KEY (namespace, source_id, fingerprint, place)) WITHOUT ROWID;

CREATE INDEX IF NOT EXISTS sources_by_chunk ON sources (chunk);

CREATE TABLE IF NOT EXISTS arrays (
    kind TEXT NOT NULL,
    fingerprint TEXT NOT NULL,
    namespace TEXT NOT NULL,
    key TEXT NOT NULL,
    bytes BLOB NOT NULL,
    PRIMARY KEY (kind, fingerprint, namespace, key)) WITHOUT ROWID;

CREATE INDEX IF NOT EXISTS arrays_by_key ON arrays (key);

CREATE TABLE IF NOT EXISTS erasures (key TEXT PRIMARY KEY) WITHOUT ROWID;

CREATE TABLE IF NOT EXISTS tombstones (digest TEXT PRIMARY KEY, erased REAL NOT NULL) WITHOUT ROWID;

CREATE TABLE IF NOT EXISTS deletions_seen (name TEXT PRIMARY KEY) WITHOUT ROWID;

CREATE TABLE IF NOT EXISTS catalog_state (id INTEGER PRIMARY KEY CHECK (id = 1), removals INTEGER NOT NULL);

INSERT OR IGNORE INTO catalog_state VALUES (1, 0);

CREATE TABLE IF NOT EXISTS source_changes (id INTEGER PRIMARY KEY CHECK (id = 1), num_changes INTEGER NOT NULL);

INSERT OR IGNORE INTO source_changes VALUES (1, 0)
"""
