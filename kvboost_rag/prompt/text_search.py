"""Finding many texts inside a prompt, verbatim.

Texts are grouped by their first characters; inside a group they are kept sorted, so that the longest text which
starts at a place of the prompt is found by bisection. Thousands of texts after one shared header cost a few string
comparisons, not thousands.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from kvboost_rag.prompt.word_boundaries import inside_word

WIDTHS = (32, 16, 4, 1)
"""A text is indexed under as many first characters as the widest of these that it is long enough for."""

MIN_FREE_CHARS = 16
"""A shorter text never begins or ends inside a word, not even beside another one."""


@dataclass
class Bucket:
    """Texts that share their first characters, sorted."""

    texts: list[str] = field(default_factory=list)
    max_chars: int = 0
    """Never lowered: an upper bound is enough."""

    def add(self, text: str) -> None:
        insort(self.texts, text)
        self.max_chars = max(self.max_chars, len(text))

    def remove(self, text: str) -> None:
        del self.texts[bisect_left(self.texts, text)]

    def longest_prefix(self, head: str) -> str | None:
        """The longest text that `head` starts with.

        Whatever `head` starts with sorts at or below it, and so does everything between the two, which then shares
        that beginning: the neighbour below `head` either is the answer or bounds it by the characters it shares.
        """
        while head:
            at = bisect_right(self.texts, head) - 1
            if at < 0:
                return None
            if head.startswith(self.texts[at]):
                return self.texts[at]
            head = head[: _num_common_chars(head, self.texts[at])]
        return None


class Search:
    """One pass over one prompt."""

    def __init__(self, prompt: str, sources: Sequence[dict[int, dict[str, Bucket]]]) -> None:
        self.prompt = prompt
        self.indexes = [(width, source[width]) for width in WIDTHS for source in sources if source[width]]
        self._allowed: set[int] | None = None  # places inside words where long texts may begin and end; None: all

    def run(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """The longest texts that begin and end at word boundaries, or where another one ends and begins.

        Whether a text has such a neighbour shows only when all are found: they are looked for without regard to words,
        and once more, nearly never, where some turn out to stand inside a word alone. Each time fewer places are
        allowed.

        Returns:
            Their places, and those of texts, or what is left of them, that stand in part of a word; both ascending.
        """
        first: list[tuple[int, int]] | None = None
        while True:
            taken = self._greedy()
            first = taken if first is None else first
            kept = self._in_whole_words(taken)
            if len(kept) == len(taken):
                return taken, [] if taken is first else list(_outside(first, taken))
            edges = {edge for span in kept for edge in span}
            self._allowed = edges if self._allowed is None else self._allowed & edges

    def _greedy(self) -> list[tuple[int, int]]:
        """Greedy by length: each place offers its longest text, and a shorter one after it lost to a neighbour."""
        queue = [(-end + start, start) for start, end in self._offers(self._starts())]
        heapq.heapify(queue)
        taken: list[tuple[int, int]] = []
        while queue:
            negative_chars, start = heapq.heappop(queue)
            end = start - negative_chars
            at = bisect_right(taken, (start, len(self.prompt)))
            if at and taken[at - 1][1] > start:
                continue
            if at < len(taken) and taken[at][0] < end:
                for _, shorter_end in self._offers([start], limit=taken[at][0] - start):
                    heapq.heappush(queue, (start - shorter_end, start))
                continue
            insort(taken, (start, end))
        return taken

    def _in_whole_words(self, taken: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Those of `taken` whose edges lie inside no word, or on the edge of another one of them."""
        while True:
            starts, ends = {start for start, _ in taken}, {end for _, end in taken}
            kept = [
                (start, end)
                for start, end in taken
                if (start in ends or not inside_word(self.prompt, start))
                and (end in starts or not inside_word(self.prompt, end))
            ]
            if len(kept) == len(taken):
                return kept
            taken = kept

    def _starts(self) -> Iterable[int]:
        """Places where some text's first characters stand, each once."""
        starts: set[int] = set()
        prompt = self.prompt
        for width, index in self.indexes:
            places = range(len(prompt) - width + 1)
            starts.update(i for i in places if prompt[i : i + width] in index and self._may_cut(i, width))
        return starts

    def _may_cut(self, at: int, num_chars: int) -> bool:
        """Whether a text of so many characters may begin or end here."""
        if num_chars >= MIN_FREE_CHARS and (self._allowed is None or at in self._allowed):
            return True
        return not inside_word(self.prompt, at)

    def _offers(self, starts: Iterable[int], limit: int | None = None) -> Iterator[tuple[int, int]]:
        for start in starts:
            if chars := self._longest_at(start, len(self.prompt) if limit is None else limit):
                yield start, start + chars

    def _longest_at(self, start: int, limit: int) -> int:
        """Characters of the longest known text at `start` that is no longer than `limit`; 0 if there is none."""
        best = 0
        for width, index in self.indexes:
            bucket = index.get(self.prompt[start : start + width])
            if bucket is None:
                continue
            head = self.prompt[start : start + min(limit, bucket.max_chars)]
            while text := bucket.longest_prefix(head):
                if self._may_cut(start, len(text)) and self._may_cut(start + len(text), len(text)):
                    best = max(best, len(text))
                    break
                head = head[: len(text) - 1]
        return best


def _outside(spans: Sequence[tuple[int, int]], taken: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """What of `spans` none of `taken` covers; all ascending."""
    for start, end in spans:
        for low, high in taken:
            if low < end and start < high:
                if start < low:
                    yield start, low
                start = high
        if start < end:
            yield start, end


def width_of(text: str) -> int:
    return next(width for width in WIDTHS if len(text) >= width)


def _num_common_chars(left: str, right: str) -> int:
    """Length of the longest common beginning, by bisection over slices (compared in C)."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left.startswith(right[:middle]):
            low = middle
        else:
            high = middle - 1
    return low
