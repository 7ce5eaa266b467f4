"""What every store promises, run over all of them."""

from __future__ import annotations

import dataclasses
import threading

import pytest
import torch

from kvboost_rag.stores import Store
from tests.stores.conftest import Make, check_of, same


def test_what_was_put_comes_back_bit_for_bit(store: Store, make_entry: Make) -> None:
    entries = [make_entry(n) for n in range(20)]
    assert all(store.put(e) for e in entries)
    for entry in entries:
        assert same(store.get(entry.key, check_of(entry)), entry)
    store.flush()
    assert sorted(store.keys()) == sorted(e.key for e in entries)
    assert len(store) == 20
    assert (store.stats.lookups, store.stats.hits, store.stats.misses) == (20, 20, 0)


def test_an_absent_key_is_a_counted_miss(store: Store, make_entry: Make) -> None:
    entry = make_entry(1)
    assert store.get(entry.key, check_of(entry)) is None
    assert entry.key not in store
    assert (store.stats.lookups, store.stats.hits, store.stats.misses) == (1, 0, 1)
    assert not store.stats.rejected


@pytest.mark.parametrize(
    ("field", "value"),
    [("namespace", "other"), ("fingerprint", "model-b"), ("token_ids", (9, 9)), ("context_hash", "f" * 64)],
)
def test_an_entry_that_is_not_the_one_asked_for_is_a_miss(
    store: Store, make_entry: Make, field: str, value: object
) -> None:
    entry = make_entry(1)
    store.put(entry)
    check = dataclasses.replace(check_of(entry), **{field: value})
    assert store.get(entry.key, check) is None
    assert store.stats.misses == 1
    assert sum(store.stats.rejected.values()) == 1
    assert same(store.get(entry.key, check_of(entry)), entry)


def test_a_new_version_replaces_the_old_one(store: Store, make_entry: Make) -> None:
    old, new = make_entry(1), make_entry(1, context=(5, 6), version=1)
    store.put(old)
    held = {}
    store.flush()
    held.update(store.bytes_held)
    store.put(new)
    store.flush()
    assert store.get(old.key, check_of(old)) is None
    assert same(store.get(new.key, check_of(new)), new)
    assert len(store) == 1
    assert store.bytes_held.keys() == held.keys()


def test_delete_removes_from_every_tier(store: Store, make_entry: Make) -> None:
    entry, other = make_entry(1), make_entry(2)
    store.put(entry)
    store.put(other)
    assert store.delete(entry.key)
    assert not store.delete(entry.key)
    store.flush()
    assert entry.key not in store
    assert store.get(entry.key, check_of(entry)) is None
    assert store.stats.evictions["deleted"] == 1
    assert same(store.get(other.key, check_of(other)), other)
    assert store.delete(other.key)
    assert not any(store.bytes_held.values())


@pytest.mark.parametrize("transposed", [False, True])
def test_a_view_is_stored_without_what_it_was_cut_from(store: Store, make_entry: Make, transposed: bool) -> None:
    prompt = torch.arange(1_000_000, dtype=torch.float32)
    view = prompt[10:30].view(4, 5)
    view = view.T if transposed else view
    entry = dataclasses.replace(make_entry(1), tensors={"keys": view, "same": view})
    assert store.put(entry)
    store.flush()
    found = store.get(entry.key, check_of(entry))
    assert same(found, entry)
    assert all(t.untyped_storage().nbytes() == 80 for t in found.tensors.values())


def test_empty_and_scalar_tensors(store: Store, make_entry: Make) -> None:
    entry = dataclasses.replace(make_entry(1), tensors={"empty": torch.empty(2, 0, 3), "scalar": torch.tensor(7)})
    assert store.put(entry)
    assert same(store.get(entry.key, check_of(entry)), entry)


def test_prefetch_of_known_and_unknown_keys(store: Store, make_entry: Make) -> None:
    entries = [make_entry(n) for n in range(6)]
    for entry in entries[:5]:
        store.put(entry)
    store.flush()
    store.prefetch([e.key for e in entries] * 2)
    for entry in entries[:5]:
        assert same(store.get(entry.key, check_of(entry)), entry)
    assert store.get(entries[5].key, check_of(entries[5])) is None


def test_many_threads(store: Store, make_entry: Make) -> None:
    entries = [make_entry(n) for n in range(12)]
    wrong: list[str] = []

    def work(start: int) -> None:
        for i in range(40):
            entry = entries[(start * 5 + i * 7) % len(entries)]
            found = store.get(entry.key, check_of(entry))
            if found is not None and not same(found, entry):
                wrong.append(entry.key)
            if i % 3 == 0:
                store.put(entry)
            if i % 11 == 0:
                store.delete(entry.key)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store.flush()
    assert not wrong
    assert store.stats.lookups == 240 == store.stats.hits + store.stats.misses
    assert not store.stats.rejected
