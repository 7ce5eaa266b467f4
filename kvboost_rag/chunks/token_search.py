"""Known chunks found in token ids, where no text is at hand: a server's engine sees ids only."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

GRAM = 8
"""Ids that must agree before two places are compared whole."""
EDGE = 2
"""Ids at a chunk's edges that often differ in a prompt, where the tokenizer merges them with what stands beside."""


@dataclass(frozen=True)
class TokenRun:
    """Ids `[chunk_start, chunk_start + length)` of a chunk that stand at `[start, start + length)` of a prompt."""

    key: str
    chunk_start: int
    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length


class TokenIndex:
    """Chunks by their token ids. Not thread-safe.

    Each chunk is entered with two of its 8-grams, one after its first edge and one in its middle, so that it is found
    whatever the tokenizer made of its edges, and its second half also where the first was cut off. A hash only says
    where to compare: what is reported was compared id by id.
    """

    def __init__(self, min_tokens: int = 16) -> None:
        self.min_tokens = max(min_tokens, GRAM)
        self._ids: dict[str, array[int]] = {}
        self._places: defaultdict[int, list[tuple[str, int]]] = defaultdict(list)

    def __len__(self) -> int:
        return len(self._ids)

    def __contains__(self, key: object) -> bool:
        return key in self._ids

    def add(self, key: str, token_ids: Sequence[int]) -> None:
        """Enter a chunk; one that is too short to be looked for is left out."""
        if key in self._ids or len(token_ids) < self.min_tokens:
            return
        self._ids[key] = array("q", token_ids)
        for offset in self._offsets(len(token_ids)):
            self._places[_gram(token_ids, offset)].append((key, offset))

    def remove(self, key: str) -> None:
        """Take a chunk out; one that is not there is no error."""
        ids = self._ids.pop(key, None)
        for offset in self._offsets(len(ids)) if ids is not None else ():
            gram = _gram(ids, offset)  # type: ignore[arg-type]
            left = [place for place in self._places[gram] if place != (key, offset)]
            if left:
                self._places[gram] = left
            else:
                del self._places[gram]

    def find(self, token_ids: Sequence[int]) -> list[TokenRun]:
        """Runs of known chunks in a prompt, from its start, none overlapping; the longest where several fit."""
        ids, runs, done, at = array("q", token_ids), [], 0, 0
        while at + GRAM <= len(ids):
            run = self._longest(ids, at, done)
            if run is not None and run.length >= self.min_tokens:
                runs.append(run)
                done = at = run.end
            else:
                at += 1
        return runs

    def _longest(self, ids: array[int], at: int, done: int) -> TokenRun | None:
        found = [
            _extend(key, self._ids[key], offset, ids, at, done)
            for key, offset in self._places.get(_gram(ids, at), ())
            if self._ids[key][offset : offset + GRAM] == ids[at : at + GRAM]
        ]
        return max(found, key=lambda run: (run.length, run.key), default=None)

    @staticmethod
    def _offsets(length: int) -> list[int]:
        last = length - GRAM
        return sorted({min(EDGE, last), last // 2})


def _gram(ids: Sequence[int], offset: int) -> int:
    return hash(tuple(ids[offset : offset + GRAM]))


def _extend(key: str, chunk: array[int], offset: int, ids: array[int], at: int, done: int) -> TokenRun:
    """The agreement of a chunk with a prompt around one place, as far as it goes to both sides."""
    before = 0
    while before < min(offset, at - done) and chunk[offset - before - 1] == ids[at - before - 1]:
        before += 1
    length, most = GRAM, min(len(chunk) - offset, len(ids) - at)
    while length < most and chunk[offset + length] == ids[at + length]:
        length += 1
    return TokenRun(key, offset - before, at - before, before + length)
