"""Single tokens as text and as bytes, for log probabilities. A token may be part of a character."""

from __future__ import annotations

import re
from functools import cache

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def token_text(tokenizer: PreTrainedTokenizerBase, token_id: int) -> tuple[str, bytes]:
    """The token's text, with `\\xe2` and the like for bytes that are no character by themselves, and its bytes."""
    text = str(tokenizer.decode([token_id]))
    if "\ufffd" not in text:
        return text, text.encode()
    written = str(tokenizer.convert_ids_to_tokens(token_id))
    single = _BYTE.fullmatch(written)
    known = _byte_of()
    if single is not None:
        raw = bytes([int(single[1], 16)])
    elif all(c in known for c in written):
        raw = bytes(known[c] for c in written)
    else:
        return text, text.encode()
    return raw.decode(errors="backslashreplace"), raw


@cache
def _byte_of() -> dict[str, int]:
    return {char: byte for byte, char in bytes_to_unicode().items()}
