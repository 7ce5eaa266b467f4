"""Tiers by a text, a value and the environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvboost_rag.stores import DiskStore, MemoryStore, SharedStore, TieredStore, Tiers, open_store


@pytest.mark.parametrize(
    ("text", "tiers"),
    [
        ("tiers: memory", Tiers()),
        ("tiers: memory 4GB", Tiers(memory_bytes=4 * 10**9)),
        ("tiers: memory 1.5 GiB, disk /var/kv 100GB", Tiers(Path("/var/kv"), 3 << 29, 10**11)),
        ("tiers:disk /var/my kv", Tiers(Path("/var/my kv"))),
        ("tiers: disk /kv, rediss+cluster://u:p@h:1", Tiers(Path("/kv"), shared="rediss+cluster://u:p@h:1")),
        ("tiers: s3://bucket/path, disk /kv 5MB", Tiers(Path("/kv"), None, 5_000_000, "s3://bucket/path")),
    ],
)
def test_tiers_of_a_text(text: str, tiers: Tiers) -> None:
    assert Tiers.parse(text) == tiers


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tiers:", "'' is no tier"),
        ("tiers: memory, tape /dev/st0", "'tape /dev/st0' is no tier"),
        ("tiers: memory 4GB, memory 5GB", "memory twice"),
        ("tiers: memory four", "is no tier"),
        ("tiers: redis://host", "needs a disk tier"),
        ("tiers: disk /kv, ftp://host", "expected a URL, redis://"),
    ],
)
def test_what_is_no_list_of_tiers_says_so(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_store(text)


def test_a_store_over_a_shared_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore")
    store = open_store(f"tiers: memory 1MB, disk {tmp_path}/kv 2MB, file://{tmp_path}/objects", disk_bytes=5)
    assert isinstance(store, TieredStore)
    memory, shared = store.tiers
    assert isinstance(memory, MemoryStore)
    assert isinstance(shared, SharedStore)
    assert (memory.budget_bytes, shared.tiers[0].budget_bytes) == (10**6, 2 * 10**6)
    assert list(store.bytes_held) == ["memory", "disk", "remote"]
    store.close()
    monkeypatch.setenv("KVBOOST_SHARED_STORE", f"file://{tmp_path}/objects")
    store = open_store(tmp_path / "kv", disk_bytes=10**6)
    assert isinstance(store.tiers[1], SharedStore)
    store.close()
    assert isinstance(open_store("memory"), MemoryStore)
    monkeypatch.delenv("KVBOOST_SHARED_STORE")
    assert isinstance(open_store(tmp_path / "kv", disk_bytes=10**6).tiers[1], DiskStore)


def test_a_cluster_that_cannot_be_reached_is_no_error(tmp_path: Path) -> None:
    pytest.importorskip("redis")
    store = open_store(Tiers(tmp_path / "kv", shared="redis+cluster://127.0.0.1:1"))
    assert "ab" * 32 not in store
    store.close()
