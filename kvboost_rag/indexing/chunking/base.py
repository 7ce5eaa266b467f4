"""The contract of a chunker: text in, the texts of chunks out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

CountTokens = Callable[[str], int]
"""Tokens of a text by itself, special tokens not added: `PromptTokens.count`, `len`, or another tokenizer's count."""


@dataclass(frozen=True)
class TextChunk:
    """`text == source[start:end]`, without white space around it."""

    text: str
    start: int
    end: int


class Chunker(ABC):
    """Cuts a text into chunks.

    Contract: chunks stand in order and do not overlap, none is empty, and what lies between two of them is white
    space only. The same text and settings give the same chunks, in any process.
    """

    @abstractmethod
    def split(self, text: str) -> list[TextChunk]:
        """Chunks of `text`; none for a text of white space.

        Raises:
            TypeError: `text` is not a string.
        """


def trimmed(source: str, start: int, end: int) -> TextChunk | None:
    """The chunk `source[start:end]` without white space around it; None if nothing is left."""
    text = source[start:end]
    stripped = text.strip()
    if not stripped:
        return None
    start += len(text) - len(text.lstrip())
    return TextChunk(stripped, start, start + len(stripped))


def check_text(text: object) -> None:
    if not isinstance(text, str):
        raise TypeError(f"text to be cut into chunks must be a str, got {type(text).__name__}")


def check_sizes(min_tokens: int, max_tokens: int) -> None:
    if not 0 <= min_tokens <= max_tokens or max_tokens < 1:
        raise ValueError(
            f"chunk sizes min_tokens={min_tokens}, max_tokens={max_tokens}: expected 0 <= min <= max, max >= 1"
        )
