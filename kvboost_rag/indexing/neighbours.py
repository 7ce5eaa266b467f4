"""Which chunks a chunk is encoded behind.

Encoding behind similar chunks of the corpus follows FusionRAG (2025). We choose by sentence embedding within a token
budget, keep the choice in the catalog, and change it only when asked to (`plan_rewarm`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvboost_rag.indexing.vector_index import Hit, VectorIndex

Neighbours = dict[str, tuple[str, ...]]
"""Content hash to the content hashes it is encoded behind, nearest last."""


@dataclass(frozen=True)
class NeighbourRules:
    """How many neighbours a chunk gets.

    Attributes:
        count: most neighbours of a chunk. Four are as good as eight, one gives half the gain (`docs/indexing.md`).
        max_tokens: most tokens of all neighbours of a chunk together. A similar chunk that does not fit any more is
            passed over for the next.
    """

    count: int = 4
    max_tokens: int = 2048

    def __post_init__(self) -> None:
        if self.count < 0 or self.max_tokens < 0:
            raise ValueError(f"neighbours: count={self.count}, max_tokens={self.max_tokens}; expected 0 or more")


def choose_neighbours(
    index: VectorIndex, keys: Sequence[str], num_tokens: Mapping[str, int], rules: NeighbourRules
) -> Neighbours:
    """For each of `keys` the most similar other chunks of the index.

    Args:
        index: the namespace's chunks, `keys` among them.
        num_tokens: of every chunk in the index.
    """
    if rules.count == 0:
        return dict.fromkeys(keys, ())
    # Some more than needed, for those that do not fit into the budget.
    found = index.nearest_to(keys, 2 * rules.count)
    return {key: _within_budget(hits, num_tokens, rules) for key, hits in zip(keys, found, strict=True)}


def _within_budget(hits: Iterable[Hit], num_tokens: Mapping[str, int], rules: NeighbourRules) -> tuple[str, ...]:
    chosen: list[str] = []
    room = rules.max_tokens
    for hit in hits:
        if len(chosen) < rules.count and num_tokens[hit.key] <= room:
            room -= num_tokens[hit.key]
            chosen.append(hit.key)
    return tuple(reversed(chosen))


@dataclass(frozen=True)
class RewarmPlan:
    """What choosing all neighbours anew would change.

    Attributes:
        changes: new neighbours of the chunks worth encoding again.
        num_chunks: chunks looked at.
        num_different: chunks whose best neighbours are others than theirs now, worth it or not.
    """

    changes: Neighbours
    num_chunks: int
    num_different: int

    @property
    def changed_ratio(self) -> float:
        return len(self.changes) / self.num_chunks if self.num_chunks else 0.0


def plan_rewarm(
    index: VectorIndex,
    current: Mapping[str, Sequence[str]],
    num_tokens: Mapping[str, int],
    rules: NeighbourRules,
    min_gain: float = 0.05,
) -> RewarmPlan:
    """Compare each chunk's neighbours with those it would get today.

    A change is worth encoding a chunk again if a neighbour is gone from the index, or if the mean cosine to its
    neighbours (missing ones count 0) rises by `min_gain`.

    Args:
        current: neighbours as the catalog has them; keys that are not in the index are left out.
    """
    keys = [key for key in current if key in index]
    wanted = choose_neighbours(index, keys, num_tokens, rules)
    changes: Neighbours = {}
    num_different = 0
    for key in keys:
        if set(wanted[key]) == set(current[key]):
            continue
        num_different += 1
        gone = any(neighbour not in index for neighbour in current[key])
        if gone or _mean_cosine(index, key, wanted[key]) - _mean_cosine(index, key, current[key]) >= min_gain:
            changes[key] = wanted[key]
    return RewarmPlan(changes, len(keys), num_different)


def _mean_cosine(index: VectorIndex, key: str, neighbours: Sequence[str]) -> float:
    held = [neighbour for neighbour in neighbours if neighbour in index]
    if not held:
        return 0.0
    vector = index.vectors([key])[0]
    return float((index.vectors(held) @ vector).sum()) / len(neighbours)
