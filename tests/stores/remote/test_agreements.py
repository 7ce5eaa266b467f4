"""Machines that share a store agree on contexts, and what one deletes is gone from all of them."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvboost_rag.stores import DiskStore, MemoryStore, StoreError, TieredStore
from kvboost_rag.stores.maintenance import delete_namespace, evict_all, forget, set_contexts
from kvboost_rag.stores.remote import agreements
from kvboost_rag.stores.remote.agreements import TOMBSTONES, Deletion
from kvboost_rag.stores.remote.shared import SharedStore
from kvboost_rag.stores.verify import gc, verify
from tests.stores.conftest import build_entry, build_record, check_of, same
from tests.stores.remote import servers
from tests.stores.remote.connecting import connect


class Machine:
    """What one machine has: memory over its own disk over what all share."""

    def __init__(self, folder: Path, url: str) -> None:
        self.shared = SharedStore(DiskStore(folder, 10**8), connect(url))
        self.store = TieredStore(MemoryStore(10**8), self.shared)
        self.store.refresh()
        self.catalog = self.store.catalog

    def know(self, *numbers: int) -> None:
        self.store.refresh()
        self.catalog.add_many([build_record(n) for n in numbers])

    def choose(self, number: int, *neighbours: int) -> Any:
        """Give a chunk a context, as choosing similar chunks does; what it has then."""
        record = dataclasses.replace(build_record(number), neighbours=tuple(key(n) for n in neighbours))
        set_contexts(self.store, [record])
        return self.catalog.get(key(number))

    def encode(self, number: int) -> Any:
        record = self.catalog.get(key(number))
        entry = dataclasses.replace(build_entry(number), context_hash=self.catalog.context_hash(record))
        assert self.store.put(entry)
        self.store.flush()
        return entry

    def found(self, number: int) -> Any:
        check = dataclasses.replace(
            check_of(build_entry(number)), context_hash=self.catalog.context_hash(self.catalog.get(key(number)))
        )
        return self.store.get(key(number), check)


def key(number: int) -> str:
    return build_record(number).content_hash


@pytest.fixture
def machines(remote: Any, url: str, tmp_path: Path) -> Iterator[list[Machine]]:
    made = [Machine(tmp_path / str(n), url) for n in range(3)]
    yield made
    for machine in made:
        machine.store.close()


def test_the_first_machine_to_choose_a_context_chooses_for_all(machines: list[Machine]) -> None:
    one, two, three = machines
    one.know(1, 2, 3)
    two.know(1, 2, 3)
    chosen = one.choose(1, 2, 3)
    assert two.choose(1, 3) == chosen
    entry = one.encode(1)
    assert same(two.found(1), entry)
    three.know(1, 4)  # it does not know the neighbours, and never their texts
    assert three.choose(1, 4).neighbours == chosen.neighbours
    assert same(three.found(1), entry)
    assert three.catalog.get(key(2)) is None
    assert all(verify(machine.store).problems == [] for machine in machines)
    three.know(2)
    assert three.catalog.get(key(2)) == build_record(2)
    assert three.catalog.get(key(1)).neighbours == chosen.neighbours


def test_claims_at_the_same_moment_have_one_winner(machines: list[Machine]) -> None:
    for machine in machines:
        machine.know(*range(20))
    found: list[list[Any]] = [[], [], []]
    gate = threading.Barrier(3)

    def claim(place: int) -> None:
        gate.wait()
        for number in range(10):
            found[place].append(machines[place].choose(number, 10 + (number + place) % 10).neighbours)

    threads = [threading.Thread(target=claim, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == found[1] == found[2]


def test_who_encodes_as_claimed_may_change_its_mind(machines: list[Machine]) -> None:
    one, two, _ = machines
    for machine in (one, two):
        machine.know(1, 2, 3)
        machine.choose(1, 2)
    one.encode(1)
    assert one.choose(1, 3).neighbours == (key(3),)
    assert two.found(1) is None or two.catalog.get(key(1)).neighbours == (key(2),)
    assert two.choose(1, 2).neighbours == (key(3),), "the new claim counts"


def test_a_delete_reaches_every_tier_of_every_machine(machines: list[Machine], url: str) -> None:
    one, two, three = machines
    for machine in machines:
        machine.know(1, 2, 3)
        machine.choose(1, 2)
    one.encode(1)
    one.encode(2)
    for machine in (two, three):
        assert machine.found(1) is not None
        assert machine.found(2) is not None
    block = build_entry(77)  # an exact block of the namespace: it may hold tokens of any chunk
    two.store.put(block)
    two.store.flush()
    forget(one.store, [key(2)])
    assert key(1) not in one.store
    backend = one.shared.tiers[1].backend
    assert not backend.names(key(2))
    assert not [name for name in backend.names(key(1)) if not name.startswith("c-")]
    for machine in (two, three):
        machine.store.refresh()
        assert machine.catalog.get(key(2)) is None
        assert machine.catalog.get(key(1)).neighbours == ()
        for number in (1, 2, 77):
            assert not any(key(number) in tier or build_entry(number).key in tier for tier in machine.store.tiers[:1])
            assert machine.shared.tiers[0].load(key(number)) == (None, None)
        assert verify(machine.store).problems == []
        assert machine.catalog.erasures.pending() == []
    two.know(2)
    two.encode(2)
    three.store.refresh()
    two.store.refresh()
    one.store.refresh()
    assert two.found(2) is not None, "what is made known again is not deleted again"


def test_a_machine_that_was_away_learns_of_it_when_it_opens(machines: list[Machine], url: str, tmp_path: Path) -> None:
    one, two, _ = machines
    two.know(1, 2)
    two.choose(1, 2)
    two.encode(1)
    two.encode(2)
    two.store.close()
    one.know(2)
    forget(one.store, [key(2)])
    # One does not know that 1 is encoded behind 2; the shared store does.
    assert not [n for n in one.shared.tiers[1].backend.names(key(1)) if n.startswith(("m-", "p-"))]
    again = Machine(tmp_path / "1", url)
    assert again.catalog.get(key(2)) is None
    assert not again.store.is_here(key(1))
    assert not again.store.is_here(key(2))
    again.know(2)
    again.store.close()
    assert Machine(tmp_path / "1", url).catalog.get(key(2)) is not None, "seen once, on every start"
    machines[1] = Machine(tmp_path / "new", url)


@pytest.mark.parametrize("how", ["namespace", "all"])
def test_whole_namespaces(machines: list[Machine], how: str) -> None:
    one, two, three = machines
    entry = build_entry(5, namespace="acme")
    record = build_record(5, namespace="acme")
    for machine in (two, three):
        machine.know(1)
        machine.catalog.add(record)
    two.store.put(entry)
    two.store.flush()
    one.catalog.add(record)
    if how == "all":
        evict_all(one.store)
    else:
        delete_namespace(one.store, "acme")
    for machine in (two, three):
        machine.store.refresh()
        assert machine.store.tier_of(entry.key) is None
        assert machine.catalog.get(entry.key) is None
        assert machine.catalog.get(key(1)) is not None, "its namespace was not among those that one knew"


def test_what_is_shared_after_it_was_deleted_is_taken_back(machines: list[Machine], monkeypatch: Any) -> None:
    one, two, _ = machines
    for machine in (one, two):
        machine.know(1, 2)
        machine.choose(1, 2)
    plain = two.shared.tiers[1].put

    def put(entry: Any) -> bool:
        forget(one.store, [key(2)])  # while it is on its way
        return plain(entry)

    monkeypatch.setattr(two.shared.tiers[1], "put", put)
    two.encode(1)
    two.store.close()
    machines.remove(two)
    names = one.shared.tiers[1].backend.names(key(1))
    assert not [name for name in names if name.startswith(("m-", "p-"))]


def test_nothing_is_deleted_here_alone(tmp_path: Path) -> None:
    with servers.valkey(tmp_path / "server") as server:
        machine = Machine(tmp_path / "kv", server.url)
        machine.know(1)
        server.kill()
        with pytest.raises(StoreError, match=r"cannot be (told|listed)"):
            forget(machine.store, [key(1)])
        assert machine.catalog.get(key(1)) is not None
        machine.store.refresh()  # and nothing is raised
        assert machine.choose(1) is not None
        machine.store.close()


def test_tombstones_hold_no_text_and_go_after_a_while(machines: list[Machine], monkeypatch: Any) -> None:
    one = machines[0]
    one.know(1)
    forget(one.store, [key(1)])
    backend = one.shared.tiers[1].backend
    (name,) = backend.names(TOMBSTONES)
    data = backend.get(TOMBSTONES, [name])[0]
    assert data is not None
    assert key(1).encode() not in data
    assert build_record(1).text.encode() not in data
    later = agreements.time.time() + agreements.KEPT_S + 1
    monkeypatch.setattr(agreements.time, "time", lambda: later)
    one.shared.tiers[1].agreements.bury(Deletion())
    assert name not in backend.names(TOMBSTONES)


def test_damaged_or_unsigned_words_are_not_believed(machines: list[Machine], url: str) -> None:
    one, two, _ = machines
    for machine in (one, two):
        machine.know(1, 2)
    backend = one.shared.tiers[1].backend
    body = json.dumps({"digests": [], "touched": [], "whole": [""]}).encode()
    backend.create(TOMBSTONES, "000000000000001-aa", b"0" * 72 + body)
    backend.create(key(1), agreements.CLAIM + agreements._frame_of(build_record(1)), b"no claim")
    one.store.refresh()
    assert one.catalog.get(key(1)) is not None
    assert one.choose(1, 2).neighbours == (key(2),)
    signed = connect(url, secret=b"s3cret")
    assert [d for _, d in signed.agreements.deletions(set())] == [None]
    signed.close()


def test_a_tombstone_that_is_not_written_yet_is_waited_for(machines: list[Machine], monkeypatch: Any) -> None:
    one, two, _ = machines
    for machine in (one, two):
        machine.know(1)
    backend = two.shared.tiers[1].backend
    with monkeypatch.context() as patch:
        patch.setattr(backend, "get", lambda key, names: [None for _ in names])
        forget(one.store, [key(1)])
        two.store.refresh()
    assert two.catalog.get(key(1)) is not None
    two.store.refresh()
    assert two.catalog.get(key(1)) is None


def test_gc_takes_back_what_was_left_behind(machines: list[Machine]) -> None:
    one, _, _ = machines
    one.know(1)
    one.encode(1)
    one.shared.tiers[1].put(build_entry(9))  # a chunk's value whose chunk was deleted while its writer died
    one.catalog.add(build_record(9))
    forget(one.shared.tiers[0], [key(9)])
    found = {(problem.what, problem.key) for problem in verify(one.store).problems}
    assert found == {("deleted, but shared", build_entry(9).key)}
    assert gc(one.store).removed == {"shared": 1}
    assert verify(one.store).problems == []
    assert not one.shared.tiers[1].backend.names(build_entry(9).key)
    assert one.shared.tiers[1].backend.names(key(1))
