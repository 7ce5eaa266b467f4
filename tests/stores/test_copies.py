"""Reading ahead while the same chunk is deleted or replaced: what was read must not arrive in memory afterwards."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from kvboost_rag.stores import DiskStore, MemoryStore, TieredStore
from tests.stores.conftest import build_entry, check_of, same


class Slow(DiskStore):
    """A disk whose reads, once wanted, end only when they are let."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, 1_000_000)
        self.wanted, self.was_read, self.go_on = threading.Event(), threading.Event(), threading.Event()
        self.during_delete = lambda: None

    def load(self, key: str):
        found = super().load(key)
        if self.wanted.is_set():
            self.was_read.set()
            assert self.go_on.wait(20)
        return found

    def delete(self, key: str, reason: str = "deleted") -> bool:
        self.during_delete()
        return super().delete(key, reason)


@pytest.fixture
def store(tmp_path: Path):
    opened = TieredStore(MemoryStore(1_000_000), Slow(tmp_path))
    opened.put(build_entry(1))
    opened.flush()
    opened.tiers[0].delete(build_entry(1).key)
    yield opened
    opened.close()


def read_ahead(store: TieredStore) -> None:
    disk = store.tiers[-1]
    disk.wanted.set()
    store.prefetch([build_entry(1).key])
    assert disk.was_read.wait(20)
    disk.wanted.clear()


@pytest.mark.parametrize("begins", ["before", "meanwhile"])
def test_what_is_deleted_does_not_come_back_from_a_read(store: TieredStore, begins: str) -> None:
    disk, key = store.tiers[-1], build_entry(1).key
    if begins == "before":
        read_ahead(store)
    else:
        disk.during_delete = lambda: read_ahead(store)
    assert store.delete(key)
    disk.go_on.set()
    assert store.get(key, check_of(build_entry(1))) is None
    assert key not in store


def test_what_is_replaced_does_not_come_back_from_a_read(store: TieredStore) -> None:
    read_ahead(store)
    new = build_entry(1, version=1)
    assert store.put(new)
    store.tiers[-1].go_on.set()
    assert same(store.get(new.key, check_of(new)), new)
    store.flush()
    assert same(store.get(new.key, check_of(new)), new)
