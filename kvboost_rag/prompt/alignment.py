"""Where a chunk's own ids stand in a prompt's ids: tokenizers merge the edges of a text with what stands beside it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

GRAM = 4
"""Ids that must agree for a place to be looked at; also the shortest run that is worth placing."""
SLACK = 24
"""How many ids further on than expected a run may go on: what a tokenizer may make of a few characters."""


@dataclass(frozen=True)
class Run:
    """A chunk's ids `[chunk_start, chunk_start + length)` at `[start, start + length)` of a prompt."""

    chunk_start: int
    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length


def runs_of(chunk: Sequence[int], ids: Sequence[int], low: int, high: int) -> list[Run]:
    """Runs of a chunk's ids in `ids[low:high]`, where its text is known to stand; in order, none overlapping."""
    wanted, text = array("q", chunk), array("q", ids[low:high])
    gram = min(GRAM, len(wanted))
    reach = max(0, len(text) - len(wanted)) + SLACK
    runs: list[Run] = []
    at = place = 0  # what of the chunk, and of the text, is behind us
    while gram and (run := _next(wanted, text, (at, place), gram, reach)) is not None:
        runs.append(Run(run.chunk_start, run.start + low, run.length))
        at, place = run.chunk_start + run.length, run.end
    return runs


def _next(wanted: array[int], text: array[int], done: tuple[int, int], gram: int, reach: int) -> Run | None:
    """The first run after what is done, as long as it goes; it may stand `reach` ids further on than expected."""
    at, place = done
    for first in range(at, len(wanted) - gram + 1):
        last = min(len(text), place + (first - at) + reach + gram)
        found = _find(text, wanted[first : first + gram], place, last)
        if found >= 0:
            before = 0
            while before < min(first - at, found - place) and wanted[first - before - 1] == text[found - before - 1]:
                before += 1
            length, most = gram, min(len(wanted) - first, len(text) - found)
            while length < most and wanted[first + length] == text[found + length]:
                length += 1
            return Run(first - before, found - before, before + length)
    return None


def _find(text: array[int], gram: array[int], low: int, high: int) -> int:
    """The first place of `gram` in `text[low:high]`, or -1."""
    data, size, at = text.tobytes(), text.itemsize, low
    pattern = gram.tobytes()
    while at + len(gram) <= high:
        found = data.find(pattern, at * size, high * size)
        if found < 0 or found % size == 0:
            return found // size if found >= 0 else -1
        at = found // size + 1
    return -1
