"""Random operations on a tiered store over disk, beside a model of what it must hold."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvboost_rag.stores import DiskStore, MemoryStore, TieredStore
from tests.stores.conftest import NUM_BYTES, build_entry, check_of, same
from tests.stores.test_disk import file_bytes

NUMBERS = st.integers(0, 7)


class TieredMachine(RuleBasedStateMachine):
    """Puts, gets, deletes, damage, restarts. `held` = version last put and not deleted: it may have been evicted."""

    @initialize(disk_room=st.integers(2, 12), memory_room=st.integers(0, 4), write_back=st.booleans())
    def start(self, disk_room: int, memory_room: int, write_back: bool) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.sizes = (memory_room * NUM_BYTES, disk_room * 1300)
        self.write_back = write_back
        self.held: dict[int, int] = {}
        self.open()

    def open(self) -> None:
        memory, disk = self.sizes
        self.disk = DiskStore(self.folder, disk)
        self.store = TieredStore(MemoryStore(memory), self.disk, write_back=self.write_back)

    @rule(number=NUMBERS, version=st.integers(0, 2))
    def put(self, number: int, version: int) -> None:
        if self.store.put(build_entry(number, version=version)):
            self.held[number] = version

    @rule(number=NUMBERS)
    def get(self, number: int) -> None:
        entry = build_entry(number, version=self.held.get(number, 0))
        found = self.store.get(entry.key, check_of(entry))
        if number not in self.held:
            assert found is None
        assert found is None or same(found, entry)

    @rule(number=NUMBERS)
    def delete(self, number: int) -> None:
        key = build_entry(number).key
        self.store.delete(key)
        self.held.pop(number, None)
        assert key not in self.store

    @rule(number=NUMBERS)
    def damage(self, number: int) -> None:
        self.store.flush()
        path = self.disk.folder.path(build_entry(number).key)
        if path.exists():
            data = bytearray(path.read_bytes())
            data[-1] ^= 255
            path.write_bytes(data)

    @rule(numbers=st.lists(NUMBERS, max_size=4))
    def prefetch(self, numbers: list[int]) -> None:
        self.store.prefetch(build_entry(n).key for n in numbers)

    @rule()
    def restart(self) -> None:
        self.store.close()
        self.open()

    @invariant()
    def within_budgets(self) -> None:
        if hasattr(self, "store"):
            held = self.store.bytes_held
            assert held["memory"] <= self.sizes[0]
            assert held["disk"] <= self.sizes[1]

    @invariant()
    def the_account_is_exact(self) -> None:
        if hasattr(self, "store"):
            self.store.flush()
            assert self.disk.bytes_held["disk"] == file_bytes(self.folder)
            assert sum(info.num_bytes for info in self.disk.entries()) == file_bytes(self.folder)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            shutil.rmtree(self.folder)


TieredMachine.TestCase.settings = settings(max_examples=20, stateful_step_count=20, deadline=None)
TestTieredMachine = TieredMachine.TestCase
