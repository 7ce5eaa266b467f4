"""Similar chunks encoded in one forward, each after those before it: about one token forwarded per document token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvboost_rag.indexing.neighbours import Contexts
from kvboost_rag.indexing.vector_index import VectorIndex

_CANDIDATES = 32


def group_chunks(
    index: VectorIndex, keys: Sequence[str], num_tokens: Mapping[str, int], size: int = 5, max_tokens: int = 2560
) -> list[tuple[str, ...]]:
    """Divide `keys` into chains of similar chunks, each chunk in one of them.

    A chain grows from its last chunk to the most similar one that is in no chain yet. What is left over alone joins
    the end of the chain of its most similar chunk that has room. The first chunk of a chain has no neighbours, the
    second one, and so on: that is what the lower cost is paid with.

    Args:
        index: the namespace's chunks, `keys` among them.
        num_tokens: of every key.
        size, max_tokens: most chunks and tokens of a chain; a longer chunk makes a chain of its own.

    Returns:
        Chains in order of their first key in `keys`; within a chain in encoding order.
    """
    if size < 1:
        raise ValueError(f"size={size!r}: expected at least 1 chunk a group")
    keys = list(dict.fromkeys(keys))
    wanted = set(keys)
    similar = {
        key: [hit.key for hit in hits if hit.key in wanted]
        for key, hits in zip(keys, index.nearest_to(keys, _CANDIDATES), strict=True)
    }
    return _Chains(similar, num_tokens, size, max_tokens).build(keys)


def group_contexts(groups: Sequence[Sequence[str]], contexts: int = 1) -> Contexts:
    """The encoding contexts that each chunk has in its group: all chunks before it, and for two those after it too."""
    return {
        key: (tuple(group[:place]), tuple(reversed(group[place + 1 :])))[: contexts if len(group) > 1 else 1]
        for group in groups
        for place, key in enumerate(group)
    }


class _Chains:
    def __init__(
        self, similar: Mapping[str, list[str]], num_tokens: Mapping[str, int], size: int, max_tokens: int
    ) -> None:
        self.similar, self.num_tokens, self.size, self.max_tokens = similar, num_tokens, size, max_tokens
        self.chain_of: dict[str, list[str]] = {}

    def build(self, keys: Sequence[str]) -> list[tuple[str, ...]]:
        for key in keys:
            if key not in self.chain_of:
                self._grow(key)
        for key in keys:
            if len(self.chain_of[key]) == 1:
                self._join(key)
        chains = {id(chain): tuple(chain) for chain in (self.chain_of[key] for key in keys)}
        return list(chains.values())

    def _grow(self, key: str | None) -> None:
        chain: list[str] = []
        while key is not None:
            chain.append(key)
            self.chain_of[key] = chain
            fitting = (
                other for other in self.similar[key] if other not in self.chain_of and self._has_room(chain, other)
            )
            key = next(fitting, None)

    def _join(self, key: str) -> None:
        for other in self.similar[key]:
            chain = self.chain_of[other]
            if self._has_room(chain, key):
                chain.append(key)
                self.chain_of[key] = chain
                return

    def _has_room(self, chain: Sequence[str], key: str) -> bool:
        total = sum(self.num_tokens[member] for member in chain) + self.num_tokens[key]
        return len(chain) < self.size and total <= self.max_tokens
