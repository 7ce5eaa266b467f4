"""Which tokens end an answer."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase


def end_of_turn_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The special token with which the chat template closes an assistant's message, or None.

    Found by rendering one: names and config fields for it differ from model to model, and GGUF files often carry
    only one of several.
    """
    if not tokenizer.chat_template:
        return None
    probe = "kvboost"
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": probe}]
    try:
        rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception:  # templates raise what they like; the other sources of ids remain
        return None
    _, found, tail = str(rendered).rpartition(probe)
    if not found:
        return None
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    ids = tokenizer.encode(tail.lstrip(), add_special_tokens=False)
    return ids[0] if ids and ids[0] in special else None


def eos_token_ids(model: Any, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """All of them, ascending: those that the configs and the tokenizer name, and the end of a turn."""
    generation_config = getattr(model, "generation_config", None)
    sources = (
        getattr(generation_config, "eos_token_id", None),
        getattr(model.config, "eos_token_id", None),
        tokenizer.eos_token_id,
        end_of_turn_id(tokenizer),
    )
    ids: set[int] = set()
    for source in sources:
        ids.update(source if isinstance(source, (list, tuple)) else () if source is None else (source,))
    return tuple(sorted(ids))


def complete_generation_config(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, eos_token_ids: tuple[int, ...]
) -> None:
    """`generate` then stops at every id that ends an answer and never guesses a padding token."""
    if tokenizer.pad_token_id is None and tokenizer.eos_token_id is not None:
        tokenizer.pad_token = tokenizer.eos_token
    config = model.generation_config
    if config is None or not eos_token_ids:
        return
    config.eos_token_id = list(eos_token_ids)
    if config.pad_token_id is None:
        config.pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else eos_token_ids[0]
