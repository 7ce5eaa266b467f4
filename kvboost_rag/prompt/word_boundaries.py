"""Where a text may begin or end inside another without cutting a word or a character."""

from __future__ import annotations

from functools import lru_cache

import regex

# Two letters, digits or marks of scripts that put spaces between words (Han, Kana, Thai, Khmer, Burmese do not, and
# have line-break classes of their own), or two code points of one character: é, 👍🏻, parts joined to one emoji.
_JOINED = regex.compile(
    r"(?V1)[[\p{L}\p{N}\p{M}_]--[\p{lb=ID}\p{lb=CJ}\p{lb=SA}\p{script=Javanese}\p{script=Balinese}]]{2}"
    r"|\X|\u200d\p{Extended_Pictographic}"
)


def inside_word(text: str, at: int) -> bool:
    """Whether the characters on both sides of `at` belong to one word or one character; the ends of a text never do."""
    return 0 < at < len(text) and _is_joined(text[at - 1 : at + 1])


@lru_cache(1 << 14)
def _is_joined(pair: str) -> bool:
    return _JOINED.fullmatch(pair) is not None
