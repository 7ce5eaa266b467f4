"""After each way of deleting, whole or killed at any statement, nothing of what was deleted is in any file."""

from __future__ import annotations

import array
import dataclasses
import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from kvboost_rag.datamodels import ChunkRecord, StoreEntry
from kvboost_rag.kv.keys import content_hash, context_hash, prefix_hash, record_context_hash
from kvboost_rag.stores import DiskStore, Store
from kvboost_rag.stores.maintenance import (
    delete_namespace,
    delete_source,
    evict_all,
    evict_unused,
    forget,
    set_contexts,
)
from kvboost_rag.stores.verify import gc, verify
from tests.stores.conftest import FINGERPRINT

NAMESPACE = "acme"
SECRET_TEXT = "the secret of the Ä pyramid"
SECRET_IDS = tuple(range(1_090_100, 1_090_112))
VECTOR = np.linspace(0.123, 0.987, 24, dtype=np.float32)
SIGNATURE = np.arange(7_000_001, 7_000_033, dtype=np.uint32)

STRIDE = int(os.environ.get("KVBOOST_KILL_STRIDE", "13"))
"""Statements between two kills; 1 takes minutes and leaves none out."""

Way = Callable[[Store], object]


def record_of(text: str, ids: tuple[int, ...], neighbours: tuple[str, ...] = ()) -> ChunkRecord:
    return ChunkRecord(content_hash(FINGERPRINT, NAMESPACE, ids), FINGERPRINT, NAMESPACE, text, ids, (3,), neighbours)


SECRET = record_of(SECRET_TEXT, SECRET_IDS)
OTHER = record_of("an open text", tuple(range(2_000_000, 2_000_009)))
DEPENDENT = record_of("after the others", tuple(range(3_000_000, 3_000_007)), (SECRET.content_hash, OTHER.content_hash))


def entry_of(record: ChunkRecord, context: str) -> StoreEntry:
    tensors = {"keys": torch.full((2, 2, len(record.token_ids), 4), float(len(record.token_ids)))}
    return StoreEntry(
        record.content_hash, NAMESPACE, FINGERPRINT, record.token_ids, context, tensors, {"codec": "none"}
    )


def put(store: Store, record: ChunkRecord) -> None:
    assert store.put(entry_of(record, store.catalog.context_hash(record)))


def fill(folder: Path) -> None:
    """A secret chunk, one encoded after it, an exact block that holds it, vectors, sources, a damaged old catalog."""
    store = DiskStore(folder, 10_000_000)
    store.catalog.add_many([SECRET, OTHER, DEPENDENT])
    for record in (SECRET, OTHER, DEPENDENT):
        put(store, record)
    key = prefix_hash(FINGERPRINT, NAMESPACE, "0" * 64, (*SECRET_IDS, 5))
    block = dataclasses.replace(entry_of(SECRET, "0" * 64), key=key, token_ids=(*SECRET_IDS, 5))
    assert store.put(block)
    store.catalog.sources.link(FINGERPRINT, NAMESPACE, "secret.md", [SECRET.content_hash])
    store.catalog.sources.link(FINGERPRINT, NAMESPACE, "open.md", [OTHER.content_hash, DEPENDENT.content_hash])
    for record in (SECRET, OTHER):
        vector = VECTOR if record is SECRET else VECTOR[::-1].copy()
        store.catalog.arrays("embedding/x", FINGERPRINT, NAMESPACE, np.float32).put({record.content_hash: vector})
        numbers = SIGNATURE if record is SECRET else SIGNATURE + 999
        store.catalog.arrays("minhash/x", FINGERPRINT, NAMESPACE, np.uint32).put({record.content_hash: numbers})
    store.close()
    shutil.copy(folder / "catalog.sqlite", folder / "catalog.damaged-1")


def varints(ids: tuple[int, ...]) -> bytes:
    out = bytearray()
    for i in ids:
        while i >= 128:
            out.append(i & 127 | 128)
            i >>= 7
        out.append(i)
    return bytes(out)


def traces(ids: tuple[int, ...] = SECRET_IDS, text: str = SECRET_TEXT) -> dict[str, bytes]:
    """What tells of the chunk; three ids in a row are enough."""
    part = ids[4:7]
    return {
        "text": text.encode()[4:],
        "text as JSON": text.encode("ascii", "backslashreplace").replace(b"\\xc4", b"\\\\u00c4")[4:],
        "text in UTF-16": text.encode("utf-16-le")[8:],
        "int32": array.array("i", part).tobytes(),
        "int64": array.array("q", part).tobytes(),
        "varint": varints(part),
        "JSON": ",".join(map(str, part)).encode(),
        "vector": VECTOR.tobytes()[8:24],
        "signature": SIGNATURE.tobytes()[8:24],
    }


def left_in(folder: Path, wanted: dict[str, bytes]) -> list[str]:
    files = {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    return [f"{name} in {path}" for path, data in files.items() for name, trace in wanted.items() if trace in data]


def change_context(store: Store) -> None:
    """What rewarming does, and an edit of the neighbour: the dependent is encoded after something else."""
    record = store.catalog.get(DEPENDENT.content_hash)
    if record is not None and SECRET.content_hash in record.neighbours:
        set_contexts(store, [dataclasses.replace(record, neighbours=(OTHER.content_hash,))])
    forget(store, [SECRET.content_hash])


WAYS: dict[str, Way] = {
    "chunk": lambda store: forget(store, [SECRET.content_hash]),
    "source": lambda store: store.catalog.get(SECRET.content_hash) and delete_source(store, NAMESPACE, "secret.md"),
    "namespace": lambda store: delete_namespace(store, NAMESPACE),
    "all": evict_all,
    "other context, then the chunk": change_context,
    "its KV, then the chunk": lambda store: (evict_unused(store, 0), forget(store, [SECRET.content_hash])),
}


def test_the_search_finds_what_is_there(tmp_path: Path) -> None:
    fill(tmp_path)
    found = {hit.split(" in ")[0] for hit in left_in(tmp_path, traces())}
    assert found == {"text", "text as JSON", "int32", "JSON", "vector", "signature"}


@pytest.mark.parametrize("way", WAYS)
def test_what_is_deleted_is_in_no_file_while_the_store_is_open(tmp_path: Path, way: str) -> None:
    fill(tmp_path)
    store = DiskStore(tmp_path, 10_000_000)
    WAYS[way](store)
    assert left_in(tmp_path, traces()) == []
    kept = way not in ("namespace", "all")
    assert (store.catalog.get(OTHER.content_hash) is not None) == kept
    if kept:
        assert store.catalog.get(DEPENDENT.content_hash).neighbours == (OTHER.content_hash,)
        assert left_in(tmp_path, {"other": OTHER.text.encode()})
    assert verify(store).problems == []


def die_at(number: int, work: Callable[[], object]) -> bool:
    """Run `work` in a child that dies before its statement (or file operation) of that number; whether it did."""
    child = os.fork()
    if child == 0:
        count = 0

        def step(*_: object) -> None:
            nonlocal count
            count += 1
            if count == number:
                os._exit(9)

        connect = sqlite3.connect

        def traced(*args: object, **options: object) -> sqlite3.Connection:
            connection = connect(*args, **options)
            connection.set_trace_callback(step)
            return connection

        sqlite3.connect = traced
        for name in ("unlink", "replace", "fsync"):
            real = getattr(os, name)
            setattr(os, name, lambda *args, real=real, **options: (step(), real(*args, **options))[1])
        try:
            work()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("finished_by", ["the same again", "gc"])
def test_a_deletion_killed_at_any_statement_is_finished(tmp_path: Path, way: str, finished_by: str) -> None:
    filled, folder = tmp_path / "filled", tmp_path / "kv"
    fill(filled)

    def work() -> None:
        store = DiskStore(folder, 10_000_000)
        WAYS[way](store)
        store.close()

    number, died = 1, True
    while died:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(filled, folder)
        died = die_at(number, work)
        store = DiskStore(folder, 10_000_000)  # finishes what was begun
        begun = store.catalog.get(SECRET.content_hash) is None
        if finished_by == "gc":
            gc(store)
        if finished_by == "the same again" or not begun:
            WAYS[way](store)
        assert left_in(folder, traces()) == [], number
        assert verify(store).problems == [], number
        store.close()
        number += STRIDE
    assert number > 30


def test_a_writer_that_was_still_encoding_brings_nothing_back(tmp_path: Path) -> None:
    fill(tmp_path)
    here, there = DiskStore(tmp_path, 10_000_000), DiskStore(tmp_path, 10_000_000)
    late = entry_of(DEPENDENT, record_context_hash(DEPENDENT, there.catalog.neighbour_tokens(DEPENDENT)))
    forget(here, [SECRET.content_hash])
    assert not there.put(late)
    assert not there.put(entry_of(SECRET, context_hash((3,))))
    assert there.stats.put_failures == {"context": 2}
    there.catalog.arrays("embedding/x", FINGERPRINT, NAMESPACE, np.float32).put({SECRET.content_hash: VECTOR})
    assert left_in(tmp_path, traces()) == []
    assert not list((tmp_path / "staging").iterdir())
    there.catalog.add(SECRET)
    put(there, SECRET)
    assert left_in(tmp_path, traces())


def test_verify_finds_promises_broken_by_hand_and_gc_mends(tmp_path: Path) -> None:
    fill(tmp_path)
    store = DiskStore(tmp_path, 10_000_000)
    with store.catalog.database.transaction() as db:
        db.execute("DELETE FROM chunks WHERE content_hash = ?", (SECRET.content_hash,))
        store.catalog.erasures.begin(db, ["ab" * 32])
    (tmp_path / "catalog.damaged-7").write_bytes(b"text")
    found = {(p.key[:8], p.what) for p in verify(store).problems}
    secret, dependent = SECRET.content_hash[:8], DEPENDENT.content_hash[:8]
    assert found == {
        (secret, "unknown chunk"),
        (secret, "orphan vector"),
        (dependent, "context lost"),
        (dependent, "other context"),
        ("abababab", "unfinished deletion"),
        ("", "damaged copy"),
    }
    gc(store)
    assert verify(store).problems == []
    assert left_in(tmp_path, {name: trace for name, trace in traces().items() if name in ("vector", "signature")}) == []
