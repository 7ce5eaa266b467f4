"""Which beginnings of prompts are turns of conversations that were served: those are served exactly from then on.

A conversation's documents are approximate in the turn that brings them and exact in every later one. That must not
depend on how far settling got, on eviction or on a restart, so it is noted when a turn is served, and looked up here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from kvboost_rag.chunks.prefix_cache import PrefixCache
from kvboost_rag.kv.keys import prefix_hash
from kvboost_rag.stores.catalog.chunk_arrays import ChunkArrays

KIND = "prompt/turns"
MAX_TAILS = 16
"""Ends that are remembered after one block; more only where many short prompts begin alike."""


class ServedTurns:
    """Remembers ends of served turns, as prefix hashes: no text and no ids are kept.

    An end lies `tail` tokens after a whole block; the block's key leads to the tails, and the hash of block and tail
    says whether that very turn was served. Thread-safe; survives a restart where the store does.
    """

    def __init__(self, prefixes: PrefixCache) -> None:
        self._prefixes = prefixes

    def note(self, token_ids: Sequence[int], ends: Iterable[int], namespace: str) -> None:
        """A prompt was served: from now on it is known up to each of the `ends` (positions in `token_ids`).

        Ends in front of the first whole block are passed over.
        """
        table = self._table(namespace)
        for end in sorted(set(ends)):
            blocks = self._prefixes.blocks(token_ids[:end], namespace)
            whole = self._prefixes.whole(end)
            if not whole:
                continue
            key, tail = blocks[-1 if whole == end else -2][0], end - whole
            known = table.get([key]).get(key, np.zeros(0, np.int32)).tolist()
            tails = [tail, *(t for t in known if t != tail)][:MAX_TAILS]
            table.put({key: np.array(tails), self._end_key(key, token_ids[whole:end], namespace): np.zeros(0)})

    def reach(self, token_ids: Sequence[int], namespace: str) -> list[int]:
        """All ends of served turns in a prompt, the farthest first."""
        whole = self._prefixes.whole(len(token_ids))
        blocks = self._prefixes.blocks(token_ids[:whole], namespace)
        table = self._table(namespace)
        tails, candidates, end = table.get(key for key, _, _ in blocks), {}, 0
        for key, _, ids in blocks:
            end += len(ids)
            for tail in tails[key].tolist() if key in tails else ():
                if end + tail <= len(token_ids):
                    candidates[self._end_key(key, token_ids[end : end + tail], namespace)] = end + tail
        known = table.get(candidates)
        return sorted((end for key, end in candidates.items() if key in known), reverse=True)

    def _end_key(self, block: str, tail: Sequence[int], namespace: str) -> str:
        return prefix_hash(self._prefixes.fingerprint, namespace, f"turn/{block}", tail)

    def _table(self, namespace: str) -> ChunkArrays:
        return self._prefixes.store.catalog.arrays(KIND, self._prefixes.fingerprint, namespace, np.int32)
