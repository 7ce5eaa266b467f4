"""Which tokens steer the model rather than spell text, and how to keep a text from producing them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARKUP = re.compile(r"[<\[{|].*[>\]}|]", re.DOTALL)
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
"""Byte-fallback tokens spell text, even in vocabularies that list them among the special tokens."""
_UNREGISTERED = re.compile(r"<\|.+\|>", re.DOTALL)
"""What no vocabulary holds as text. Converted tokenizers do not always register such entries as special."""


def control_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """Ids that steer the model rather than spell text, with what they look like in text."""
    template = str(tokenizer.chat_template or "")
    named = set(getattr(tokenizer, "chat_control_tokens", None) or ())
    control = {token_id: token for token, token_id in tokenizer.get_vocab().items() if _UNREGISTERED.fullmatch(token)}
    control |= dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
    for token_id, token in tokenizer.added_tokens_decoder.items():
        content = token.content
        written = content in template and not content.isspace()
        if token.special or content in named or written or _MARKUP.fullmatch(content.strip()):
            control[token_id] = content
    return {token_id: content for token_id, content in control.items() if not _BYTE.fullmatch(content)}


def cuts_inside(text: str, tokens: set[str]) -> list[int]:
    """Places that leave none of `tokens` whole: after the first character of each occurrence, overlapping ones too."""
    pattern = re.compile("|".join(f"(?={re.escape(token)})" for token in sorted(tokens) if token))
    cuts = set()
    for match in pattern.finditer(text):
        cuts |= {match.start(), match.start() + 1}
    return sorted(cuts - {0, len(text)})


def edges_crossed(text: str, documents: Sequence[tuple[int, int]], tokens: tuple[str, ...]) -> set[int]:
    """Edges of documents that lie inside a control token which a document spells out together with what is beside it.

    A document shorter than the token counts only if all of the token is documents': `|>` is rather found inside a
    token that the prompt's author wrote.

    Args:
        documents: `(start, end)` of each in `text`, ascending.
    """
    edges = set()
    for start, end in documents:
        for edge in (start, end):
            for low, high in _across(text, edge, tokens):
                covered = sum(max(0, min(high, b) - max(low, a)) for a, b in documents) == high - low
                if covered or end - start > high - low:
                    edges.add(edge)
    return edges


def _across(text: str, edge: int, tokens: tuple[str, ...]) -> Iterator[tuple[int, int]]:
    """Where a control token, whatever its case, begins before `edge` and ends after it."""
    by_first = _by_first_character(tokens)
    reach = max((length for lengths in by_first.values() for length in lengths), default=0)
    for low in range(max(0, edge - reach + 1), edge):
        for length, names in by_first.get(text[low].lower(), {}).items():
            if low + length > edge and text[low : low + length].lower() in names:
                yield low, low + length


@lru_cache(8)
def _by_first_character(tokens: tuple[str, ...]) -> dict[str, dict[int, set[str]]]:
    """Lower-case tokens by first character and length."""
    found: dict[str, dict[int, set[str]]] = {}
    for token in tokens:
        if token:
            found.setdefault(token[0].lower(), {}).setdefault(len(token), set()).add(token.lower())
    return found
