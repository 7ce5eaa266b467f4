"""KV by heads: each rank of a tensor parallel model keeps its own, and any number of ranks can read what others wrote.

The unit in a store is one head: a chunk of a model on several ranks is one entry a KV head, under a key of its own. A
model on one device keeps chunks whole. Either is read by the other: whole entries are cut, heads are put together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kvboost_rag.datamodels import EntryCheck, StoreEntry
from kvboost_rag.kv.keys import hash_fields
from kvboost_rag.stores.base import Store


def head_key(key: str, head: int) -> str:
    """Key of one head of the entry `key`."""
    return hash_fields("head", key.encode(), str(head).encode())


@dataclass(frozen=True)
class Heads:
    """Which heads of a model live here: `[first, first + count)` of `total`.

    Entries in, entries out have tensors `[num_layers_in_group, count, seq_len, head_dim]`.
    """

    first: int
    count: int
    total: int

    @property
    def whole(self) -> bool:
        """All of them."""
        return self.count == self.total

    @property
    def mine(self) -> range:
        return range(self.first, self.first + self.count)

    def holds(self, store: Store, key: str) -> bool:
        """Whether the store says that it holds what `get` would give."""
        return key in store or all(head_key(key, head) in store for head in self.mine)

    def get(self, store: Store, key: str, check: EntryCheck) -> StoreEntry | None:
        """The heads that live here, from wherever they were stored; None if one is missing or unusable."""
        if self.whole and (key in store or head_key(key, 0) not in store):
            return store.get(key, check)
        parts = [store.get(head_key(key, head), check) for head in self.mine]
        found = [part for part in parts if part is not None]
        if len(found) == self.count:
            names = found[0].tensors
            joined = {name: torch.cat([part.tensors[name] for part in found], dim=1) for name in names}
            return replace(found[0], key=key, tensors=joined)
        entry = store.get(key, check)
        return entry if entry is None or self.whole else self._cut(entry)

    def put(self, store: Store, entry: StoreEntry) -> bool:
        """Keep an entry of the heads that live here; True if it is held afterwards."""
        if self.whole:
            return store.put(entry)
        kept = [store.put(_part(entry, place, head)) for place, head in enumerate(self.mine)]
        return all(kept)

    def _cut(self, entry: StoreEntry) -> StoreEntry | None:
        """Own heads of a whole entry; None where they cannot be told apart in it (quantised, or of another number)."""
        if entry.meta.get("codec", "none") != "none" or any(t.shape[1] != self.total for t in entry.tensors.values()):
            return None
        cut = {name: t[:, self.first : self.first + self.count].contiguous() for name, t in entry.tensors.items()}
        return replace(entry, tensors=cut)


WHOLE = Heads(0, 1, 1)
"""A model on one device."""


def _part(entry: StoreEntry, place: int, head: int) -> StoreEntry:
    tensors = {name: tensor[:, place : place + 1].contiguous() for name, tensor in entry.tensors.items()}
    return replace(entry, key=head_key(entry.key, head), tensors=tensors)
