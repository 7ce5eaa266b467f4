"""Finding many texts inside a prompt, verbatim.

Texts are grouped by their first characters; inside a group they are kept sorted, so that the longest text which
starts at a place of the prompt is found by bisection. Thousands of texts behind one shared header cost a few string
comparisons, not thousands.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

WIDTHS = (32, 16, 4, 1)
"""A text is indexed under as many first characters as the widest of these that it is long enough for."""

MIN_FREE_CHARS = 16
"""A shorter text only matches at word boundaries: a document `art` is not looked for inside `party`."""


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

    def run(self) -> Iterator[tuple[int, int]]:
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
        yield from taken

    def _starts(self) -> Iterable[int]:
        """Places where some text's first characters stand, each once."""
        starts: set[int] = set()
        prompt = self.prompt
        for width, index in self.indexes:
            free = width >= MIN_FREE_CHARS
            places = range(len(prompt) - width + 1)
            starts.update(i for i in places if prompt[i : i + width] in index and (free or not _inside_word(prompt, i)))
        return starts

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
                if len(text) >= MIN_FREE_CHARS or self._at_word_boundaries(start, start + len(text)):
                    best = max(best, len(text))
                    break
                head = head[: len(text) - 1]
        return best

    def _at_word_boundaries(self, start: int, end: int) -> bool:
        return not (_inside_word(self.prompt, start) or _inside_word(self.prompt, end))


def _inside_word(prompt: str, at: int) -> bool:
    return 0 < at < len(prompt) and _is_word(prompt[at - 1]) and _is_word(prompt[at])


def _is_word(char: str) -> bool:
    return char == "_" or char.isalnum()


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
