"""Deleting by chunk, source, namespace and age; verify and gc; namespaces apart in every tier."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from kvboost_rag.datamodels import StoreEntry
from kvboost_rag.kv.keys import prefix_hash
from kvboost_rag.stores import DiskStore, MemoryStore, Store, TieredStore, open_store
from kvboost_rag.stores.maintenance import delete_namespace, delete_source, evict_all, evict_unused, forget
from kvboost_rag.stores.verify import disk_of, gc, verify
from tests.stores.conftest import FINGERPRINT, build_entry, build_record, check_of, same


def exact_block(token_ids: tuple[int, ...], namespace: str = "") -> StoreEntry:
    preceding = "0" * 64
    key = prefix_hash(FINGERPRINT, namespace, preceding, token_ids)
    return dataclasses.replace(build_entry(1, namespace), key=key, token_ids=token_ids, context_hash=preceding)


def all_bytes(folder: Path) -> bytes:
    return b"".join(p.read_bytes() for p in folder.rglob("*") if p.is_file())


def fill(store: Store) -> tuple[StoreEntry, StoreEntry, StoreEntry]:
    """A neighbour, a chunk encoded after it, an unrelated chunk; in three sources."""
    neighbour = store.catalog.add(build_record(90100))
    record = store.catalog.add(build_record(1, (neighbour.content_hash,)))
    other = store.catalog.add(build_record(50))
    entries = build_entry(90100), build_entry(1, context=neighbour.token_ids), build_entry(50)
    for name, entry in zip(("n.md", "r.md", "o.md"), entries, strict=True):
        store.put(entry)
        store.catalog.sources.link(FINGERPRINT, "", name, [entry.key])
    store.catalog.sources.link(FINGERPRINT, "", "both.md", [record.content_hash, other.content_hash])
    store.flush()
    return entries


def test_forgetting_a_chunk_removes_all_that_was_computed_from_it(store: Store) -> None:
    neighbour, dependent, other = fill(store)
    block = exact_block((*neighbour.token_ids, 5))
    store.put(block)
    removed = forget(store, [neighbour.key])
    assert (removed.num_chunks, removed.num_reset, removed.num_entries) == (1, 1, 3)
    for entry in (neighbour, dependent, block):
        assert entry.key not in store
        assert store.get(entry.key, check_of(entry)) is None
    assert store.catalog.get(neighbour.key) is None
    assert store.catalog.contexts(store.catalog.get(dependent.key))[0] == ()
    assert same(store.get(other.key, check_of(other)), other)
    assert forget(store, [neighbour.key, "ab" * 32]).num_chunks == 0


def test_a_deleted_source_leaves_nothing_in_the_folder(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    fill(store)
    assert b"text 90100" in all_bytes(tmp_path)
    assert b"90101,90102" in all_bytes(tmp_path).replace(b" ", b"")
    assert delete_source(store, "", "n.md").num_chunks == 1
    data = all_bytes(tmp_path)
    for trace in (b"text 90100", b"n.md", b"90101,90102", (90101).to_bytes(4, "little")):
        assert trace not in data
    assert b"text 50" in data


def test_a_chunk_that_another_source_has_stays(store: Store) -> None:
    _, dependent, other = fill(store)
    assert delete_source(store, "", "o.md").num_chunks == 0
    assert same(store.get(other.key, check_of(other)), other)
    assert delete_source(store, "", "both.md").num_chunks == 1
    assert other.key not in store
    assert dependent.key in store
    with pytest.raises(KeyError):
        delete_source(store, "", "both.md")


def test_a_deleted_namespace_leaves_nothing_in_the_folder(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    fill(store)
    record = store.catalog.add(build_record(77, namespace="namespace-7"))
    store.put(build_entry(77, namespace="namespace-7"))
    store.put(exact_block((1, 2), namespace="namespace-7"))
    store.catalog.sources.link(FINGERPRINT, "namespace-7", "seven.md", [record.content_hash])
    store.flush()
    assert b"namespace-7" in all_bytes(tmp_path)
    removed = delete_namespace(store, "namespace-7")
    assert (removed.num_chunks, removed.num_entries) == (1, 2)
    assert b"namespace-7" not in all_bytes(tmp_path)
    assert len(store) == 3


def test_evicting_what_is_unused_keeps_the_catalog(store: Store) -> None:
    neighbour, _, _ = fill(store)
    latest = max(info.last_used for info in store.entries())
    assert evict_unused(store, 60, now=latest).num_entries == 0
    assert evict_unused(store, 60, now=latest + 61).num_entries == 3
    assert len(store) == 0
    assert len(store.catalog) == 3
    assert store.put(neighbour)
    with pytest.raises(ValueError, match="seconds"):
        evict_unused(store, -1)


def test_evicting_all(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    fill(store)
    store.put(build_entry(5, namespace="t"))
    store.flush()
    removed = evict_all(store)
    assert (removed.num_chunks, removed.num_entries) == (3, 4)
    assert not any(store.bytes_held.values())
    assert store.catalog.sources.all() == []
    assert b"text" not in all_bytes(tmp_path / "chunks")


@pytest.mark.parametrize("tier", ["memory", "disk", "after a restart"])
def test_namespaces_never_share_kv(tmp_path: Path, tier: str) -> None:
    """Own namespace hits; the other's misses, also when its entry is put under the first one's key."""
    store: Store = MemoryStore(1_000_000) if tier == "memory" else DiskStore(tmp_path, 1_000_000)
    mine, theirs = build_entry(1, namespace="mine"), build_entry(1, namespace="theirs")
    assert mine.key != theirs.key
    store.put(mine)
    if tier == "after a restart":
        store.close()
        store = TieredStore(MemoryStore(1_000_000), DiskStore(tmp_path, 1_000_000))
    assert same(store.get(mine.key, check_of(mine)), mine)
    assert store.get(theirs.key, check_of(theirs)) is None
    store.put(dataclasses.replace(mine, key=theirs.key))
    assert store.get(theirs.key, check_of(theirs)) is None
    assert store.stats.rejected == {"namespace": 1}


def test_verify_finds_and_gc_mends(tmp_path: Path) -> None:
    store = open_store(tmp_path, disk_bytes=1_000_000)
    disk = disk_of(store)
    entries = [build_entry(n) for n in range(10)]
    for n, entry in enumerate(entries):
        store.catalog.add(build_record(n))
        store.put(entry)
    store.flush()
    assert verify(store).problems == []
    assert verify(store).num_files == 10
    bent, gone, unaccounted, unknown, damaged = entries[:5]
    path = disk.folder.path(bent.key)
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    disk.folder.remove(gone.key)
    disk.account.table.remove(unaccounted.key)
    with store.catalog.database.transaction() as db:
        db.execute("DELETE FROM chunks WHERE content_hash = ?", (unknown.key,))
    with store.catalog.database.transaction() as db:
        db.execute("UPDATE chunks SET token_ids = zeroblob(20) WHERE content_hash = ?", (damaged.key,))
        db.execute("UPDATE disk_state SET num_bytes = num_bytes + 1")
    found = {(p.key, p.what) for p in verify(store).problems}
    assert found == {
        (bent.key, "corrupt"),
        (gone.key, "vanished"),
        (unaccounted.key, "not accounted for"),
        (unknown.key, "unknown chunk"),
        (damaged.key, "damaged row"),
        (damaged.key, "unknown chunk"),
        ("", "account"),
    }
    gc(store)
    assert verify(store).problems == []
    left = [unaccounted, *entries[5:]]
    assert sorted(disk.keys()) == sorted(e.key for e in left)
    assert all(same(disk.get(e.key, check_of(e)), e) for e in left)


def test_verify_needs_a_disk() -> None:
    with pytest.raises(ValueError, match="nothing on disk"):
        verify(MemoryStore(1000))


def test_open_store(tmp_path: Path) -> None:
    memory = open_store("memory", memory_bytes=10)
    assert isinstance(memory, MemoryStore)
    assert memory.budget_bytes == 10
    assert isinstance(open_store(None), MemoryStore)
    assert open_store(memory) is memory
    store = open_store(tmp_path / "new" / "kv", memory_bytes=10, disk_bytes=20, policy="lru", device="cpu")
    assert list(store.bytes_held) == ["memory", "disk"]
    for bad in ("", 5, ["x"]):
        with pytest.raises(TypeError, match="expected a Store, a folder"):
            open_store(bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="importance, lru, fifo, ttl:SECONDS"):
        open_store("memory", policy="mru")
