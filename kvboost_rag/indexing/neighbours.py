"""What a chunk is encoded after.

Encoding after similar chunks of the corpus follows FusionRAG (2025). We add what stands before the chunk in its own
document, choose by sentence embedding within a token budget, keep the choice in the catalog, and change it only when
asked to (`plan_rewarm`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvboost_rag.indexing.vector_index import VectorIndex

Contexts = dict[str, tuple[tuple[str, ...], ...]]
"""Content hash to the contexts that a chunk is encoded after: content hashes, nearest last."""

Places = Mapping[str, tuple[str, str]]
"""Of chunks that stand after others in a document: its first chunk, and the one just before."""


@dataclass(frozen=True)
class NeighbourRules:
    """How many chunks a chunk is encoded after.

    Attributes:
        count: most chunks in a context. Four are as good as eight, one gives half the gain (`docs/indexing.md`).
        max_tokens: most tokens of all chunks of a context together. A similar chunk that does not fit any more is
            passed over for the next.
        contexts: how many contexts a chunk gets.
    """

    count: int = 4
    max_tokens: int = 2048
    contexts: int = 1

    def __post_init__(self) -> None:
        if self.count < 0 or self.max_tokens < 0:
            raise ValueError(f"neighbours: count={self.count}, max_tokens={self.max_tokens}; expected 0 or more")
        if self.contexts < 1:
            raise ValueError(f"contexts={self.contexts}: expected 1 or more")


def choose_contexts(
    index: VectorIndex,
    keys: Sequence[str],
    num_tokens: Mapping[str, int],
    rules: NeighbourRules,
    places: Places | None = None,
) -> Contexts:
    """What each of `keys` is encoded after.

    The first context is the most similar other chunks, then the head of the chunk's own document, then the chunk before
    it, as far as these are known: what stands nearest comes first when room is given. Further contexts are the next
    similar chunks, none twice.

    Args:
        index: the namespace's chunks, `keys` among them.
        num_tokens: of every chunk in the index.
        places: of the chunks that stand after others in a document.
    """
    if rules.count == 0:
        return dict.fromkeys(keys, ((),))
    # Some more than needed, for those that do not fit into the budget.
    found = index.nearest_to(keys, 2 * rules.count * rules.contexts)
    return {
        key: _contexts(key, [hit.key for hit in hits], (places or {}).get(key, ()), num_tokens, rules)
        for key, hits in zip(keys, found, strict=True)
    }


def _contexts(
    key: str, similar: Sequence[str], place: Sequence[str], num_tokens: Mapping[str, int], rules: NeighbourRules
) -> tuple[tuple[str, ...], ...]:
    before = [k for k in dict.fromkeys(reversed(place)) if k != key]  # nearest first
    candidates = [*before, *(k for k in similar if k not in before)]
    contexts: list[tuple[str, ...]] = []
    while len(contexts) < rules.contexts:
        context, room = list[str](), rules.max_tokens
        for candidate in candidates:
            if len(context) < rules.count and num_tokens[candidate] <= room:
                room -= num_tokens[candidate]
                context.append(candidate)
        if not context and contexts:
            break
        contexts.append(tuple(reversed(context)))
        candidates = [k for k in candidates if k not in context]
    return tuple(contexts)


@dataclass(frozen=True)
class RewarmPlan:
    """What choosing all contexts anew would change.

    Attributes:
        changes: new contexts of the chunks worth encoding again.
        num_chunks: chunks looked at.
        num_different: chunks whose best contexts are others than theirs now, worth it or not.
    """

    changes: Contexts
    num_chunks: int
    num_different: int

    @property
    def changed_ratio(self) -> float:
        return len(self.changes) / self.num_chunks if self.num_chunks else 0.0


def plan_rewarm(
    index: VectorIndex,
    current: Mapping[str, Sequence[Sequence[str]]],
    num_tokens: Mapping[str, int],
    rules: NeighbourRules,
    places: Places | None = None,
    min_gain: float = 0.05,
) -> RewarmPlan:
    """Compare each chunk's contexts with those it would get today.

    A change is worth encoding a chunk again if a chunk that it was encoded after is gone, if another one stands before
    it in its document now, if it has fewer contexts than it would get, or if the mean cosine to the chunks in them
    (missing ones count 0) rises by `min_gain`.

    Args:
        current: contexts as the catalog has them; keys that are not in the index are left out.
    """
    keys = [key for key in current if key in index]
    wanted = choose_contexts(index, keys, num_tokens, rules, places)
    changes: Contexts = {}
    num_different = 0
    for key in keys:
        if [set(context) for context in wanted[key]] == [set(context) for context in current[key]]:
            continue
        num_different += 1
        held, new = _flat(current[key]), _flat(wanted[key])
        gone = any(neighbour not in index for neighbour in held)
        moved = key in (places or {}) and not {k for k in (places or {})[key] if k in new} <= set(current[key][0])
        fewer = len(current[key]) < len(wanted[key])
        if gone or moved or fewer or _mean_cosine(index, key, new) - _mean_cosine(index, key, held) >= min_gain:
            changes[key] = wanted[key]
    return RewarmPlan(changes, len(keys), num_different)


def _flat(contexts: Sequence[Sequence[str]]) -> list[str]:
    return [key for context in contexts for key in context]


def _mean_cosine(index: VectorIndex, key: str, neighbours: Sequence[str]) -> float:
    held = [neighbour for neighbour in neighbours if neighbour in index]
    if not held:
        return 0.0
    vector = index.vectors([key])[0]
    return float((index.vectors(held) @ vector).sum()) / len(neighbours)
