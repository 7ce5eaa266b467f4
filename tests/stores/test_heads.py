"""Heads are the unit that several ranks store: what one wrote, any other number of them can read."""

from __future__ import annotations

import pytest
import torch

from kvboost_rag.datamodels import EntryCheck, StoreEntry
from kvboost_rag.stores import MemoryStore
from kvboost_rag.stores.heads import WHOLE, Heads, head_key

KEY = "ab" * 32
CHECK = EntryCheck("", "model", (1, 2, 3), "context")
FULL = {f"{kind}.0": torch.randn(2, 4, 3, 5) for kind in ("keys", "values")}


def entry(heads: Heads, **meta: str) -> StoreEntry:
    cut = {name: t[:, heads.first : heads.first + heads.count] for name, t in FULL.items()}
    return StoreEntry(KEY, "", "model", (1, 2, 3), "context", cut, meta or {"codec": "none"})


def ranks(size: int) -> list[Heads]:
    return [Heads(rank * 4 // size, 4 // size, 4) for rank in range(size)]


@pytest.mark.parametrize("writers", [1, 2, 4])
@pytest.mark.parametrize("readers", [1, 2, 4])
def test_any_number_of_ranks_reads_what_any_other_wrote(writers: int, readers: int) -> None:
    store = MemoryStore()
    for heads in ranks(writers):
        assert heads.put(store, entry(heads))
    for heads in ranks(readers):
        assert heads.holds(store, KEY)
        found = heads.get(store, KEY, CHECK)
        assert found is not None
        assert found.key == KEY
        for name, tensor in entry(heads).tensors.items():
            assert torch.equal(found.tensors[name], tensor)


def test_a_missing_or_foreign_head_is_a_miss() -> None:
    store = MemoryStore()
    first, second = ranks(2)
    first.put(store, entry(first))
    assert second.get(store, KEY, CHECK) is None
    assert not second.holds(store, KEY)
    whole = Heads(0, 4, 4)
    assert whole.get(store, KEY, CHECK) is None
    second.put(store, entry(second))
    assert whole.get(store, KEY, EntryCheck("other", "model", (1, 2, 3), "context")) is None
    assert whole.get(store, KEY, CHECK) is not None
    store.delete(head_key(KEY, 3))
    assert whole.get(store, KEY, CHECK) is None
    assert first.get(store, KEY, CHECK) is not None


def test_a_whole_entry_is_cut_only_where_its_heads_can_be_told_apart() -> None:
    store = MemoryStore()
    store.put(entry(Heads(0, 4, 4), codec="k8v8"))
    assert Heads(0, 2, 4).get(store, KEY, CHECK) is None
    store.put(entry(Heads(0, 4, 4)))
    assert Heads(0, 2, 4).get(store, KEY, CHECK) is not None
    assert Heads(0, 4, 8).get(store, KEY, CHECK) is None  # of a model with other heads


def test_one_device_keeps_entries_as_they_are() -> None:
    store, whole = MemoryStore(), entry(Heads(0, 4, 4))
    assert WHOLE.put(store, whole)
    assert WHOLE.get(store, KEY, CHECK) is not None
    assert [info.key for info in store.entries()] == [KEY]
