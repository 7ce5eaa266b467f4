"""How much of a model's context the memory of a chat may be told of."""

from __future__ import annotations

from typing import Any

from llama_index.core.memory.chat_memory_buffer import DEFAULT_TOKEN_LIMIT_RATIO

_TYPICAL_TOKENS = 8
"""A short message of a chat. Shorter ones on average need a memory with a `token_limit` of their own."""


def memory_window(tokens: Any, limit: int, answer_tokens: int) -> int:
    """The window of which a memory's share, with the template around each short message, leaves room for an answer.

    Args:
        tokens: `PromptTokens` of the model.
        limit: tokens that prompt and answer may have together.
        answer_tokens: most tokens of an answer; at most half of the limit is kept for it.
    """
    turn = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}]
    one, two = (tokens.count(tokens.render([*turn * n, turn[0]])) for n in (1, 2))
    around = max(0, (two - one) / 2 - 1)
    room = limit - min(answer_tokens, limit // 2) - max(0, 2 * one - two)
    return max(1, int(room / max(1.0, DEFAULT_TOKEN_LIMIT_RATIO * (1 + around / _TYPICAL_TOKENS))))
