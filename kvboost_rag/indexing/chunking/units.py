"""What a text is made of where cuts are concerned: units that stay whole as long as they fit into a chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvboost_rag.indexing.chunking.base import CountTokens, TextChunk, trimmed
from kvboost_rag.indexing.chunking.fixed import cut_by_size


@dataclass(frozen=True)
class Unit:
    """`source[start:end]`, to be cut inside only if it is larger than a chunk may be.

    Attributes:
        parts: where it is to be cut then; None leaves that to the size (sentence ends, line ends, words).
        depth: how deeply the place before the unit is nested in the text's syntax, where that is known (code).
        leads: belongs to what follows it (a heading).
    """

    start: int
    end: int
    parts: Callable[[], Sequence[Unit]] | None = None
    depth: int = 0
    leads: bool = False


def fitting_units(text: str, units: Iterable[Unit], max_tokens: int, count_tokens: CountTokens) -> list[Unit]:
    """`units` with those that are too large replaced by their parts, down to pieces that fit."""
    fitting: list[Unit] = []
    for unit in units:
        whole = trimmed(text, unit.start, unit.end)
        if whole is None:
            continue
        if count_tokens(whole.text) <= max_tokens:
            fitting.append(unit)
        elif unit.parts is not None:
            fitting += fitting_units(text, unit.parts(), max_tokens, count_tokens)
        else:
            pieces = cut_by_size(text, unit.start, unit.end, max_tokens, max_tokens // 4, count_tokens)
            fitting += [Unit(piece.start, piece.end, depth=unit.depth) for piece in pieces]
    return fitting


def pack(
    text: str,
    units: Sequence[Unit],
    cohesion: Sequence[float],
    threshold: float,
    sizes: tuple[int, int],
    count_tokens: CountTokens,
) -> list[TextChunk]:
    """Put units together into chunks, cutting where they hold together least.

    From left to right: a chunk of at least the minimum size ends at the first gap whose cohesion is below
    `threshold`; one that would grow beyond the maximum ends at its weakest gap after the minimum size.

    Args:
        units: in order, each within the maximum size.
        cohesion: `cohesion[i]` of the gap between `units[i]` and `units[i + 1]`.
        sizes: fewest and most tokens of a chunk. The last chunk of a text, and one before a unit that leaves no
            other choice, may be smaller.
    """
    return _Packer(text, units, cohesion, sizes, count_tokens).run(threshold)


class _Packer:
    def __init__(
        self,
        text: str,
        units: Sequence[Unit],
        cohesion: Sequence[float],
        sizes: tuple[int, int],
        count_tokens: CountTokens,
    ) -> None:
        self.text, self.units, self.cohesion, self.count_tokens = text, units, cohesion, count_tokens
        self.min_tokens, self.max_tokens = sizes

    def run(self, threshold: float) -> list[TextChunk]:
        cuts = [0]
        at = 1
        while at < len(self.units):
            if self._size(cuts[-1], at + 1) > self.max_tokens:
                cuts.append(self._weakest_gap(cuts[-1], at))
                at = cuts[-1]
            elif self.cohesion[at - 1] < threshold and self._size(cuts[-1], at) >= self.min_tokens:
                cuts.append(at)
            at += 1
        cuts.append(len(self.units))
        self._join_short_end(cuts)
        chunks = [self._chunk(a, b) for a, b in pairwise(cuts)]
        return [chunk for chunk in chunks if chunk is not None]

    def _weakest_gap(self, first: int, full: int) -> int:
        """The unit to begin the next chunk with: `full` is the first that does not fit any more."""
        allowed = [i for i in range(first + 1, full + 1) if self._size(first, i) >= self.min_tokens]
        # Of equally weak gaps the last: chunks as large as may be.
        return min(allowed, key=lambda i: (self.cohesion[i - 1], -i)) if allowed else full

    def _join_short_end(self, cuts: list[int]) -> None:
        short = len(cuts) > 2 and self._size(cuts[-2], cuts[-1]) < self.min_tokens
        if short and self._size(cuts[-3], cuts[-1]) <= self.max_tokens:
            del cuts[-2]

    def _chunk(self, first: int, end: int) -> TextChunk | None:
        if first == end:
            return None
        return trimmed(self.text, self.units[first].start, self.units[end - 1].end)

    def _size(self, first: int, end: int) -> int:
        chunk = self._chunk(first, end)
        return self.count_tokens(chunk.text) if chunk else 0
