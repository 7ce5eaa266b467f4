"""Chunks of about one size, whose ends slide back to the end of a sentence or line."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

from kvboost_rag.config import CHUNK_TOKENS
from kvboost_rag.indexing.chunking.base import Chunker, CountTokens, TextChunk, check_text, trimmed

_SENTENCE_OR_LINE_END = re.compile(r"[.!?…]+[)\]\"'”’»*_]*(?=\s)|[。！？｡]+[」』”’）]*|\n")
_CHARS_PER_TOKEN = 4


@dataclass(frozen=True)
class FixedChunker(Chunker):
    """As many tokens as fit, cut at the last sentence or line end within the slide window.

    Args:
        count_tokens: counts with the tokenizer of the model that the chunks are for.
        chunk_tokens: the most tokens a chunk may have: 64, 128, 256 or 512; None keeps the whole document.
        slide_tokens: how far the end may move back; default an eighth of the chunk. Where no sentence or line ends
            in that window, the cut falls between words; where no word ends either, between characters.
    """

    count_tokens: CountTokens
    chunk_tokens: int | None = 256
    slide_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.chunk_tokens is None:
            return
        if self.chunk_tokens not in CHUNK_TOKENS:
            sizes = ", ".join(map(str, CHUNK_TOKENS))
            raise ValueError(
                f"chunk_tokens={self.chunk_tokens!r}: expected one of {sizes}, or None for whole documents"
            )
        if self.slide_tokens is not None and not 0 <= self.slide_tokens < self.chunk_tokens:
            raise ValueError(f"slide_tokens={self.slide_tokens!r}: expected 0 to {self.chunk_tokens - 1}")

    def split(self, text: str) -> list[TextChunk]:
        check_text(text)
        if self.chunk_tokens is None:
            whole = trimmed(text, 0, len(text))
            return [whole] if whole else []
        slide = self.chunk_tokens // 8 if self.slide_tokens is None else self.slide_tokens
        return cut_by_size(text, 0, len(text), self.chunk_tokens, slide, self.count_tokens)


def cut_by_size(
    text: str, start: int, end: int, max_tokens: int, slide_tokens: int, count_tokens: CountTokens
) -> list[TextChunk]:
    """`text[start:end]` in pieces of at most `max_tokens` (a single character may exceed it)."""
    chunks = []
    whole = trimmed(text, start, end)
    start, end = (whole.start, whole.end) if whole else (end, end)
    while start < end:
        full = _fitting_end(text, start, end, max_tokens, count_tokens)
        cut = full
        if full < end:
            floor = start + round((full - start) * (1 - slide_tokens / max_tokens))
            cut = _natural_end(text, start, floor, full)
            if count_tokens(text[start:cut].rstrip()) > max_tokens:
                cut = full  # a shorter text rarely has more tokens, but it may
        chunks.append(TextChunk(text[start:cut].rstrip(), start, start + len(text[start:cut].rstrip())))
        start = cut
        while start < end and text[start].isspace():
            start += 1
    return chunks


def _fitting_end(text: str, start: int, end: int, max_tokens: int, count_tokens: CountTokens) -> int:
    """The farthest end (within a 64th of the size) at which the text from `start` has at most `max_tokens` tokens."""
    enough = max_tokens - max_tokens // 64
    low, high = start, end + 1  # text[start:low] fits, text[start:high] does not (or is not there)
    guess = min(end, start + _CHARS_PER_TOKEN * max_tokens)
    while high - low > 1:
        num_tokens = count_tokens(text[start:guess].rstrip())
        if num_tokens <= max_tokens:
            low = guess
            if num_tokens >= enough:
                break
        else:
            high = guess
        guess = (low + high) // 2 if high <= end else min(end, low + _CHARS_PER_TOKEN * max_tokens)
    return max(low, _whole_character_end(text, start + 1, end))


def _natural_end(text: str, start: int, floor: int, full: int) -> int:
    """The last sentence or line end in `(floor, full]`, else the last white space there, else `full`."""
    # One character more is shown to the pattern, so that a full stop at the very end sees the space after it.
    ends = [m.end() for m in _SENTENCE_OR_LINE_END.finditer(text, floor, full + 1) if floor < m.end() <= full]
    if ends:
        return ends[-1]
    if text[full].isspace():
        return full
    spaces = [i for i in range(max(floor, start) + 1, full) if text[i].isspace()]
    return spaces[-1] if spaces else max(start + 1, _whole_character_start(text, start, full))


def _whole_character_end(text: str, at: int, end: int) -> int:
    """`at` moved forward past marks that belong to the character before it."""
    while at < end and _continues(text[at]):
        at += 1
    return at


def _whole_character_start(text: str, start: int, at: int) -> int:
    """`at` moved back so that it does not separate a character from its marks."""
    back = at
    while back > start and _continues(text[back]):
        back -= 1
    return back if back > start else at


def _continues(char: str) -> bool:
    """Combining marks, joiners, variation selectors."""
    return unicodedata.category(char) in ("Mn", "Me", "Mc") or char == "\u200d"
