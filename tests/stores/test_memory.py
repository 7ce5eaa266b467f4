"""The byte budget of memory, exact at every moment, pins, and where entries go."""

from __future__ import annotations

import gc
import threading
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from kvboost_rag.datamodels import StoreEntry
from kvboost_rag.stores import DeviceStore, DiskStore, MemoryStore, TieredStore
from kvboost_rag.stores.budget import host_memory_bytes, resolve_budget
from kvboost_rag.stores.eviction import POLICIES
from tests.pretend_cuda import pretend_cuda
from tests.stores.conftest import NUM_BYTES, build_entry, check_of, same

POLICY_NAMES = [name if name != "ttl" else "ttl:3600" for name in POLICIES]


class MemoryMachine(RuleBasedStateMachine):
    """Random operations on a memory store beside a dictionary of what may be in it."""

    @staticmethod
    def make(budget_bytes: int, policy: str) -> MemoryStore:
        return MemoryStore(budget_bytes, policy=policy)

    @initialize(policy=st.sampled_from(POLICY_NAMES), room=st.integers(0, 5))
    def open(self, policy: str, room: int) -> None:
        self.store = self.make(room * NUM_BYTES + 3, policy)
        self.room = room
        self.latest: dict[int, int] = {}
        self.pinned: dict[int, int] = {}

    @rule(number=st.integers(0, 9), version=st.integers(0, 3))
    def put(self, number: int, version: int) -> None:
        entry = build_entry(number, version=version)
        was_there = entry.key in self.store
        pinned_elsewhere = sum(build_entry(n).key in self.store for n in self.pinned if n != number)
        fits = self.room >= 1 and pinned_elsewhere < self.room
        assert self.store.put(entry) is fits
        if fits:
            self.latest[number] = version
        assert (entry.key in self.store) is (fits or was_there)

    @rule(number=st.integers(0, 9))
    def get(self, number: int) -> None:
        entry = build_entry(number, version=self.latest.get(number, 0))
        found = self.store.get(entry.key, check_of(entry))
        assert found is None or same(found, entry)

    @rule(number=st.integers(0, 9))
    def delete(self, number: int) -> None:
        key = build_entry(number).key
        was_there = key in self.store
        assert self.store.delete(key) is was_there
        assert key not in self.store

    @rule(number=st.integers(0, 9))
    def pin(self, number: int) -> None:
        self.store.pin(build_entry(number).key)
        self.pinned[number] = self.pinned.get(number, 0) + 1

    @rule(number=st.integers(0, 9))
    def unpin(self, number: int) -> None:
        if self.pinned.get(number):
            self.store.unpin(build_entry(number).key)
            self.pinned[number] -= 1
            if not self.pinned[number]:
                del self.pinned[number]

    @rule(number=st.integers(0, 9), deviation=st.floats(0, 2))
    def note_deviation(self, number: int, deviation: float) -> None:
        self.store.note_deviation(build_entry(number).key, deviation)

    @invariant()
    def bytes_are_exact_and_within_the_budget(self) -> None:
        if hasattr(self, "store"):
            held = self.store.bytes_held[self.store.tier]
            assert held == sum(info.num_bytes for info in self.store.entries()) == NUM_BYTES * len(self.store)
            assert held <= self.store.budget_bytes

    @invariant()
    def counters_add_up(self) -> None:
        if hasattr(self, "store"):
            stats = self.store.stats
            assert stats.lookups == stats.hits + stats.misses


MemoryMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestMemoryMachine = MemoryMachine.TestCase


class DeviceMachine(MemoryMachine):
    """The same on a pretended GPU."""

    @staticmethod
    def make(budget_bytes: int, policy: str) -> DeviceStore:
        return DeviceStore("cuda:0", budget_bytes, policy=policy)


def test_a_device_tier_keeps_the_same_promises() -> None:
    with pretend_cuda():
        run_state_machine_as_test(
            DeviceMachine, settings=settings(max_examples=25, stateful_step_count=25, deadline=None)
        )


def test_what_waits_for_the_disk_keeps_nothing_on_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pretend_cuda():
        home, may_write, written = DiskStore(tmp_path / "kv", 100 * NUM_BYTES), threading.Event(), []
        put = home.put

        def put_later(entry: StoreEntry) -> bool:
            may_write.wait()
            written.extend(entry.tensors.values())
            return put(entry)

        monkeypatch.setattr(home, "put", put_later)
        store = TieredStore(MemoryStore(100 * NUM_BYTES), home)
        entry = build_entry(1)
        on_device = {name: tensor.to("cuda:0") for name, tensor in entry.tensors.items()}
        assert store.put(replace(entry, tensors=on_device))
        references = [weakref.ref(tensor) for tensor in on_device.values()]
        del on_device
        gc.collect()
        held = [reference for reference in references if reference() is not None]
        may_write.set()
        store.flush()
        assert not held
        assert same(home.get(entry.key, check_of(entry)), entry)
        assert {str(tensor.device) for tensor in written} == {"cpu"}
        store.close()


def test_a_device_tier_holds_no_more_than_an_entry_s_own_bytes() -> None:
    """Of what lies on the device already too."""
    with pretend_cuda():
        store, entry = DeviceStore("cuda:0", 10 * NUM_BYTES), build_entry(1)
        whole = {name: torch.stack([tensor, tensor]).to("cuda:0") for name, tensor in entry.tensors.items()}
        assert store.put(replace(entry, tensors={name: tensor[1] for name, tensor in whole.items()}))
        found = store.get(entry.key, check_of(entry))
        assert same(found, entry)
        assert sum(tensor.untyped_storage().nbytes() for tensor in found.tensors.values()) == NUM_BYTES


def test_pinned_entries_stay_and_put_refuses_when_only_they_are_left() -> None:
    store = MemoryStore(2 * NUM_BYTES)
    a, b, c = (build_entry(n) for n in range(3))
    for entry in (a, b):
        assert store.put(entry)
        store.pin(entry.key)
    store.pin(a.key)
    store.unpin(a.key)
    assert not store.put(c)
    assert store.stats.put_failures == {"pinned": 1}
    assert a.key in store
    store.unpin(a.key)
    assert store.put(c)
    assert a.key not in store
    assert b.key in store


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory")])
def test_an_entry_for_which_there_is_no_memory_is_not_kept(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    store = MemoryStore(2 * NUM_BYTES)
    a, b = build_entry(1), build_entry(2)
    assert store.put(a)

    def take(entry: StoreEntry) -> StoreEntry:
        raise error

    monkeypatch.setattr(store, "_take", take)
    assert not store.put(b)
    assert store.stats.put_failures == {"no_memory": 1}
    assert list(store.keys()) == [a.key]


def test_an_entry_larger_than_the_budget_is_not_kept_and_evicts_nothing() -> None:
    store = MemoryStore(NUM_BYTES - 1)
    assert not store.put(build_entry(1))
    assert store.stats.put_failures == {"too_large": 1}
    assert store.bytes_held == {"memory": 0}


def test_the_budget_holds_while_threads_put() -> None:
    store = MemoryStore(3 * NUM_BYTES)
    too_much: list[int] = []
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            held = store.bytes_held["memory"]
            if held > store.budget_bytes:
                too_much.append(held)

    watcher = threading.Thread(target=watch)
    watcher.start()
    threads = [
        threading.Thread(target=lambda s=s: [store.put(build_entry(s * 100 + i)) for i in range(100)]) for s in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    watcher.join()
    assert not too_much
    assert len(store) == 3


def test_budgets() -> None:
    assert resolve_budget(7, 0.5, 1000) == 7
    assert resolve_budget(None, 0.35, 1000) == 350
    assert 0 < MemoryStore().budget_bytes == int(0.35 * host_memory_bytes())
    for budget, ratio in ((-1, 0.5), (True, 0.5), (1.5, 0.5), (None, 1.5), (None, -0.1), (None, float("nan"))):
        with pytest.raises(ValueError, match=r"budget_bytes|kv_cache_size_ratio"):
            resolve_budget(budget, ratio, 1000)  # type: ignore[arg-type]


def test_a_hit_on_disk_is_copied_up_and_found_there_next_time(tmp_path: Path) -> None:
    disk = DiskStore(tmp_path, 1_000_000)
    entry = build_entry(1)
    disk.put(entry)
    store = TieredStore(MemoryStore(10_000), disk)
    assert store.tier_of(entry.key) == "disk"
    assert store.get(entry.key, check_of(entry)) is not None
    assert store.tier_of(entry.key) == "memory"
    disk.folder.path(entry.key).unlink()
    assert same(store.get(entry.key, check_of(entry)), entry)
    assert (store.stats.lookups, store.stats.hits) == (2, 2)


def test_an_entry_evicted_from_memory_is_still_found_below(tmp_path: Path) -> None:
    store = TieredStore(MemoryStore(NUM_BYTES), DiskStore(tmp_path, 1_000_000))
    entries = [build_entry(n) for n in range(5)]
    for entry in entries:
        store.put(entry)
    for entry in entries:
        assert same(store.get(entry.key, check_of(entry)), entry)


def test_eviction_from_a_tier_demotes_into_the_next() -> None:
    fast, slow = MemoryStore(NUM_BYTES), MemoryStore(10 * NUM_BYTES)
    store = TieredStore(fast, slow)
    a, b = build_entry(1), build_entry(2)
    fast.put(a)
    fast.put(b)
    assert a.key not in fast
    assert same(slow.get(a.key, check_of(a)), a)
    assert b.key not in slow
    store.close()


def test_writing_happens_off_the_callers_path_and_within_memorys_budget(tmp_path: Path) -> None:
    memory, disk = MemoryStore(2 * NUM_BYTES), DiskStore(tmp_path, 1_000_000)
    store = TieredStore(memory, disk)
    gate = threading.Event()
    write = disk._write

    def slowly(*args) -> None:
        gate.wait()
        write(*args)

    disk._write = slowly
    entries = [build_entry(n) for n in range(2)]
    for entry in entries:
        assert store.put(entry)
    assert len(disk) == 0
    threading.Timer(0.2, gate.set).start()
    third = build_entry(3)  # both others wait to be written, so there is no room in memory: straight to disk
    assert store.put(third)
    assert all(entry.key in memory for entry in entries)
    assert memory.bytes_held["memory"] <= 2 * NUM_BYTES
    store.flush()
    assert sorted(disk.keys()) == sorted(e.key for e in [*entries, third])


def test_what_is_deleted_while_it_waits_to_be_written_is_not_written(tmp_path: Path) -> None:
    memory, disk = MemoryStore(100_000), DiskStore(tmp_path, 1_000_000)
    store = TieredStore(memory, disk)
    gate, started = threading.Event(), threading.Event()
    write = disk._write

    def slowly(*args) -> None:
        started.set()
        gate.wait()
        write(*args)

    disk._write = slowly
    first, second = build_entry(1), build_entry(2)
    store.put(first)
    store.put(second)
    started.wait()
    assert store.delete(second.key)
    threading.Timer(0.1, gate.set).start()
    assert store.delete(first.key)
    store.flush()
    assert len(store) == 0
    assert not list(disk.folder.list_keys())


def test_prefetch_brings_entries_into_memory(tmp_path: Path) -> None:
    disk = DiskStore(tmp_path, 1_000_000)
    entries = [build_entry(n) for n in range(4)]
    for entry in entries:
        disk.put(entry)
    store = TieredStore(MemoryStore(100_000), disk)
    store.prefetch(e.key for e in entries)
    for entry in entries:
        assert same(store.get(entry.key, check_of(entry)), entry)
    assert store.tiers[0].stats.hits == 4
    assert disk.stats.lookups == 0


@pytest.mark.parametrize("where", ["disk", "memory"])
def test_prefetch_brings_entries_to_the_device_out_of_page_locked_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    with pretend_cuda():
        device, memory, disk = DeviceStore("cuda:0", 100_000), MemoryStore(100_000), DiskStore(tmp_path, 1_000_000)
        entry, sources = build_entry(1), []
        (disk if where == "disk" else memory).put(entry)
        take = device._take

        def note(given: StoreEntry) -> StoreEntry:
            sources.extend(given.tensors.values())
            return take(given)

        monkeypatch.setattr(device, "_take", note)
        store = TieredStore(device, memory, disk)
        store.prefetch([entry.key])
        assert same(store.get(entry.key, check_of(entry)), entry)
        assert (device.stats.hits, memory.stats.lookups, disk.stats.lookups) == (1, 0, 0)
        assert sources
        assert all(tensor.is_pinned() for tensor in sources)
        store.close()


def test_what_is_hot_in_memory_does_not_look_cold_on_disk(tmp_path: Path) -> None:
    disk = DiskStore(tmp_path, 1_000_000, policy="lru")
    store = TieredStore(MemoryStore(100_000), disk)
    hot, cold = build_entry(1), build_entry(2)
    for entry in (hot, cold):
        store.put(entry)
    store.flush()
    for _ in range(3):
        store.get(hot.key, check_of(hot))
    assert store.tiers[0].stats.hits == 3
    store.close()
    again = DiskStore(tmp_path, disk.folder.size(hot.key) + 100, policy="lru")
    assert list(again.keys()) == [hot.key]


def test_damage_found_while_reading_ahead_is_counted(tmp_path: Path) -> None:
    disk = DiskStore(tmp_path, 1_000_000)
    entry = build_entry(1)
    disk.put(entry)
    disk.folder.path(entry.key).write_bytes(b"")
    store = TieredStore(MemoryStore(100_000), disk)
    store.prefetch([entry.key])
    assert store.get(entry.key, check_of(entry)) is None
    assert store.stats.rejected == disk.stats.rejected == {"truncated": 1}
    assert (store.stats.misses, disk.stats.misses) == (1, 1)
    assert disk.stats.evictions == {"corrupt": 1}
    assert store.get(entry.key, check_of(entry)) is None
    assert store.stats.rejected == {"truncated": 1}
