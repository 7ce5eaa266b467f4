"""Which tokens steer the model rather than spell text, and how to keep a text from producing them."""

from __future__ import annotations

import re
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
